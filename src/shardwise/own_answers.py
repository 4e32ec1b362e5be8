"""Functions of torch that the tensor class answers itself, by a method or attribute of its own.

torch may ask for them by the function (`torch.Tensor.item(x)`) instead of by the method (`x.item()`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.autograd import backward
from shardwise.engine.call import SPECIAL
from shardwise.torch_private import make_dual

_METHODS = (
    "__repr__ __deepcopy__ __reduce_ex__ __array__ __bool__ __int__ __float__ __index__ __complex__ __format__ "
    "backward requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook detach_ item tolist numpy "
    "is_conj is_neg"
).split()
_READ = "requires_grad grad grad_fn is_leaf retains_grad data _version".split()
_WRITTEN = "requires_grad grad data".split()


def register() -> None:
    """Have the engine pass these functions to the tensor."""
    SPECIAL[torch.autograd.backward] = backward.backward
    SPECIAL[torch.autograd.grad] = backward.grad
    SPECIAL[make_dual] = backward.make_dual
    SPECIAL[torch.is_conj], SPECIAL[torch.is_neg] = _method("is_conj"), _method("is_neg")
    for name in _METHODS:
        SPECIAL[getattr(torch.Tensor, name)] = _method(name)
    for name in _READ:
        SPECIAL[getattr(torch.Tensor, name).__get__] = lambda self, name=name: getattr(self, name)
    for name in _WRITTEN:
        SPECIAL[getattr(torch.Tensor, name).__set__] = lambda self, value, name=name: setattr(self, name, value)


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
