"""Who holds which of a set of indices. The work grows with the holders that are found, not with the size of the
mesh."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.layout.layout import Layout
from shardwise.layout.split import Intervals, chunk_size, compose, count, intersect, normalize, positions

Spot = tuple[tuple[int, int], ...]  # (axis, coordinate) for each axis that cuts the dim


def holders_of(layout: Layout, dim: int, wanted: Intervals, pinned: Mapping[int, int]) -> list[tuple[Spot, Intervals]]:
    """The coordinates, on the axes that cut `dim`, of those who hold some of `wanted`, and what they hold of it.

    On the axes in `pinned` only the given coordinate is considered.
    """
    found: list[tuple[Spot, int, Intervals]] = [((), 0, normalize([(0, layout.shape[dim])]))]
    for axis in layout.axes_of(dim):
        parts = layout.mesh.shape[axis]
        shard = layout.placements[axis]
        inner = []
        for spot, outer, held in found:
            n = count(held)
            asked = positions(held, intersect(held, wanted))
            for i in (pinned[axis],) if axis in pinned else _asked(shard, asked, n, parts, outer):
                part = shard.part(n, parts, outer, i)  # type: ignore[attr-defined]
                inner.append(((*spot, (axis, i)), outer * parts + i, compose(held, part)))
        found = inner
    pairs = [(spot, intersect(held, wanted)) for spot, _, held in found]
    return [(spot, common) for spot, common in pairs if common]


def _asked(shard: object, asked: Intervals, n: int, parts: int, outer: int) -> list[int]:
    """The coordinates that may hold some of the positions `asked` of a parent of `n`."""
    if shard.pieces is not None:  # type: ignore[attr-defined]
        row = shard.row(n, parts, outer)  # type: ignore[attr-defined]
        return [i for i, part in enumerate(row) if intersect(part, asked)]
    size = chunk_size(n, parts)
    return sorted({i for a, b in asked for i in range(a // size, (b - 1) // size + 1)})
