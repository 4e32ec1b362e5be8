"""From a layout on one mesh to a layout on another: other shapes of the same ranks, fewer, more or other ranks.

Pending sums are reduced on the source's mesh, where that needs the fewest bytes; then the tiles the ranks of one mesh
hold go to those of the other that need them, in one exchange (tiles.py); parts of a sum are made on the target's mesh.
Between a mesh and its own sub-mesh (`mesh["tp"]`, of which every rank sees its own) it is a move on the larger one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch.distributed as dist

from shardwise.comm.base import Coords
from shardwise.comm.bridge import regroup, share
from shardwise.comm.messages import along_ranks
from shardwise.comm.record import Note
from shardwise.errors import MoveError
from shardwise.layout import Layout
from shardwise.layout.on_mesh import cached_on_mesh
from shardwise.layout.placement import REPLICATE
from shardwise.layout.tileset import TileSet
from shardwise.move.exchange import Whole
from shardwise.move.planner import peak, plan_steps, without_sums
from shardwise.move.run import run_move, run_steps
from shardwise.move.steps import Step, Steps
from shardwise.move.tiles import TilePlan
from shardwise.move.transfer import Transfer


@partial(cached_on_mesh, "moves between meshes", 1024)
def plan_across(src: Layout, dst: Layout) -> CrossPlan:
    """What a move between two meshes does."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise MoveError(f"a move keeps shape and dtype, but {src} and {dst} differ")
    if src.mesh.comm.simulated != dst.mesh.comm.simulated:
        raise MoveError(f"cannot move between simulated and real ranks: from {src.mesh!r} to {dst.mesh!r}")
    return CrossPlan(src, dst)


@dataclass(frozen=True, eq=False)
class CrossStep(Step):
    """What the ranks of one mesh hold, on those of another: nothing is pending before or after."""

    src: Layout
    dst: Layout
    plan: TilePlan
    ranks: tuple[int, ...]  # everyone who takes part

    kind = "all_to_all"
    where = "meshes"

    @property
    def partner(self) -> CrossStep:
        """The gradient of what a rank got goes back to where the source was held."""
        return CrossStep(self.dst, self.src, self.plan.reverse, self.ranks)

    def comm_after(self, comm: Any) -> Any:
        return self.dst.mesh.comm

    def bytes_received(self, comm: Any) -> int:
        return sum(map(self.plan.bytes_in, self.dst.mesh.ranks if comm.simulated else (dist.get_rank(),)))

    def run(self, comm: Any, local: Any) -> Any:
        if comm.simulated:
            return self._at_hand(comm, local)
        out = Transfer(self.plan, (local,), dist.get_rank(), along_ranks(self.ranks, local.device)).finish()
        return out[0] if out else local.new_empty(0)

    def _at_hand(self, comm: Any, local: Any) -> Any:
        before = {c: self.src.region(c) for c in map(self.src.mesh.coords, self.src.mesh.ranks)}
        after = {c: self.dst.region(c) for c in self.dst.mesh.comm.grid}
        whole = Whole([*before.values(), *after.values()], comm.first(local), zeros=True)
        for coords, region in before.items():
            whole.put(region, comm.at(local, coords))
        made = {coords: whole.take(region) for coords, region in after.items()}
        grid = self.dst.mesh.comm.grid
        return self.dst.mesh.comm.assemble(range(len(grid)), [made[coords] for coords in grid])


