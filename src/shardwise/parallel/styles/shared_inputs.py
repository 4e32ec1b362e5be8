"""Modules that get the same plain tensor share the DTensor that it becomes.

Query, key and value projections get one tensor. As one DTensor, it gets their gradients added up by autograd, and the
ranks exchange the sum once instead of three times. What is remembered of a tensor is dropped when the tensor dies; it
keeps the tensor's memory and graph alive, but not the tensor itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm.rank_tensor import RankTensor, unique
from shardwise.tensor import DTensor
from shardwise.torch_private import is_transformed

# How many tensors are remembered, those that died included: all ranks must remember the same ones, and on each of them
# the garbage collector may let a tensor die at another time.
MOST = 8
_state = threading.local()


def distributed_once(x: torch.Tensor, key: tuple[Any, ...], make: Callable[[torch.Tensor], DTensor]) -> DTensor:
    """`make(x)`, or what it gave before for this tensor and key, if the tensor has not been written to since.

    The modules that get it must not write to it."""
    values = x.ranks if isinstance(x, RankTensor) else (x,)
    if not torch.is_grad_enabled() or not all(map(_has_graph, values)):
        return make(x)  # no gradients to add up; a leaf would be kept alive by its graph
    table: deque[_Remembered] = _state.__dict__.setdefault("table", deque(maxlen=MOST))
    now = [(v._version, v.data_ptr(), v.shape, v.stride()) for v in values]
    for entry in reversed(table):
        if entry() is x and entry.key == key and entry.state == now:
            table.remove(entry)
            table.append(entry)
            return entry.laid
    entry = _Remembered(x, _forget)
    entry.key, entry.state, entry.laid = key, now, make(_without_base(x))
    table.append(entry)
    return entry.laid


class _Remembered(weakref.ref):
    """A weak reference to a tensor, with the DTensor that it became."""

    __slots__ = ("key", "laid", "state")
    __eq__, __hash__ = object.__eq__, object.__hash__  # not as the tensors compare

    key: tuple[Any, ...]
    state: list[Any]
    laid: Any


def _forget(entry: Any) -> None:
    entry.laid = None


def _has_graph(value: torch.Tensor) -> bool:
    recorded = type(value) is torch.Tensor and value.requires_grad and not value.is_leaf
    return recorded and not is_transformed(value)  # a tensor inside of torch.func has no memory of its own


def _without_base(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory and graph that is no view of `x`: a view would keep `x` alive."""
    if not isinstance(x, RankTensor):
        return _WithoutBase.apply(x)[0]
    held = unique(x.ranks)
    made = dict(zip(map(id, held), _WithoutBase.apply(*held), strict=True))
    return RankTensor([made[id(value)] for value in x.ranks])


class _WithoutBase(torch.autograd.Function):
    """Values and gradients pass."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads
