"""Query, key and value projections are given one plain tensor: it enters the mesh once for all of them.

Autograd then adds up their gradients before the ranks do, in one exchange instead of three. What is kept for a tensor
goes when the tensor does, and holds its memory and its graph but not the tensor itself.
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

# How many tensors are remembered. It counts those that are gone, too: all ranks must agree on what is remembered, and
# when a tensor goes may depend on a garbage collector.
MOST = 8
_state = threading.local()


def entered_once(x: torch.Tensor, key: tuple[Any, ...], enter: Callable[[Any], DTensor]) -> DTensor:
    """`enter(x)`, or what that gave for this tensor and key before, if nothing has been written to it since.

    The modules that get it must not write to it."""
    values = x.ranks if isinstance(x, RankTensor) else (x,)
    if not torch.is_grad_enabled() or not all(map(_has_graph, values)):
        return enter(x)  # no gradients to add up; a leaf would be kept alive by its graph
    table: deque[_Entry] = _state.__dict__.setdefault("table", deque(maxlen=MOST))
    now = [(v._version, v.data_ptr(), v.shape, v.stride()) for v in values]
    for entry in reversed(table):
        if entry() is x and entry.key == key and entry.state == now:
            table.remove(entry)
            table.append(entry)
            return entry.laid
    entry = _Entry(x, _forget)
    entry.key, entry.state, entry.laid = key, now, enter(_apart(x))
    table.append(entry)
    return entry.laid


class _Entry(weakref.ref):
    """A tensor, weakly, and what it is on the mesh."""

    __slots__ = ("key", "laid", "state")
    __eq__, __hash__ = object.__eq__, object.__hash__  # not as the tensors compare

    key: tuple[Any, ...]
    state: list[Any]
    laid: Any


def _forget(entry: Any) -> None:
    entry.laid = None


def _has_graph(value: torch.Tensor) -> bool:
    recorded = type(value) is torch.Tensor and value.requires_grad and not value.is_leaf
    return recorded and not is_transformed(value)  # which has no memory of its own


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same memory and history, but no view: a view would keep the tensor."""
    if not isinstance(x, RankTensor):
        return _Apart.apply(x)[0]
    held = unique(x.ranks)
    made = dict(zip(map(id, held), _Apart.apply(*held), strict=True))
    return RankTensor([made[id(value)] for value in x.ranks])


class _Apart(torch.autograd.Function):
    """Values and gradients pass."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads
