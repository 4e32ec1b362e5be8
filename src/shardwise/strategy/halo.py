"""Sliding windows along cut dims: who makes which outputs, and from which inputs.

    halos = {d: Halo(layout, d, Reach(n, outputs, kernel, stride, ...))}  # for every dim of x that slides and is cut
    output = cut_like(layout, halos, result)                              # its split of these dims
    run_local(func, [windowed(x, halos), ...], output, ...)

A rank makes one interval of outputs, or none, and asks for one interval of inputs, whoever holds them. What its window
has beyond the ends of x is for func to pad.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from shardwise.comm.base import Coords
from shardwise.layout import Layout
from shardwise.layout.layout import parent_sets, shards_from_table
from shardwise.layout.split import Interval, Intervals, chunk_pieces, intersect, normalize
from shardwise.strategy.program import Windowed


@dataclass(frozen=True)
class Reach:
    """Output j, 0 <= j < outputs, reads the inputs j * stride - before + dilation * t, 0 <= t < kernel, as far as they
    are in [0, n): the others are padding."""

    n: int
    outputs: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0

    @property
    def span(self) -> int:
        """How many inputs there are from the first to the last that one output reads."""
        return self.dilation * (self.kernel - 1) + 1

    def window(self, start: int, stop: int) -> Interval:
        """The inputs that the outputs [start, stop), at least one, read: padding counted."""
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.span

    def first_at(self, row: int) -> int:
        """The first output whose middle is at input `row` or after it."""
        return -((self.span // 2 - self.before - row) // self.stride)


class Halo:
    """One cut dim of a layout under a sliding window. A rank makes the outputs whose middle is at a row it holds, so
    that what keeps the size keeps the split; where ranks hold several pieces, outputs are dealt out in chunks."""

    def __init__(self, layout: Layout, dim: int, reach: Reach) -> None:
        self.reach, self.dim, self.axes = reach, dim, layout.axes_of(dim)
        self.sizes = [layout.mesh.shape[axis] for axis in self.axes]
        held = parent_sets(layout.mesh, layout.placements, dim, layout.shape[dim])
        follows = any(held) and all(len(rows) <= 1 for rows in held)
        made = map(self._middles, held) if follows else chunk_pieces(reach.outputs, len(held))
        self.table = dict(zip(itertools.product(*map(range, self.sizes)), made, strict=True))

    def _middles(self, rows: Intervals) -> Intervals:
        """The outputs whose middle is at these rows; those before the first and after the last go to the ends."""
        total, n = self.reach.outputs, self.reach.n
        bounds = [[0 if r == 0 else total if r == n else self.reach.first_at(r) for r in piece] for piece in rows]
        return normalize([min(max(bound, 0), total) for bound in piece] for piece in bounds)

    def made(self, coords: Coords) -> Intervals:
        return self.table[tuple(coords[axis] for axis in self.axes)]

    def needs(self, coords: Coords) -> Intervals:
        """The inputs that the outputs made at `coords` are made from."""
        windows = normalize(self.reach.window(*made) for made in self.made(coords))
        return intersect(windows, normalize([(0, self.reach.n)]))


Halos = dict[int, Halo]


def windowed(x: Any, halos: Halos) -> Windowed:
    return Windowed(x, {dim: halo.needs for dim, halo in halos.items()})


def cut_like(layout: Layout, halos: Halos, result: Any, placements: Any = None) -> Layout:
    """The layout of a result: as `layout` is, except for the sliding dims, which are split as the outputs are."""
    places = list(placements or layout.placements)
    for halo in halos.values():
        shards = shards_from_table(halo.sizes, halo.reach.outputs, halo.table.__getitem__, halo.dim)
        for axis, shard in zip(halo.axes, shards, strict=True):
            places[axis] = shard
    return layout.replace(placements=places, shape=result.shape, dtype=result.dtype, stride=result.stride())


def leaves_empty(layout: Layout) -> bool:
    """Whether some rank holds nothing, which many kernels refuse."""
    return any(() in parent_sets(layout.mesh, layout.placements, d, n) for d, n in enumerate(layout.shape))


def each(value: Any, dims: int) -> tuple[int, ...]:
    """One number per dim, where the call has one for all or one for each."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * dims if len(values) == 1 else values
