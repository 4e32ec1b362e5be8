"""The methods of a RankTensor that are not run rank by rank: shape, gradient and value, on which the ranks must agree,
and backward, hooks and memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.comm.rank_tensor import SURFACE, RankTensor, common, unique
from shardwise.errors import LayoutError


def _backward(
    self: RankTensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    values = unique(self.ranks)
    if gradient is None:
        grads: list[Any] = [None] * len(values)
    else:
        chosen = {
            id(v): gradient.ranks[i] if isinstance(gradient, RankTensor) else gradient for i, v in enumerate(self.ranks)
        }
        grads = [chosen[id(v)] for v in values]
    flat = None if inputs is None else [v for t in inputs for v in unique(t.ranks)]
    torch.autograd.backward(values, grads, retain_graph=retain_graph, create_graph=create_graph, inputs=flat)


def _grad(self: RankTensor) -> RankTensor | None:
    return None if self.ranks[0].grad is None else RankTensor([v.grad for v in self.ranks])  # type: ignore[misc]


def _set_grad(self: RankTensor, value: RankTensor | None) -> None:
    for i, v in enumerate(self.ranks):
        v.grad = None if value is None else value.ranks[i]


def _shape(self: RankTensor) -> torch.Size:
    return common(self, lambda v: v.shape, "shape")


def _size(self: RankTensor, dim: int | None = None) -> torch.Size | int:
    if dim is None and _is_stager(sys._getframe(2)):
        return self.ranks[0].shape
    return _shape(self) if dim is None else common(self, lambda v: v.shape[dim], f"size({dim})")


def _is_stager(frame: FrameType) -> bool:
    """Whether torch's asynchronous checkpoint is the caller. It makes a tensor of that size and copies all attributes
    of this one to it, and so copies every rank's tensor."""
    return frame.f_globals.get("__name__") == "torch.distributed.checkpoint._state_dict_stager"


def _numel(self: RankTensor) -> int:
    return common(self, torch.Tensor.numel, "number of elements")


def _len(self: RankTensor) -> int:
    return common(self, len, "length")


def _data_ptr(self: RankTensor) -> int:
    """The address of its memory; 0 where every rank has its own, as torch reports for tensors without memory."""
    places = {v.data_ptr() for v in self.ranks}
    return places.pop() if len(places) == 1 else 0


class Handles:
    """Several handles of hooks, removed as one."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _register_hook(self: RankTensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Handles:
    return Handles([value.register_hook(hook) for value in unique(self.ranks)])


def _value(name: str) -> Callable[..., object]:
    """A method that gives Python one value: the ranks must agree."""
    method = getattr(torch.Tensor, name)
    return lambda self, *args: common(self, lambda v: method(v, *args), "value")


def _format(self: RankTensor, spec: str) -> str:
    """Every rank's value, if they differ."""
    texts = [format(v, spec) for v in self.ranks]
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"


def _array(self: RankTensor, dtype: object = None) -> object:
    if len(unique(self.ranks)) > 1:
        raise LayoutError("__array__: each rank has values of its own; take those of rank i: tensor.ranks[i]")
    return self.ranks[0].__array__(dtype)  # type: ignore[arg-type]


_T = torch.Tensor
SURFACE |= {
    _T.shape.__get__: _shape,  # type: ignore[attr-defined]
    _T.size: _size,
    _T.numel: _numel,
    _T.__len__: _len,
    _T.data_ptr: _data_ptr,
    _T.register_hook: _register_hook,
    _T.__format__: _format,
    _T.__array__: _array,
    torch.is_nonzero: _value("__bool__"),
    _T.grad.__get__: _grad,  # type: ignore[union-attr]
    _T.grad.__set__: _set_grad,  # type: ignore[union-attr]
    _T.backward: _backward,
    _T.__repr__: RankTensor.__repr__,
    _T.__deepcopy__: RankTensor.__deepcopy__,
    _T.__reduce_ex__: RankTensor.__reduce_ex__,
}
for _name in "__bool__ __int__ __float__ __complex__ __index__ is_nonzero".split():
    SURFACE[getattr(_T, _name)] = _value(_name)
