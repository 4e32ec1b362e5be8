"""Kinds of ranks: those that hold the same shapes of everything are one kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardwise.comm.base import Coords
from shardwise.layout import Layout, Shard
from shardwise.layout.layout import living_layouts
from shardwise.mesh import OutlinedMesh


def coordinates_of_kinds(mesh: OutlinedMesh) -> Iterator[Coords]:
    """The coordinates of one rank of each kind, by the layouts that a program used on this mesh so far."""
    starts: dict[str, set[int]] = {name: {0} for name in mesh.world_names}
    for layout in living_layouts():
        source = layout.mesh.source
        if getattr(source, "_family", None) is mesh._family:
            for axis, name in enumerate(layout.mesh.axis_names):
                if name in starts:
                    starts[name].update(_first_of_each(layout, axis))
    yield from itertools.product(*(sorted(starts[name]) for name in mesh.world_names))


def _first_of_each(layout: Layout, axis: int) -> set[int]:
    """The first coordinates along an axis of each run of coordinates that hold equally many indices."""
    placement, k = layout.placements[axis], layout.mesh.shape[axis]
    if not isinstance(placement, Shard):
        return set()
    if placement.pieces is not None:
        sizes = [sum(b - a for a, b in part) for part in placement.pieces[0]]
        return {i for i in range(1, k) if sizes[i] != sizes[i - 1]}
    n = layout.shape[placement.dim]
    for outer in layout.axes_of(placement.dim):
        if outer == axis:
            break
        n = -(-n // layout.mesh.shape[outer])
    each = -(-n // k)
    if not each or n % each == 0 and n // each == k:
        return set()
    full = n // each
    return {i for i in (full, full + (n % each > 0)) if 0 < i < k}
