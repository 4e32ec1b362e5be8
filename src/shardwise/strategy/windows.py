"""Windows that slide over dims that are cut: which outputs a rank makes, and which inputs it needs for them.

    halos = {d: Halo(layout, d, Reach(n, outputs, kernel, stride, ...))}  # for every dim of x that slides and is cut
    output = cut_like(layout, halos, result)                              # its split of these dims
    run_local(func, [windowed(x, halos), ...], output, ...)

A rank makes one interval of outputs, or none, and asks for one of inputs, whoever holds them. What its window has
beyond the ends of x is for func to pad."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.layout import Layout, Placement
from shardwise.layout.nesting import parent_sets, shards_from_table
from shardwise.layout.split import Interval, Intervals, chunk_pieces, intersect, normalize
from shardwise.strategy.program import Windowed
from shardwise.strategy.spec import Result


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


class Scatter(Reach):
    """The transpose: input j adds to the outputs j * stride - before + dilation * t, 0 <= t < kernel."""

    def window(self, start: int, stop: int) -> Interval:
        first = -((self.span - 1 - start - self.before) // self.stride)
        return first, max((stop - 1 + self.before) // self.stride, first) + 1  # not none, even if none adds to them

    def first_at(self, row: int) -> int:
        return row * self.stride - self.before + self.span // 2


@dataclass(frozen=True)
class Units(Reach):
    """Every `stride` inputs make `per` outputs, with the help of some units `around` them. A window is never shorter
    than the kernel if that is possible, since some ops insist."""

    per: int = 1
    around: tuple[int, int] = (0, 0)

    def window(self, start: int, stop: int) -> Interval:
        units = min(start // self.per - self.around[0], (self.n - self.span) // self.stride)
        first, last = max(units, 0) * self.stride, (-(-stop // self.per) + self.around[1]) * self.stride
        return first, max(last, first + self.span)

    def first_at(self, row: int) -> int:
        return -(-row * self.per // self.stride)

    def part(self, halo: Halo, coords: Coords) -> tuple[int, int, int, int]:
        """The rows a rank has (one that makes nothing: those that the first output reads), how many outputs the op
        makes of them, and where its own begin among these."""
        first, last = self.window(0, 1)
        row, end = (halo.needs(coords) or ((first, min(last, self.n)),))[0]
        start, _ = (halo.made(coords) or ((0, 0),))[0]
        return row, end, (end - row) // self.stride * self.per, start - row // self.stride * self.per


def sliding(n: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int) -> Units:
    behind = dilation * (kernel - 1) + 1 - padding  # how far an output reads from where its unit begins
    return Units(n, outputs, kernel, stride, dilation, around=(-(-padding // stride), max(-(-behind // stride) - 1, 0)))


def resizing(n: int, outputs: int, margin: int = 0) -> Units:
    """Output j reads what is around j * n / outputs, and `margin` rows on both sides: the same in every unit."""
    units = math.gcd(n, outputs)
    extra = -(-margin * units // n)
    return Units(n, outputs, 1, n // units, per=outputs // units, around=(extra, extra))


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

    def edges(self, coords: Coords) -> tuple[int, int, int]:
        """How many rows of padding come before and after the window of a rank, and where its outputs begin among those
        that it computes from the window."""
        made, got, reach = self.made(coords), self.needs(coords), self.reach
        if not made:
            return 0, 0, 0
        first, last = reach.window(*made[0])
        start, stop = got[0] if got else (first, first)
        return start - first, last - stop, made[0][0] + reach.before - first * reach.stride


Halos = dict[int, Halo]


def windowed(x: torch.Tensor, halos: Halos) -> Windowed:
    return Windowed(x, {dim: halo.needs for dim, halo in halos.items()})


def cut_like(
    layout: Layout, halos: Halos, result: Result | torch.Tensor, placements: Sequence[Placement] | None = None
) -> Layout:
    """The layout of a result: as `layout` is, except for the sliding dims, which are split as the outputs are."""
    places = list(placements or layout.placements)
    for halo in halos.values():
        shards = shards_from_table(halo.sizes, halo.reach.outputs, halo.table.__getitem__, halo.dim)
        for axis, shard in zip(halo.axes, shards, strict=True):
            places[axis] = shard
    return layout.replace(placements=places, shape=result.shape, dtype=result.dtype, stride=result.stride())


def each(value: Any, dims: int) -> tuple[int, ...]:
    """One number per dim, where the call has one for all or one for each."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * dims if len(values) == 1 else values
