"""A leaf whose memory is given back: it knows its shape and dtype, and says why nothing else can be asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from shardwise.errors import AutogradError
from shardwise.tensor import DTensor

# What a tensor without memory can still answer.
_KNOWN = {
    getattr(torch.Tensor, name).__get__
    for name in "shape dtype device layout requires_grad grad grad_fn is_leaf ndim itemsize nbytes _version".split()
}
_KNOWN |= {
    getattr(torch.Tensor, name)
    for name in (
        "size dim numel nelement stride is_floating_point is_complex requires_grad_ register_hook "
        "register_post_accumulate_grad_hook"
    ).split()
}
_KNOWN |= {torch.Tensor.grad.__set__, torch.Tensor.requires_grad.__set__, torch.numel}  # type: ignore[attr-defined, union-attr]


class Freed(torch.Tensor):
    """The class of a leaf between uses; it is a plain tensor again once it is filled."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})
        freed = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, Freed))
        raise AutogradError(f"{resolve_name(func) or func}: {_describe(freed)}")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<{_describe(self)}>"

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise AutogradError(f"deepcopy: {_describe(self)}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise AutogradError(f"pickle: {_describe(self)}")


def mark_freed(tensor: DTensor) -> None:
    """Let a DTensor over memory that has been given back say so from now on."""
    comm = tensor._layout.mesh.comm
    for value in comm.values(tensor._local):
        if type(value) is torch.Tensor and not value.untyped_storage().nbytes():
            value.__class__ = Freed
    tensor._spreads = None


def _describe(freed: torch.Tensor) -> str:
    return (
        f"this tensor of shape {tuple(freed.shape)} stood in for a parameter in the forward of its unit, and its "
        f"memory is given back until the next; read the module's own parameter (a DTensor), or clone it in the forward"
    )
