"""Distributed tensors that a Function of plain tensors makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import Function

from shardwise.custom_function.forms import Distributed
from shardwise.custom_function.node import torchs_apply
from shardwise.errors import AutogradError
from shardwise.protocols import Ctx
from shardwise.torch_private.tensors import requires_grad_in_cpp, without_torch_function
from shardwise.wrapper import Wrapper


class _Unwrapped(Function):
    """The local tensors of a distributed one that C++ recorded as the result of a Function."""

    @staticmethod
    def forward(ctx: Ctx, tensor: Wrapper) -> tuple[torch.Tensor, ...]:
        ctx.form = Distributed(tensor)
        return tuple(part.detach() for part in ctx.form.flat(tensor))

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and any(g.requires_grad for g in grads):
            raise AutogradError(
                "second derivatives through a torch.autograd.Function that makes a DTensor of plain tensors would be "
                "lost; make the DTensor outside of it, with DTensor.from_local or distribute_tensor"
            )
        return ctx.form.gradient(grads, True)


def with_local_graph(tensor: object) -> Any:
    """A result whose graph C++ recorded on the wrapper, where nobody looks, with the graph on its local tensors."""
    if not isinstance(tensor, Wrapper):
        return tensor
    with without_torch_function():
        if not requires_grad_in_cpp.__get__(tensor):
            return tensor
    form = Distributed(tensor)
    return form.value(torchs_apply(_Unwrapped, tensor))
