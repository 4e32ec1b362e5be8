"""Functions of torch that the tensor class answers by a method or attribute of its own: `torch.Tensor.item(x)` is
`x.item()`. No rule is asked for them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from shardwise.autograd import backward, forward
from shardwise.engine.call import SPECIAL
from shardwise.torch_private.tensors import make_dual, unpack_dual

_METHODS = (
    "__repr__ __deepcopy__ __reduce_ex__ __array__ __bool__ __int__ __float__ __index__ __complex__ __format__ "
    "backward requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook detach_ item tolist numpy "
    "is_conj is_neg get_device"
).split()


def take_functions() -> None:
    """Have the engine hand these functions to the tensor class."""
    SPECIAL.update({torch.autograd.backward: backward.backward, torch.autograd.grad: backward.grad})
    SPECIAL.update({make_dual: forward.make_dual, unpack_dual: forward.unpack_dual})
    SPECIAL.update({torch.is_conj: _method("is_conj"), torch.is_neg: _method("is_neg")})
    SPECIAL.update({getattr(torch.Tensor, name): _method(name) for name in _METHODS})
    for name in "requires_grad grad grad_fn is_leaf retains_grad data _version".split():
        SPECIAL[getattr(torch.Tensor, name).__get__] = operator.attrgetter(name)
    for name in "requires_grad grad data".split():
        SPECIAL[getattr(torch.Tensor, name).__set__] = _setter(name)


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)


def _setter(name: str) -> Callable[[object, object], None]:
    return lambda self, value: setattr(self, name, value)
