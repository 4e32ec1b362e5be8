"""From one layout to another on the same mesh: a sequence of steps, one axis at a time.

Axes that cut the same dim nest in mesh order, so an inner cut must be undone before an outer one can change and redone
after. Three passes keep that: slices that nothing stands in the way of (they make everything after them smaller); then
from the last axis to the first whatever must be undone or can be turned directly; then from the first to the last the
slices that had to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from shardwise.comm.base import Coords
from shardwise.errors import MoveError
from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.placement import REPLICATE, check_reductions
from shardwise.layout.split import count, intersect
from shardwise.move.steps import (
    AllReduce,
    AllToAll,
    Gather,
    GatherSpread,
    Mean,
    MoveStep,
    ReduceScatter,
    Slice,
    Spread,
    ToPartial,
)


class MovePlan:
    """What a redistribute does: `.steps`, and what they cost each rank."""

    def __init__(self, src: Layout, dst: Layout, steps: Sequence[MoveStep]) -> None:
        self.src, self.dst, self.steps = src, dst, tuple(steps)

    def bytes_in(self, rank: int) -> int:
        """Bytes `rank` receives."""
        coords = self.src.mesh.coords(rank)
        return sum(step.bytes_in(coords) for step in self.steps)

    def lower_bound(self, rank: int) -> int:
        """Bytes of the target that `rank` does not hold yet: no plan can receive less."""
        coords = self.src.mesh.coords(rank)
        needed = have = self.dst.dtype.itemsize
        for dim in range(self.dst.ndim):
            target = self.dst.held(dim, coords)
            needed *= count(target)
            have *= count(intersect(target, self.src.held(dim, coords)))
        partial = any(
            p.is_partial() and p != q and k > 1
            for p, q, k in zip(self.src.placements, self.dst.placements, self.src.mesh.shape, strict=True)
        )
        return needed if partial else needed - have

    def peak_bytes(self, rank: int) -> int:
        """The most bytes of source, intermediate and result that are alive at once."""
        coords = self.src.mesh.coords(rank)
        sizes = [local_bytes(self.src, coords)]
        sizes += [local_bytes(layout, coords) for layout in self._after()]
        return max((a + b for a, b in zip(sizes, sizes[1:], strict=False)), default=sizes[0])

    def _after(self) -> list[Layout]:
        """The layout after each step."""
        places, out = list(self.src.placements), []
        for step in self.steps:
            if isinstance(step, (Slice, ReduceScatter)):
                places[step.axis] = step.layout.placements[step.axis]
            elif isinstance(step, AllToAll):
                places[step.axis] = step.target.placements[step.axis]
            elif isinstance(step, (Gather, AllReduce)):
                places[step.axis] = REPLICATE
            out.append(self.src.replace(placements=tuple(places)))
        return out

    def explain(self) -> str:
        """The plan as text: steps with their bytes, peak memory and the lower bound, for the busiest rank."""
        mesh = self.src.mesh
        lines = [f"{_places(self.src)} -> {_places(self.dst)}, shape {self.src.shape}"]
        for i, step in enumerate(self.steps):
            most = max(step.bytes_in(mesh.coords(rank)) for rank in mesh.ranks)
            lines.append(f"  {i + 1}. {step}: {most:,} bytes in")
        if not self.steps:
            lines.append("  nothing to do")
        most = max(map(self.bytes_in, mesh.ranks))
        bound = max(map(self.lower_bound, mesh.ranks))
        peak = max(map(self.peak_bytes, mesh.ranks))
        lines.append(f"  busiest rank: {most:,} bytes in (lower bound {bound:,}), peak memory {peak:,} bytes")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.explain()


def local_bytes(layout: Layout, coords: Coords) -> int:
    n = layout.dtype.itemsize
    for size in layout.local_shape_at(coords):
        n *= size
    return n


def _places(layout: Layout) -> str:
    return "[" + ", ".join(map(str, layout.placements)) + "]"


def plan_move(src_layout: Layout, dst_layout: Layout) -> MovePlan:
    """What a redistribute from one layout to the other would do."""
    for name, layout in (("src_layout", src_layout), ("dst_layout", dst_layout)):
        if not isinstance(layout, Layout):
            raise MoveError(f"plan_move: {name} must be a Layout, got {layout!r}; a DTensor's is its .layout")
    return MovePlan(src_layout, dst_layout, plan_steps(src_layout, dst_layout))


@lru_cache(maxsize=4096)
def plan_steps(src: Layout, dst: Layout, spread: tuple[int, ...] = ()) -> tuple[MoveStep, ...]:
    """The steps from `src` to `dst`. On the axes in `spread` the result enters a split call as a Replicate operand."""
    if src.mesh is not dst.mesh:
        raise MoveError(f"cannot move from mesh {src.mesh!r} to mesh {dst.mesh!r}: layouts must be on one mesh")
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise MoveError(f"a move keeps shape and dtype, but {src} and {dst} differ")
    check_reductions(dst.placements, dst.dtype)
    return tuple(_Planner(src, dst, spread).plan())


class _Planner:
    def __init__(self, src: Layout, dst: Layout, spread: Iterable[int]) -> None:
        self.dst, self.spread = dst, set(spread)
        self.layout = src  # as the steps so far have left it
        self.steps: list[MoveStep] = []
        self.pending = self._changed(src, dst)

    def _changed(self, src: Layout, dst: Layout) -> set[int]:
        """Axes whose placement changes, and those nested inside one that does."""
        changed: set[int] = set()
        touched: set[int] = set()
        for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True)):
            if src.mesh.shape[axis] == 1:
                continue  # one coordinate holds everything, whatever it is called
            if p != q or (isinstance(p, Shard) and p.dim in touched):
                changed.add(axis)
                touched |= {x.dim for x in (p, q) if isinstance(x, Shard)}
        return changed

    def plan(self) -> list[MoveStep]:
        axes = sorted(self.pending)
        for axis in axes:
            if self.layout.placements[axis].is_replicate() and self._may_cut(axis):
                self._slice(axis)
        for axis in reversed(axes):
            if axis in self.pending:
                self._turn(axis)
        for axis in axes:
            if axis in self.pending:
                self._finish(axis)
        done = {step.axis for step in self.steps if isinstance(step, GatherSpread)}
        for axis in sorted(self.spread - done):
            if self.layout.mesh.shape[axis] > 1:
                self.steps.append(Spread(self.layout, axis))
        return self.steps

    def _goal(self, axis: int) -> Placement:
        return self.dst.placements[axis]

    def _now(self, axis: int) -> Placement:
        return self.layout.placements[axis]

    def _may_cut(self, axis: int) -> bool:
        """Whether the target's cut on `axis` can be made now: nothing nested inside, nothing outside to change."""
        goal = self._goal(axis)
        if not isinstance(goal, Shard):
            return False
        inner = any(self._now(b).is_shard(goal.dim) for b in range(axis + 1, len(self.dst.placements)))
        outer = any(
            self._now(a).is_shard(goal.dim) or self._goal(a).is_shard(goal.dim) for a in self.pending if a < axis
        )
        return not inner and not outer

    def _with(self, axis: int, placement: Placement) -> Layout:
        """The present layout with one axis changed; a split that its parent no longer fits becomes a chunk split."""
        places = list(self.layout.placements)
        places[axis] = placement
        return self.layout.replace(placements=tuple(places))

    def _slice(self, axis: int) -> None:
        self.layout = self._with(axis, self._goal(axis))
        self.steps.append(Slice(self.layout, axis))
        self.pending.discard(axis)

    def _turn(self, axis: int) -> None:
        """Take `axis` to its target if that is possible now, else to Replicate."""
        now, goal = self._now(axis), self._goal(axis)
        direct = self._may_cut(axis)
        if isinstance(now, Partial):
            if now.reduce_op == "avg":
                self.steps.append(Mean(self.layout, axis))
            if direct and now.reduce_op in ("sum", "avg"):
                self.layout = self._with(axis, goal)
                self.steps.append(ReduceScatter(self.layout, axis))
                self.pending.discard(axis)
                return
            self.steps.append(AllReduce(self.layout, axis, "sum" if now.reduce_op == "avg" else now.reduce_op))
        elif isinstance(now, Shard):
            if direct and isinstance(goal, Shard) and goal.dim != now.dim:
                before, self.layout = self.layout, self._with(axis, goal)
                self.steps.append(AllToAll(before, axis, self.layout))
                self.pending.discard(axis)
                return
            spread = axis in self.spread and goal.is_replicate()
            self.steps.append((GatherSpread if spread else Gather)(self.layout, axis))
        self.layout = self._with(axis, REPLICATE)

    def _finish(self, axis: int) -> None:
        """From Replicate to the target."""
        goal = self._goal(axis)
        if isinstance(goal, Shard):
            self._slice(axis)
        elif isinstance(goal, Partial):
            if goal.reduce_op == "product":
                self.steps.append(Spread(self.layout, axis))
            self.steps.append(ToPartial(self.layout, axis, goal.reduce_op))
            self.layout = self._with(axis, goal)
        self.pending.discard(axis)
