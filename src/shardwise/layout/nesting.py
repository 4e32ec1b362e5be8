"""Several axes that cut one dim: each deals out what the one before has left to it, so the cuts nest in mesh order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from shardwise.errors import LayoutError
from shardwise.layout.placement import Placement, Shard
from shardwise.layout.split import Intervals, chunk_pieces, compose, count, normalize, positions
from shardwise.protocols import MeshLike


def parent_sets(mesh: MeshLike, outer: Sequence[Placement], dim: int, n: int) -> list[Intervals]:
    """For each coordinate of the axes in `outer` that cut `dim` (in mesh order), the indices it holds."""
    sets = [normalize([(0, n)])]
    for axis, placement in enumerate(outer):
        if placement.is_shard(dim):
            parts = mesh.shape[axis]
            sets = [
                compose(held, part)
                for i, held in enumerate(sets)
                for part in placement.row(count(held), parts, i)  # type: ignore[attr-defined]
            ]
    return sets


def shards_from_table(
    axis_sizes: Sequence[int], n: int, table: Callable[[tuple[int, ...]], Intervals], dim: int
) -> tuple[Shard, ...]:
    """The nested Shards on `dim` under which the coordinate tuple c of these axes holds the indices table(c).

    The sets must be disjoint and cover [0, n). This is how a view op says where the pieces went.
    """
    leaves: dict[tuple[int, ...], Intervals] = {c: table(c) for c in itertools.product(*(range(k) for k in axis_sizes))}
    unions = leaves
    levels = [leaves]
    for _ in axis_sizes:
        merged: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for c, held in unions.items():
            merged.setdefault(c[:-1], []).extend(held)
        unions = {c: normalize(parts) for c, parts in merged.items()}
        levels.append(unions)
    levels.reverse()  # levels[t] is keyed by the first t coordinates
    if levels[0][()] != normalize([(0, n)]):
        raise LayoutError(f"the parts cover {levels[0][()]} of the {n} indices of dim {dim}")
    shards = []
    for t, parts in enumerate(axis_sizes):
        rows, regular = [], True
        for c, parent in levels[t].items():
            row = tuple(positions(parent, levels[t + 1][(*c, i)]) for i in range(parts))
            regular = regular and row == chunk_pieces(count(parent), parts)
            rows.append(row)
        shards.append(Shard(dim) if regular else Shard(dim, pieces=tuple(rows)))
    return tuple(shards)
