"""From one layout to another on the same mesh: which steps.

Where nothing is reduced, one exchange of tiles does it, and every rank receives exactly what it lacks. A pending sum
is reduced on the way. There are several ways, priced by the cost model:

- all-reduce, then keep or exchange;
- send every part to those who need the sum;
- reduce to a layout in which nothing is held twice, inside the target's tiles, and gather: each element then goes to
  one rank as parts and to the others as a sum. Ranks that hold the same parts take a share each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from shardwise.errors import MoveError
from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.placement import REPLICATE, check_reductions
from shardwise.move.cost import CostModel, cost_of
from shardwise.move.exchange import Exchange
from shardwise.move.limit import rounds_for
from shardwise.move.pad import Pad
from shardwise.move.steps import AllReduce, Mean, Spread, ToPartial

Step = Any  # MoveStep | Exchange | Pad
Steps = tuple[Step, ...]


@lru_cache(maxsize=4096)
def plan_steps(src: Layout, dst: Layout, spread: tuple[int, ...] = (), memory: int | None = None) -> Steps:
    """The steps from `src` to `dst`. On the axes in `spread` the result enters a split call as a Replicate operand.

    `memory` caps the bytes a rank may hold beyond the source while the move runs."""
    if src.mesh is not dst.mesh:
        raise MoveError(f"cannot move from mesh {src.mesh!r} to mesh {dst.mesh!r}: layouts must be on one mesh")
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise MoveError(f"a move keeps shape and dtype, but {src} and {dst} differ")
    check_reductions(dst.placements, dst.dtype)
    if src is dst and not spread:
        return ()
    return tuple(_Planner(src, dst, spread, memory).plan())


def without_sums(layout: Layout) -> Layout:
    """A layout without parts that this one comes to with the fewest bytes: every sum ends up on one rank."""
    parts = [a for a, p in enumerate(layout.placements) if p.is_partial()]
    if not parts:
        return layout
    whole = _with(layout, dict.fromkeys(parts, REPLICATE))
    sums = [a for a in parts if layout.placements[a].is_partial("sum") or layout.placements[a].is_partial("avg")]
    return dealt_out(whole, sums) or whole


class _Planner:
    def __init__(self, src: Layout, dst: Layout, spread: Iterable[int], memory: int | None) -> None:
        self.src, self.dst, self.memory = src, dst, memory
        self.spread = {a for a in spread if src.mesh.shape[a] > 1}
        self.cost: CostModel = cost_of(src.mesh)

    def plan(self) -> list[Step]:
        steps: list[Step] = []
        now, middle = self.src, self._before_partial()
        averaged = [a for a in self._differ(now, middle) if now.placements[a].is_partial("avg")]
        for axis in averaged:
            steps.append(Mean(now, (axis,)))
            now = _with(now, {axis: Partial("sum")})
        differ = self._differ(now, middle)
        reduced = tuple(a for a in differ if now.placements[a].is_partial() and not middle.placements[a].is_partial())
        others = tuple(a for a in reduced if not now.placements[a].is_partial("sum"))
        if others:  # max, min, product and the bitwise ones
            steps.append(AllReduce(now, others, now.placements[others[0]].reduce_op))  # type: ignore[attr-defined]
            now = _with(now, dict.fromkeys(others, REPLICATE))
        if set(reduced) - set(others):
            steps += self._cheapest(now, middle)
        else:
            steps += self._exchange(now, middle)
        steps += self._to_partial(middle)
        done = {a for step in steps if isinstance(step, Exchange) for a in step.spread}
        rest = tuple(sorted(self.spread - done))
        if rest:
            steps.append(Spread(self.dst, rest))
        return steps

    # -- what differs ---------------------------------------------------------------------------------------
    @staticmethod
    def _differ(src: Layout, dst: Layout) -> tuple[int, ...]:
        """Axes whose placement changes, and those nested inside one that does. (One coordinate holds everything,
        whatever it is called.)"""
        changed: list[int] = []
        touched: set[int] = set()
        for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True)):
            if src.mesh.shape[axis] > 1 and (p != q or (isinstance(p, Shard) and p.dim in touched)):
                changed.append(axis)
                touched |= {x.dim for x in (p, q) if isinstance(x, Shard)}
        return tuple(changed)

    # -- towards a Partial target ---------------------------------------------------------------------------
    def _before_partial(self) -> Layout:
        """The target as it is before values become parts. Tiles with zeros around them are parts of a sum, so a cut
        axis may stay cut, inside the target's tiles; else everyone must have the value."""
        places = list(self.dst.placements)
        differ = self._differ(self.src, self.dst)
        something_travels = any(not self.src.placements[a].is_replicate() for a in differ)
        cut: list[int] = []
        for axis in differ:
            p, q = self.src.placements[axis], self.dst.placements[axis]
            if isinstance(q, Partial) and not (p.is_partial("avg") and q.is_partial("sum")):
                places[axis] = REPLICATE
                if q.is_partial("sum") and not isinstance(p, Partial) and something_travels:
                    cut.append(axis)
        if tuple(places) == self.dst.placements:
            return self.dst
        bare = self.dst.replace(placements=tuple(places))
        staying = [axis for axis in cut if self._stays_inside(axis, bare, cut)]
        bare = _with(bare, {axis: self.src.placements[axis] for axis in staying})
        return dealt_out(bare, [axis for axis in cut if axis not in staying], inside=True) or bare

    def _stays_inside(self, axis: int, bare: Layout, cut: list[int]) -> bool:
        """Whether the source's tiles along `axis` lie inside the target's."""
        if not self.src.placements[axis].is_shard():
            return False
        dim = self.src.placements[axis].dim  # type: ignore[attr-defined]
        before, kept = self.src.axes_of(dim), bare.axes_of(dim)
        same = all(self.src.placements[a] == bare.placements[a] for a in kept)
        return before[: len(kept)] == kept and same and set(before[len(kept) :]) <= set(cut)

    def _to_partial(self, middle: Layout) -> list[Step]:
        steps: list[Step] = []
        become = [a for a in self._differ(middle, self.dst) if self.dst.placements[a].is_partial()]
        padded = tuple(a for a in become if middle.placements[a].is_shard())
        if padded:
            after = _with(middle, {a: self.dst.placements[a] for a in padded})
            steps.append(Pad(middle, after, padded))
            middle = after
        for axis in become:
            goal = self.dst.placements[axis]
            if axis not in padded:
                if goal.is_partial("product"):
                    steps.append(Spread(middle, (axis,)))
                steps.append(ToPartial(middle, (axis,), goal.reduce_op))  # type: ignore[attr-defined]
                middle = _with(middle, {axis: goal})
        return steps

    # -- one exchange ---------------------------------------------------------------------------------------
    def _exchange(self, now: Layout, to: Layout) -> list[Step]:
        axes = self._differ(now, to)
        if not axes:
            return []
        gathers = (a for a in axes if now.placements[a].is_shard() and to.placements[a].is_replicate())
        spread = tuple(sorted(self.spread.intersection(gathers)))
        if len(axes) > 1 and not self.cost.uniform:
            return min([self._one(now, to, axes, spread), *self._one_by_one(now, to)], key=self._price)
        return self._sliced_first(now, to, axes) or self._one(now, to, axes, spread)

    def _sliced_first(self, now: Layout, to: Layout, axes: tuple[int, ...]) -> list[Step] | None:
        """Axes that are only cut are cut before anything travels, where that leaves fewer ranks to talk to each other
        and no more bytes to send."""
        free = {a: to.placements[a] for a in axes if now.placements[a].is_replicate()}
        if not 0 < len(free) < len(axes) or _has_pieces(now) or _has_pieces(to):
            return None
        sliced = _with(now, free)
        rest = self._differ(sliced, to)
        if self._differ(now, sliced) != tuple(free) or set(rest) & free.keys():
            return None
        steps = [*self._exchange(now, sliced), *self._exchange(sliced, to)]
        direct = Exchange(now, to, axes)
        ranks = sample_coords(now.mesh.shape)
        same = all(sum(step.bytes_in(c) for step in steps) <= direct.bytes_in(c) for c in ranks)
        return steps if same else None

    def _one(self, now: Layout, to: Layout, axes: tuple[int, ...], spread: tuple[int, ...]) -> list[Step]:
        step = Exchange(now, to, axes, spread)
        rounds = rounds_for(step, self.memory)
        return [step if rounds == 1 else Exchange(now, to, axes, spread, rounds)]

    def _one_by_one(self, now: Layout, to: Layout) -> Iterable[list[Step]]:
        """The same axis by axis, slow ones first and fast ones first: an axis that is slow may then carry less."""
        if _has_pieces(now) or _has_pieces(to):
            return
        axes = self._differ(now, to)
        for sign in (1, -1):
            at, steps = now, []
            for axis in sorted(axes, key=lambda a: sign * self.cost.axes[a].bandwidth):
                goal = _with(at, {axis: to.placements[axis]})
                part = self._differ(at, goal)
                gathers = (a for a in part if at.placements[a].is_shard() and goal.placements[a].is_replicate())
                if part:
                    steps += self._one(at, goal, part, tuple(sorted(self.spread.intersection(gathers))))
                at = goal
            yield steps

    # -- pending sums ---------------------------------------------------------------------------------------
    def _cheapest(self, now: Layout, to: Layout) -> list[Step]:
        reduced = tuple(
            a for a in self._differ(now, to) if now.placements[a].is_partial() and not to.placements[a].is_partial()
        )
        kept = [a for a in reduced if to.placements[a].is_replicate()]
        alone = self._differ(now, to) == reduced and len(kept) in (0, len(reduced))
        everyone_else_too = self._replicas(now, to)
        if alone and not everyone_else_too and not kept:
            return self._exchange(now, to)
        whole = _with(now, dict.fromkeys(reduced, REPLICATE))
        ways = [[AllReduce(now, reduced), *self._exchange(whole, to)]]
        if alone and kept and not everyone_else_too:
            return ways[0]
        if len(kept) < len(reduced) or not alone:
            ways.append(self._exchange(now, to))
            own = dealt_out(now, reduced)
            if own is not None:
                ways.append([*self._exchange(now, own), *self._exchange(own, to)])
        for shared in ((), everyone_else_too) if everyone_else_too else ((),):
            apart = tuple(a for a in self._differ(now, to) if to.placements[a].is_replicate())
            once = dealt_out(to, (*apart, *shared))
            if once is not None and once is not to:
                ways.append([*self._exchange(now, once), *self._exchange(once, to)])
        allowed = [way for way in ways if self._fits(way)] or ways
        return min(allowed, key=self._price)

    def _replicas(self, now: Layout, to: Layout) -> tuple[int, ...]:
        """The axes on which nothing changes because all hold the same: they could share the work."""
        return tuple(
            a
            for a, k in enumerate(now.mesh.shape)
            if k > 1 and now.placements[a].is_replicate() and to.placements[a].is_replicate()
        )

    # -- prices ---------------------------------------------------------------------------------------------
    def _price(self, steps: list[Step]) -> float:
        shape = self.src.mesh.shape
        seconds = 0.0
        for step in steps:
            if step.kind != "local":
                most = max(step.bytes_in(coords) for coords in sample_coords(shape))
                seconds += self.cost.over(step.axes, shape, most)
        return seconds

    def _fits(self, steps: list[Step]) -> bool:
        return self.memory is None or peak(self.src, steps, sample_coords(self.src.mesh.shape)) <= self.memory


def dealt_out(layout: Layout, axes: Iterable[int], inside: bool = False) -> Layout | None:
    """The layout with these axes cutting a dim too, within the tiles they have where a dim allows it. None where
    nothing is left to cut, or (with `inside`) where new tiles would not lie inside the old ones."""
    for axis in sorted(axes):
        later = [p for p in layout.placements[axis + 1 :] if isinstance(p, Shard)]
        left = {
            dim: n / math.prod(layout.mesh.shape[a] for a in layout.axes_of(dim))
            for dim, n in enumerate(layout.shape)
            if not any(p.dim == dim and (inside or p.pieces is not None) for p in later)
        }
        nested = {p.dim for p in later}
        rest = {dim: n for dim, n in left.items() if dim not in nested and n > 1} or left
        if not rest or max(rest.values()) <= 1:
            return None
        layout = _with(layout, {axis: Shard(max(rest, key=lambda dim: rest[dim]))})
    return layout


def _has_pieces(layout: Layout) -> bool:
    return any(isinstance(p, Shard) and p.pieces is not None for p in layout.placements)


def _with(layout: Layout, changes: dict[int, Placement]) -> Layout:
    places = tuple(changes.get(a, p) for a, p in enumerate(layout.placements))
    return layout if places == layout.placements else layout.replace(placements=places)


def sample_coords(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A few ranks that stand for all: the first, the last and those between."""
    return list(dict.fromkeys([(0,) * len(shape), tuple(k // 2 for k in shape), tuple(k - 1 for k in shape)]))


def peak(src: Layout, steps: Iterable[Step], ranks: Iterable[tuple[int, ...]]) -> int:
    """The most bytes one of these ranks holds beyond the source while the steps run, the result included."""
    steps = list(steps)
    most = 0
    for coords in ranks:
        before = 0  # the source is the caller's
        for step in steps:
            after = result_bytes(step, coords)
            most = max(most, before + after + buffer_bytes(step, coords))
            before = after
    return most


def result_bytes(step: Step, coords: tuple[int, ...]) -> int:
    """Bytes of the new local tensor a step makes."""
    if isinstance(step, Spread):
        return 0  # a view
    layout = step.dst if isinstance(step, (Exchange, Pad)) else step.layout
    return math.prod(layout.local_shape_at(coords)) * layout.dtype.itemsize


def buffer_bytes(step: Step, coords: tuple[int, ...]) -> int:
    return step.buffer_bytes(coords) if isinstance(step, Exchange) else 0
