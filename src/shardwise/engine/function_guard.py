"""A torch.autograd.Function that would lose the gradient of a distributed tensor raises instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.context import functions
from shardwise.engine.call_shape import op_name
from shardwise.errors import AutogradError
from shardwise.wrapper import Wrapper


def check_gradient_is_kept(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raise if `func` is called inside of a Function that C++ autograd applied to a distributed tensor.

    C++ autograd does not see the local tensors, so the gradient would be lost. `custom_function` replaces
    `Function.apply` by one that does; a program that had stored torch's own `apply` before this package was imported
    goes past it. Call this where grad mode and forward-mode grad are both off, which only a Function's forward and
    inference mode do.
    """
    if functions.applying or torch.is_inference_mode_enabled():
        return
    for arg in args:
        if isinstance(arg, Wrapper) and arg._layout.mesh.comm.first(arg._local).requires_grad:
            raise AutogradError(
                f"{op_name(func)} on a distributed tensor that requires grad inside a torch.autograd.Function whose "
                f"`apply` was taken before shardwise was imported: its gradient would be lost. Import shardwise before "
                f"the module that defines the Function, or call MyFunction.apply(x) itself"
            )
