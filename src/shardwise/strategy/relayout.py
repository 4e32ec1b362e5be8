"""Ops that only rename, cut or merge indices: the data stays where it is and the result has another split. An input dim
whose cut cannot be carried over (it does not fall on a factor boundary) is gathered first."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.nesting import shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, count, intersect, normalize
from shardwise.strategy.set_maps import Carried, Range, SetMap, unchanged
from shardwise.strategy.spec import Assignment, Described, LocalCall, MakeLocal, Operand, PerCoords, Places, Spec


@dataclass
class Relayout(Spec):
    """One operand in; `carry(dim)` lists for each output the places a cut of that dim may go (none: it must be whole).
    Any Partial stays: elements are only renamed."""

    outputs: int
    carry: Callable[[int], Sequence[Sequence[Carried]]]
    local: MakeLocal | None  # None: the call itself
    may_alias: bool = True
    view: Callable[..., Any] | None = None
    keeps: str = ""

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Described], pinned: bool) -> Assignment | None:
        layout = operands[0].layout
        places = list(layout.placements)
        carried: list[tuple[_Cut, list[Carried]]] = []
        for dim in {p.dim for p in places if isinstance(p, Shard)}:
            found = self._checked(layout, dim)
            if found is None:
                places = [REPLICATE if p.is_shard(dim) else p for p in places]
            carried += found or []
        source = layout.replace(placements=tuple(places))
        shapes = [tuple(o.shape) for o in outputs]
        outs = [self._places(source, carried, o, shapes[o]) for o in range(self.outputs)]
        return Assignment([source.placements], outs, self.local)

    def _checked(self, layout: Layout, dim: int) -> list[tuple[_Cut, list[Carried]]] | None:
        """Where the cut of `dim` goes, if every rank can follow it: as a whole, or the part of each axis by itself (a
        rank holds what is in all of its parts, since every index has one holder)."""
        axes = layout.axes_of(dim)
        for cuts in ([axes], [(axis,) for axis in axes]):
            parts = [_Cut(layout, dim, some) for some in cuts]
            ways = [(part, goes) for part in parts if (goes := self._goes(part)) is not None]
            if len(ways) == len(parts):
                return ways
        return None

    def _goes(self, cut: _Cut) -> list[Carried] | None:
        sets = {cut.held(coords) for coords in _grid(cut.layout, cut.axes)}
        found = (next((c for c in ways if c.fits(sets)), None) for ways in self.carry(cut.dim))
        goes = [way for way in found if way is not None]
        return goes if len(goes) == self.outputs else None

    def _places(
        self, source: Layout, carried: list[tuple[_Cut, list[Carried]]], output: int, shape: tuple[int, ...]
    ) -> Places:
        """The output's placements: for each output dim, the nested Shards of the axes that cut what feeds it."""
        out: list[Placement] = [REPLICATE if p.is_shard() else p for p in source.placements]
        feeding: dict[int, list[tuple[_Cut, SetMap]]] = {}
        for cut, goes in carried:
            feeding.setdefault(goes[output].dim, []).append((cut, goes[output].change))
        for target, feeds in feeding.items():
            axes = sorted(axis for cut, _ in feeds for axis in cut.axes)
            whole: Intervals = normalize([(0, shape[target])])

            def table(c: tuple[int, ...], feeds: Any = feeds, axes: Any = axes, whole: Any = whole) -> Intervals:
                at = dict(zip(axes, c, strict=True))
                coords = [at.get(axis, 0) for axis in range(len(source.placements))]
                return functools.reduce(intersect, (change(cut.held(coords)) or () for cut, change in feeds), whole)

            shards = shards_from_table([source.mesh.shape[a] for a in axes], shape[target], table, target)
            for axis, shard in zip(axes, shards, strict=True):
                out[axis] = shard
        return tuple(out)


class _Cut:
    """What some of the axes that cut a dim deal out: a coordinate's set is that of all ranks it has on these axes."""

    def __init__(self, layout: Layout, dim: int, axes: tuple[int, ...]) -> None:
        self.layout, self.dim, self.axes = layout, dim, axes
        self.others = tuple(a for a in layout.axes_of(dim) if a not in axes)
        self._sets: dict[tuple[int, ...], Intervals] = {}

    def held(self, coords: Sequence[int]) -> Intervals:
        if not self.others:
            return self.layout.held(self.dim, coords)
        key = tuple(coords[a] for a in self.axes)
        if key not in self._sets:
            at = dict(zip(self.axes, key, strict=True))
            everyone = ([at.get(a, c) for a, c in enumerate(spot)] for spot in _grid(self.layout, self.others))
            self._sets[key] = normalize(part for c in everyone for part in self.layout.held(self.dim, c))
        return self._sets[key]


def _grid(layout: Layout, axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Coordinates that differ on `axes` only."""
    return itertools.product(*(range(k) if a in axes else (0,) for a, k in enumerate(layout.mesh.shape)))


def carried(
    where: Mapping[int, int] | range, local: MakeLocal | None, changes: Mapping[int, SetMap] | None = None
) -> Relayout:
    """Dim d becomes dim where[d], and changes[d] turns the sets that ranks hold of it into those of the result. A dim
    that is not in `where` must be whole."""
    change = changes or {}
    return Relayout(1, lambda d: [[Carried(where[d], change.get(d, unchanged))] if d in where else []], local)


# -- local calls -------------------------------------------------------------------------------------------
def same_call(func: Callable[..., Any], *statics: object, **named: object) -> MakeLocal:
    """The op itself, with the same static arguments on every rank."""
    return lambda inputs, outputs: lambda x: func(x, *statics, **named)


def call_with(func: Callable[..., Any], value_at: Callable[[Layout, list[Layout], tuple[int, ...]], Any]) -> MakeLocal:
    """func(x, value) on each rank, where value = value_at(input layout, output layouts, coords)."""

    def make(inputs: list[Layout], outputs: list[Layout]) -> LocalCall:
        return PerCoords(func, lambda coords: value_at(inputs[0], outputs, coords))

    return make


def in_local_shape(func: Callable[..., Any]) -> MakeLocal:
    """func(x, the shape of the result that a rank holds)."""
    return call_with(func, lambda source, outputs, coords: outputs[0].local_shape_at(coords))


def local_range(source: Layout, dim: int, wanted: Range, coords: tuple[int, ...]) -> Range:
    """Where the wanted indices are in what a rank holds. With a step it holds one interval: `sliced` requires it."""
    start, stop, step = wanted
    first = start + max(-((start - source.offset_at(dim, coords)) // step), 0) * step
    held = source.held(dim, coords)
    begin, end = (count(intersect(held, normalize([(0, edge)]))) for edge in (first, stop))
    return begin, max(begin, end), step
