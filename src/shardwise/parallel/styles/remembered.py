"""What is remembered of plain tensors: the layouts they have, and the DTensors that they became.

*Layouts*: sizes of a tensor that a style handed to the program, or that were exchanged, need not be exchanged again.
All ranks run the same program, so on all of them it is the same object that comes again, or on none.

*DTensors*: query, key and value projections get one plain tensor. As one DTensor, it gets their gradients added up by
autograd, and the ranks exchange the sum once. It keeps the tensor's memory and graph alive, not the tensor itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm.rank_tensor import RankTensor, unique
from shardwise.layout import Layout, Placement, Shard
from shardwise.mesh import Mesh
from shardwise.protocols import Ctx
from shardwise.tensor import DTensor
from shardwise.torch_private.tensors import address_of, is_plain, is_transformed

# How many DTensors are remembered, those that died included: all ranks must remember the same ones, and on each of them
# the garbage collector may let a tensor die at another time.
MOST = 8
_state = threading.local()


class _Remembered(weakref.ref):
    """A weak reference to a tensor, with what it is on the mesh (`laid`) and what it was like then (`state`)."""

    __slots__ = ("key", "laid", "state")
    __eq__, __hash__ = object.__eq__, object.__hash__  # not as the tensors compare

    key: Any
    laid: Any
    state: Any


# -- layouts -----------------------------------------------------------------------------------------------
_known: dict[int, _Remembered] = {}  # by id; an entry goes when its tensor does


def remember_layout(x: torch.Tensor, layout: Layout) -> None:
    """All ranks know that `x` is this rank's part of a tensor of this layout."""
    entry = _Remembered(x, _forget_layout)
    entry.key, entry.laid, entry.state = id(x), layout, (x.shape, x.stride())
    _known[id(x)] = entry


def _forget_layout(entry: _Remembered) -> None:
    if _known.get(entry.key) is entry:
        del _known[entry.key]


def known_layout(x: torch.Tensor, placements: tuple[Placement, ...], mesh: Mesh) -> Layout | None:
    """The layout of `x` if it is known and is what `placements` ask for on this mesh, else None."""
    entry = _known.get(id(x))
    if entry is None or entry() is not x or entry.state != (x.shape, x.stride()):
        return None
    layout: Layout = entry.laid
    if layout.mesh is not mesh or layout.dtype != x.dtype:
        return None
    wanted = zip(placements, layout.placements, strict=True)
    return layout if all(unless_cut(want, have, x.ndim) == have for want, have in wanted) else None


def unless_cut(want: Placement, have: Placement, ndim: int) -> Placement:
    """`want`; but `have` where that cuts the same dim and `want` asks for no particular sizes."""
    asks_for_a_cut = isinstance(want, Shard) and want.pieces is None and isinstance(have, Shard)
    return have if asks_for_a_cut and want.dim % max(ndim, 1) == have.dim else want  # type: ignore[attr-defined]


# -- DTensors ----------------------------------------------------------------------------------------------
def distributed_once(x: torch.Tensor, key: tuple[Any, ...], make: Callable[[torch.Tensor], DTensor]) -> DTensor:
    """`make(x)`, or what it gave before for this tensor and key, if the tensor has not been written to since.

    The modules that get it must not write to it."""
    values = x.ranks if isinstance(x, RankTensor) else (x,)
    if not torch.is_grad_enabled() or not all(map(_has_graph, values)):
        return make(x)  # no gradients to add up; a leaf would be kept alive by its graph
    table: deque[_Remembered] = _state.__dict__.setdefault("table", deque(maxlen=MOST))
    now = [(v._version, address_of(v), v.shape, v.stride()) for v in values]
    for entry in reversed(table):
        if entry() is x and entry.key == key and entry.state == now:
            table.remove(entry)
            table.append(entry)
            return entry.laid
    entry = _Remembered(x, _forget_dtensor)
    entry.key, entry.state, entry.laid = key, now, make(_without_base(x))
    table.append(entry)
    return entry.laid


def _forget_dtensor(entry: _Remembered) -> None:
    entry.laid = None


def _has_graph(value: torch.Tensor) -> bool:
    recorded = is_plain(value) and value.requires_grad and not value.is_leaf
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
    def forward(ctx: Ctx, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads
