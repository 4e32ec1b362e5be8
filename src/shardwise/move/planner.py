"""Plans a move between two layouts on one mesh: chooses the steps.

Without a pending sum the move is one exchange of tiles, in which every rank receives exactly what it lacks. A pending
sum can be reduced in several ways, priced by the cost model:

- all-reduce, then keep or exchange;
- send every part to those who need the sum;
- reduce to a layout in which every element is held once, inside the target's tiles, and gather: each element's parts go
  to one rank, and the sum goes to the others. Ranks that hold the same parts each reduce a share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache, partial

from shardwise.errors import MoveError
from shardwise.layout import Layout, Partial, Shard
from shardwise.layout.local_sizes import largest_bytes
from shardwise.layout.on_mesh import cached_on_mesh
from shardwise.layout.placement import REPLICATE, check_reductions
from shardwise.move.cost import CostModel, cost_of
from shardwise.move.exchange import Exchange
from shardwise.move.limit import budget, rounds_for
from shardwise.move.steps import AllReduce, Mean, MeshStep, Pad, Padded, Spread, Steps, ToPartial

_MOST_STRIDES = 64


@partial(cached_on_mesh, "moves", 4096)
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
    """The layout without pending sums that can be reached with the fewest bytes: every sum ends up on one rank."""
    parts = [a for a, p in enumerate(layout.placements) if p.is_partial()]
    if not parts:
        return layout
    whole = layout.placed(dict.fromkeys(parts, REPLICATE))
    sums = [a for a in parts if layout.placements[a].is_partial("sum") or layout.placements[a].is_partial("avg")]
    return dealt_out(whole, sums) or whole


class _Planner:
    def __init__(self, src: Layout, dst: Layout, spread: Iterable[int], memory: int | None) -> None:
        self.src, self.dst, self.memory = src, dst, memory
        self.spread = {a for a in spread if src.mesh.shape[a] > 1}
        self.cost: CostModel = cost_of(src.mesh)
        self.budget = budget(src, dst, memory)
        self.prices: dict[MeshStep, float] = {}

    def plan(self) -> list[MeshStep]:
        steps: list[MeshStep] = []
        now, middle = self.src, self._before_partial()
        averaged = [a for a in self._differ(now, middle) if now.placements[a].is_partial("avg")]
        for axis in averaged:
            steps.append(Mean(now, (axis,)))
            now = now.placed({axis: Partial("sum")})
        differ = self._differ(now, middle)
        reduced = tuple(a for a in differ if now.placements[a].is_partial() and not middle.placements[a].is_partial())
        others = tuple(a for a in reduced if not now.placements[a].is_partial("sum"))
        if others:  # max, min, product and the bitwise ones
            steps.append(AllReduce(now, others, now.placements[others[0]].reduce_op))  # type: ignore[attr-defined]
            now = now.placed(dict.fromkeys(others, REPLICATE))
        if set(reduced) - set(others):
            steps += self._cheapest(now, middle)
        else:
            steps += self._exchange(now, middle)
        rest = self._to_partial(middle, fresh=bool(steps) and not others)
        together = not others  # autograd sees all steps as one
        if together and steps and rest and isinstance(rest[0], Pad) and isinstance(steps[-1], Exchange):
            steps[-1] = steps[-1].with_(inside=rest[0].layout)
            rest[0] = Padded(rest[0].layout, rest[0].axes, rest[0].tile)
        steps += rest
        done = {a for step in steps if isinstance(step, Exchange) for a in step.spread}
        left = tuple(sorted(self.spread - done))
        if left:
            steps.append(Spread(self.dst, left))
        return self._in_rounds(steps)

    # -- what differs ---------------------------------------------------------------------------------------
    @staticmethod
    def _differ(src: Layout, dst: Layout) -> tuple[int, ...]:
        """Axes whose placement changes, and those nested inside one that changes. (An axis of one coordinate never
        counts: that coordinate holds everything.)"""
        changed: list[int] = []
        touched: set[int] = set()
        for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True)):
            if src.mesh.shape[axis] > 1 and (p != q or (isinstance(p, Shard) and p.dim in touched)):
                changed.append(axis)
                touched |= {x.dim for x in (p, q) if isinstance(x, Shard)}
        return tuple(changed)

    # -- towards a Partial target ---------------------------------------------------------------------------
    def _before_partial(self) -> Layout:
        """The layout before values become the target's parts. Tiles with zeros around them are parts of a sum, so an
        axis that is cut inside the target's tiles may stay cut; else every rank must have the value."""
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
        bare = bare.placed({axis: self.src.placements[axis] for axis in staying})
        return dealt_out(bare, [axis for axis in cut if axis not in staying], inside=cut) or bare

    def _stays_inside(self, axis: int, bare: Layout, cut: list[int]) -> bool:
        """Whether the source's tiles along `axis` lie inside the target's."""
        if not self.src.placements[axis].is_shard():
            return False
        dim = self.src.placements[axis].dim  # type: ignore[attr-defined]
        before, kept = self.src.axes_of(dim), bare.axes_of(dim)
        same = all(self.src.placements[a] == bare.placements[a] for a in kept)
        return before[: len(kept)] == kept and same and set(before[len(kept) :]) <= set(cut)

    def _to_partial(self, middle: Layout, fresh: bool) -> list[MeshStep]:
        """From values to parts; `fresh` says that the value was made by this move."""
        steps: list[MeshStep] = []
        become = [a for a in self._differ(middle, self.dst) if self.dst.placements[a].is_partial()]
        padded = tuple(a for a in become if middle.placements[a].is_shard())
        if padded:
            after = middle.placed({a: self.dst.placements[a] for a in padded})
            steps.append(Pad(after, padded, middle))
            middle, fresh = after, True
        for axis in become:
            goal = self.dst.placements[axis]
            if axis not in padded:
                if goal.is_partial("product"):
                    steps.append(Spread(middle, (axis,)))
                steps.append(ToPartial(middle, (axis,), goal.reduce_op, fresh))  # type: ignore[attr-defined]
                fresh = True
                middle = middle.placed({axis: goal})
        return steps

    # -- one exchange ---------------------------------------------------------------------------------------
    def _exchange(self, now: Layout, to: Layout) -> list[MeshStep]:
        """The steps from `now` to `to` that also reduce pending sums: if possible one exchange among as few ranks as
        possible."""
        axes = self._differ(now, to)
        if not axes:
            return []
        direct: list[MeshStep] = [self._one(now, to, axes)]
        if direct[0].kind == "local" or _has_pieces(now) or _has_pieces(to):
            return direct
        ways = [direct]
        if len(axes) > 1 and not self.cost.uniform:
            ways += self._one_by_one(now, to)
        return self._best(ways, now)

    def _one(self, now: Layout, to: Layout, axes: tuple[int, ...]) -> Exchange:
        gathers = (a for a in axes if now.placements[a].is_shard() and to.placements[a].is_replicate())
        return Exchange(now, axes, to, tuple(sorted(self.spread.intersection(gathers))))

    def _one_by_one(self, now: Layout, to: Layout) -> Iterable[list[MeshStep]]:
        """The same axis by axis, in two orders: slow axes first, and fast axes first. A slow axis may then carry fewer
        bytes."""
        axes = self._differ(now, to)
        for sign in (1, -1):
            at = now
            steps: list[MeshStep] = []
            for axis in sorted(axes, key=lambda a: sign * self.cost.axes[a].bandwidth):
                goal = at.placed({axis: to.placements[axis]})
                part = self._differ(at, goal)
                if part:
                    steps.append(self._one(at, goal, part))
                at = goal
            yield steps

    # -- pending sums ---------------------------------------------------------------------------------------
    def _cheapest(self, now: Layout, to: Layout) -> list[MeshStep]:
        differ = self._differ(now, to)
        reduced = tuple(a for a in differ if now.placements[a].is_partial() and not to.placements[a].is_partial())
        kept = [a for a in reduced if to.placements[a].is_replicate()]
        alone = differ == reduced and len(kept) in (0, len(reduced))
        everyone_else_too = self._replicas(now, to)
        if alone and not everyone_else_too and not kept:
            return self._exchange(now, to)
        whole = now.placed(dict.fromkeys(reduced, REPLICATE))
        ways = [[*sums, *self._exchange(whole, to)] for sums in self._all_reduced(now, reduced)]
        if alone and kept and not everyone_else_too:
            return self._best(ways, now)
        if len(kept) < len(reduced) or not alone:
            ways.append(self._exchange(now, to))
            own = dealt_out(now, reduced)
            if own is not None:
                ways.append([*self._exchange(now, own), *self._exchange(own, to)])
        for shared in ((), everyone_else_too) if everyone_else_too else ((),):
            gathered = tuple(a for a in differ if to.placements[a].is_replicate())
            once = dealt_out(to, (*gathered, *shared))
            if once is not None and once is not to:
                ways.append([*self._exchange(now, once), *self._exchange(once, to)])
        free = {a: to.placements[a] for a in differ if now.placements[a].is_replicate()}
        if free and not _has_pieces(now) and not _has_pieces(to):
            sliced = now.placed(free)
            cut = self._differ(now, sliced)
            if not set(self._differ(sliced, to)) & set(cut):
                ways.insert(0, [self._one(now, sliced, cut), *self._cheapest(sliced, to)])
        return self._best(ways, now)

    def _all_reduced(self, now: Layout, axes: tuple[int, ...]) -> Iterable[list[MeshStep]]:
        """All-reduces over all axes at once, which takes the fewest bytes, and axis by axis, which has less latency."""
        yield [AllReduce(now, axes)]
        if len(axes) > 1:
            steps: list[MeshStep] = []
            for axis in axes:
                steps.append(AllReduce(now, (axis,)))
                now = now.placed({axis: REPLICATE})
            yield steps

    def _replicas(self, now: Layout, to: Layout) -> tuple[int, ...]:
        """The axes that stay Replicate: the ranks along them hold the same and could share the work."""
        return tuple(
            a
            for a, k in enumerate(now.mesh.shape)
            if k > 1 and now.placements[a].is_replicate() and to.placements[a].is_replicate()
        )

    # -- prices and memory ----------------------------------------------------------------------------------
    def _best(self, ways: list[list[MeshStep]], now: Layout) -> list[MeshStep]:
        """The cheapest of the ways whose results fit into the available memory."""
        if len(ways) == 1:
            return ways[0]
        return min([way for way in ways if self._fits(way, now)] or ways, key=self._price)

    def _price(self, steps: list[MeshStep]) -> float:
        """Seconds. Both the bytes of the busiest rank and the bytes of all ranks count, since ranks share the
        network."""
        return sum(self._price_of(step) for step in steps if step.kind != "local")

    def _price_of(self, step: MeshStep) -> float:
        if step not in self.prices:
            shape = self.src.mesh.shape
            received = [step.bytes_in(coords) for coords in sample_coords(shape)]
            bytes_in = (max(received) + sum(received) / len(received)) / 2
            axes = step.crossed
            ranks = math.prod(shape[a] for a in axes)
            twice = step.kind == "all_reduce" and ranks > 2  # it gathers what it has reduced
            self.prices[step] = self.cost.over(axes, shape, bytes_in) + twice * self.cost.over(axes, shape, 0)
        return self.prices[step]

    def _fits(self, steps: list[MeshStep], now: Layout) -> bool:
        """Whether the results of the steps fit into memory, not counting buffers. To avoid a slow axis, a little more
        is allowed."""
        if self.budget is None:
            return True
        limit = self.budget if self.cost.uniform or self.memory is not None else 1.2 * self.budget
        held = [0 if now is self.src else largest_bytes(now), *map(_largest_result, steps)]
        return all(before + after <= limit for before, after in itertools.pairwise(held))

    def _in_rounds(self, steps: list[MeshStep]) -> list[MeshStep]:
        """Exchanges whose buffers would not fit go in rounds."""
        if self.budget is None:
            return steps
        before, out = 0, []  # the source is the caller's
        for step in steps:
            if step.reuses_memory:
                out.append(step)
                continue
            after = _largest_result(step)
            room = self.budget - before - after
            if self.memory is not None and room < 0:
                raise MoveError(
                    f"{step} of shape {self.dst.shape} needs {before + after:,} bytes for its result alone on the "
                    f"fullest rank, more than the memory cap of {self.memory:,}; allow at least "
                    f"{before + after + max(after // 8, 1):,}"
                )
            if isinstance(step, Exchange) and step.kind != "local":
                capped = self.memory is not None
                rounds = rounds_for(step, room if capped else max(room, after // 16), capped)
                step = step if rounds == 1 else step.with_(rounds=rounds)
            out.append(step)
            before = after
        return out


def dealt_out(layout: Layout, axes: Iterable[int], inside: Iterable[int] | None = None) -> Layout | None:
    """The layout in which these axes cut a dim, too, if possible within the present tiles. None where nothing is left
    to cut, or where the new tiles would not lie inside the old ones (with `inside`: inside the tiles that the other
    axes make)."""
    for axis in sorted(axes):
        later = {a: p for a, p in enumerate(layout.placements) if a > axis and isinstance(p, Shard)}
        moved = {p.dim for a, p in later.items() if p.pieces is not None or (inside is not None and a not in inside)}
        left = {
            dim: n / math.prod(layout.mesh.shape[a] for a in layout.axes_of(dim))
            for dim, n in enumerate(layout.shape)
            if dim not in moved
        }
        nested = {p.dim for p in later.values()}
        rest = {dim: n for dim, n in left.items() if dim not in nested and n > 1} or left
        if rest and max(rest.values()) > 1:
            cut: Shard | None = Shard(max(rest, key=lambda dim: rest[dim]))
        else:
            cut = _strided(layout, axis) if inside is not None else None
        if cut is None:
            return None
        layout = layout.placed({axis: cut})
    return layout


def _strided(layout: Layout, axis: int) -> Shard | None:
    """A cut, by an axis, of a dim that later axes cut as well: each coordinate takes its share of every tile of theirs.
    None where the tiles differ in size, or are very many."""
    k = layout.mesh.shape[axis]
    for dim, n in sorted(enumerate(layout.shape), key=lambda size: -size[1]):
        axes = layout.axes_of(dim)
        sizes = [layout.mesh.shape[a] for a in axes]
        whole = n // math.prod(s for a, s in zip(axes, sizes, strict=True) if a < axis)
        tiles = math.prod(s for a, s in zip(axes, sizes, strict=True) if a > axis)
        chunks = all(layout.placements[a].pieces is None for a in axes)  # type: ignore[attr-defined]
        if chunks and n and n % (k * math.prod(sizes)) == 0 and tiles * k <= _MOST_STRIDES:
            tile = whole // tiles
            shares = [tile * i // k for i in range(k + 1)]
            row = [[(t * tile + a, t * tile + b) for t in range(tiles)] for a, b in itertools.pairwise(shares)]
            return Shard(dim, pieces=[row])
    return None


def _has_pieces(layout: Layout) -> bool:
    return any(isinstance(p, Shard) and p.pieces is not None for p in layout.placements)


@lru_cache(maxsize=256)
def sample_coords(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The coordinates that are looked at: all of a small mesh, a few corners of a larger one."""
    if math.prod(shape) <= 8:
        return tuple(itertools.product(*map(range, shape)))
    first, last = tuple(0 for _ in shape), tuple(k - 1 for k in shape)
    mixed = [tuple(k - 1 if a % 2 == odd else 0 for a, k in enumerate(shape)) for odd in (0, 1)]
    return tuple(dict.fromkeys([first, last, *mixed]))


def _largest_result(step: MeshStep) -> int:
    return 0 if step.reuses_memory else largest_bytes(step.result)
