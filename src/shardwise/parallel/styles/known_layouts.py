"""The layouts of plain tensors that were on the mesh before, so that the ranks need not exchange sizes again.

A plain tensor that a style hands to the program has a layout that all ranks know. When the same tensor object comes to
another style, that layout is looked up here. So is that of a tensor whose sizes have been exchanged already. All ranks
run the same program, so on all of them it is the same object, or on none.
"""

from __future__ import annotations

import weakref

import torch

from shardwise.layout import Layout, Placement, Shard
from shardwise.mesh import Mesh
from shardwise.parallel.styles.placing import unless_cut


class _Known(weakref.ref):
    """A weak reference to a plain tensor, with its layout and the shape and strides it had."""

    __slots__ = ("key", "layout", "state")
    __eq__, __hash__ = object.__eq__, object.__hash__  # not as the tensors compare

    key: int
    layout: Layout
    state: tuple[torch.Size, tuple[int, ...]]


_known: dict[int, _Known] = {}  # by id; an entry goes when its tensor does


def remember_layout(x: torch.Tensor, layout: Layout) -> None:
    """All ranks know that `x` is this rank's part of a tensor of this layout."""
    entry = _Known(x, _forget)
    entry.key, entry.layout, entry.state = id(x), layout, (x.shape, x.stride())
    _known[id(x)] = entry


def _forget(entry: _Known) -> None:
    if _known.get(entry.key) is entry:
        del _known[entry.key]


def known_layout(x: torch.Tensor, placements: tuple[Placement, ...], mesh: Mesh) -> Layout | None:
    """The layout of `x` if it is known and is what `placements` ask for on this mesh, else None."""
    entry = _known.get(id(x))
    if entry is None or entry() is not x or entry.state != (x.shape, x.stride()):
        return None
    layout = entry.layout
    if layout.mesh is not mesh or layout.dtype != x.dtype:
        return None
    for want, have in zip(placements, layout.placements, strict=True):
        is_cut = isinstance(want, Shard) and want.pieces is None
        if (unless_cut(want, have, x.ndim) if is_cut else want) != have:
            return None
    return layout