class CrossPlan:
    """What a redistribute to another mesh does: `.steps`, and what they cost each rank."""

    def __init__(self, src: Layout, dst: Layout) -> None:
        self.src, self.dst = src, dst
        self.leaving = without_sums(src)
        self.arriving = dst.placed({a: REPLICATE for a, p in enumerate(dst.placements) if p.is_partial()})
        self.before: Steps = plan_steps(src, self.leaving)
        self.after: Steps = plan_steps(self.arriving, dst)

    @cached_property
    def exchange(self) -> CrossStep:
        """From the ranks of the one mesh to those of the other."""
        sides = TileSet.of_layout(self.leaving), TileSet.of_layout(self.arriving)
        plan = TilePlan(*sides, itemsize=self.dst.dtype.itemsize)
        return CrossStep(self.leaving, self.arriving, plan, self.ranks)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.before, self.exchange, *self.after)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Everyone who takes part."""
        return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))

    def _coords(self, layout: Layout, rank: int) -> Coords | None:
        return layout.mesh.coords(rank) if rank in layout.mesh.ranks else None

    def _sides(self, rank: int) -> list[tuple[Steps, Coords]]:
        """The steps on each of the meshes that a rank is in."""
        pairs = ((self.before, self.src), (self.after, self.dst))
        return [(steps, at) for steps, layout in pairs if (at := self._coords(layout, rank)) is not None]

    def bytes_in(self, rank: int) -> int:
        """Bytes `rank` receives."""
        on_meshes = sum(step.bytes_in(at) for steps, at in self._sides(rank) for step in steps)
        return on_meshes + self.exchange.plan.bytes_in(rank)

    def bytes_out(self, rank: int) -> int:
        """Bytes `rank` sends."""
        on_meshes = sum(step.bytes_out(at) for steps, at in self._sides(rank) for step in steps)
        return on_meshes + self.exchange.plan.bytes_out(rank)

    def lower_bound(self, rank: int) -> int:
        """Bytes of the target that `rank` does not hold (where nothing is pending)."""
        return self.exchange.plan.lower_bound(rank)

    def peak_bytes(self, rank: int) -> int:
        """The most bytes `rank` holds beyond the source: what is on the way, buffers and the result."""
        here, there = self._coords(self.src, rank), self._coords(self.dst, rank)
        held = _bytes(self.leaving, here) if here is not None and self.before else 0
        got = _bytes(self.arriving, there) if there is not None else 0
        during = held + got + self.exchange.plan.bytes_in(rank) + self.exchange.plan.bytes_out(rank)
        first = peak(self.before, [here]) if here is not None else 0
        last = got + peak(self.after, [there]) if there is not None else 0
        return max(first, during, last)

    def explain(self) -> str:
        """The plan as text, for the busiest rank."""
        lines = [f"{self.src} -> {self.dst}"]
        lines += [f"  {step}" for step in self.before]
        most = [max(map(of, self.ranks)) for of in (self.bytes_in, self.bytes_out, self.lower_bound, self.peak_bytes)]
        lines.append(f"  tiles to tiles among {len(self.ranks)} ranks, in one all_to_all")
        lines += [f"  {step}" for step in self.after]
        lines.append("  busiest rank: {:,} bytes in, {:,} out; lower bound {:,}; {:,} beyond the source".format(*most))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.explain()


def _bytes(layout: Layout, coords: Coords) -> int:
    return math.prod(layout.local_shape_at(coords)) * layout.dtype.itemsize


# -- running it --------------------------------------------------------------------------------------------
def move_across(local: Any, src: Layout, dst: Layout, note: Note) -> Any:
    """What the ranks of `dst`'s mesh hold, from what those of `src`'s hold; differentiable. Every rank of both calls
    it; outside of the target's mesh the result is empty."""
    larger = _on_one_mesh(src, dst)
    if larger is not None:
        here, there = larger
        comm = here.mesh.comm
        local = share(comm, local, [a for a, p in enumerate(here.placements) if p.is_replicate()])
        return _each_line_its_own(run_move(local, comm, plan_steps(here, there), note), dst)
    plan = plan_across(src, dst)
    if not src.mesh.comm.outside:
        local = run_move(local, src.mesh.comm, plan.before, note)
    crossed = run_steps(src.mesh.comm, (plan.exchange,), local, note)
    if dst.mesh.comm.outside:
        return crossed
    replicas = [a for a, p in enumerate(plan.arriving.placements) if p.is_replicate()]
    return run_move(share(dst.mesh.comm, crossed, replicas), dst.mesh.comm, plan.after, note)


def _on_one_mesh(src: Layout, dst: Layout) -> tuple[Layout, Layout] | None:
    """Both layouts on the larger of a mesh and its sub-mesh, where one is the other's."""
    if _is_view(dst.mesh, src.mesh):
        return src, _spelled_out(dst, src.mesh)
    if _is_view(src.mesh, dst.mesh):
        return _spelled_out(src, dst.mesh), dst
    return None


def _is_view(part: Any, whole: Any) -> bool:
    """Whether `part` is what `whole[names]` gives: this rank's own line of it."""
    if len(part.shape) >= len(whole.shape) or not set(part.axis_names) <= set(whole.axis_names):
        return False
    if part.comm.simulated:
        return whole.source[part.axis_names] is part.source
    if whole.source.mesh_dim_names is None or whole.comm.outside or part.comm.outside:
        return False
    inside = [a for a, name in enumerate(whole.axis_names) if name in part.axis_names]
    line = [rank for rank in whole.ranks if _agree(whole.coords(rank), whole.comm.coords, inside)]
    return tuple(line) == part.ranks


def _agree(one: Coords, other: Coords, except_on: list[int]) -> bool:
    return all(c == d for a, (c, d) in enumerate(zip(one, other, strict=True)) if a not in except_on)


def _spelled_out(layout: Layout, whole: Any) -> Layout:
    """The layout of a sub-mesh's tensor on the whole mesh: replicated on the axes the sub-mesh does not have."""
    places = dict(zip(layout.mesh.axis_names, layout.placements, strict=True))
    return layout.replace(mesh=whole, placements=tuple(places.get(name, REPLICATE) for name in whole.axis_names))


def _each_line_its_own(value: Any, dst: Layout) -> Any:
    """On a simulated sub-mesh every line has a tensor of its own, which its graph treats on its own."""
    comm = dst.mesh.comm
    if not comm.simulated:
        return value
    cut = [a for a, p in enumerate(dst.placements) if not p.is_replicate()]
    numbers: dict[Any, int] = {}
    lines = zip(comm.spectators, comm.grid, strict=True)
    return regroup(comm, value, tuple(numbers.setdefault((s, *(c[a] for a in cut)), len(numbers)) for s, c in lines))
