"""From a layout on one mesh to a layout on another: other shapes of the same ranks, fewer, more or other ranks.

Pending sums are reduced on the source's mesh, where that needs the fewest bytes; then the tiles the ranks of one mesh
hold go to those of the other that need them, in one exchange (tiles.py); parts of a sum are made on the target's mesh.
Between a mesh and its own sub-mesh (`mesh["tp"]`, of which every rank sees its own) it is a move on the larger one.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.comm.bridge import regroup, share
from shardwise.comm.record import Note, for_backward, listeners, recording_to
from shardwise.errors import MoveError
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.move.bucket import Parcel, exchange_bucket, from_tiles, record_between, tiles_of
from shardwise.move.execute import run_move
from shardwise.move.planner import Steps, peak, plan_steps, without_sums
from shardwise.move.tiles import TilePlan


@lru_cache(maxsize=1024)
def plan_across(src: Layout, dst: Layout) -> CrossPlan:
    """What a move between two meshes does."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise MoveError(f"a move keeps shape and dtype, but {src} and {dst} differ")
    if src.mesh.comm.simulated != dst.mesh.comm.simulated:
        raise MoveError(f"cannot move between simulated and real ranks: from {src.mesh!r} to {dst.mesh!r}")
    return CrossPlan(src, dst)


class CrossPlan:
    """What a redistribute to another mesh does: `.steps`, and what they cost each rank."""

    def __init__(self, src: Layout, dst: Layout) -> None:
        self.src, self.dst = src, dst
        self.given = without_sums(src)
        self.taken = _with_whole_parts(dst)
        self.before: Steps = plan_steps(src, self.given)
        self.after: Steps = plan_steps(self.taken, dst)

    @cached_property
    def exchange(self) -> TilePlan:
        """Who sends what to whom, by global rank."""
        tiles = [{rank: layout.tiles(rank) for rank in layout.mesh.ranks} for layout in (self.given, self.taken)]
        return TilePlan(*tiles, itemsize=self.dst.dtype.itemsize)

    @property
    def steps(self) -> tuple[Any, ...]:
        return (*self.before, self.exchange, *self.after)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Everyone who takes part."""
        return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))

    def _coords(self, layout: Layout, rank: int) -> Coords | None:
        return layout.mesh.coords(rank) if rank in layout.mesh.ranks else None

    def bytes_in(self, rank: int) -> int:
        """Bytes `rank` receives."""
        here, there = self._coords(self.src, rank), self._coords(self.dst, rank)
        n = sum(step.bytes_in(here) for step in self.before) if here is not None else 0
        n += sum(step.bytes_in(there) for step in self.after) if there is not None else 0
        return n + self.exchange.bytes_in(rank)

    def bytes_out(self, rank: int) -> int:
        """Bytes `rank` sends."""
        here, there = self._coords(self.src, rank), self._coords(self.dst, rank)
        n = sum(step.bytes_out(here) for step in self.before) if here is not None else 0
        n += sum(step.bytes_out(there) for step in self.after) if there is not None else 0
        return n + self.exchange.bytes_out(rank)

    def lower_bound(self, rank: int) -> int:
        """Bytes of the target that `rank` does not hold (where nothing is pending)."""
        return self.exchange.lower_bound(rank)

    def peak_bytes(self, rank: int) -> int:
        """The most bytes `rank` holds beyond the source: what is on the way, buffers and the result."""
        here, there = self._coords(self.src, rank), self._coords(self.dst, rank)
        size = self.dst.dtype.itemsize
        held = _numel(self.given, here) * size if here is not None and self.before else 0
        got = _numel(self.taken, there) * size if there is not None else 0
        during = held + got + self.exchange.bytes_in(rank) + self.exchange.bytes_out(rank)
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


def _numel(layout: Layout, coords: Coords) -> int:
    n = 1
    for size in layout.local_shape_at(coords):
        n *= size
    return n


def _with_whole_parts(layout: Layout) -> Layout:
    places = tuple(REPLICATE if p.is_partial() else p for p in layout.placements)
    return layout if places == layout.placements else layout.replace(placements=places)


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
    crossed = _cross(plan, local, note)
    if dst.mesh.comm.outside:
        return crossed
    replicas = [a for a, p in enumerate(plan.taken.placements) if p.is_replicate()]
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


def _agree(one: Coords, other: Coords, apart_from: list[int]) -> bool:
    return all(c == d for a, (c, d) in enumerate(zip(one, other, strict=True)) if a not in apart_from)


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


def _cross(plan: CrossPlan, local: Any, note: Note) -> Any:
    comm = plan.src.mesh.comm
    if torch.is_grad_enabled() and any(v.requires_grad for v in comm.values(local)):
        if comm.simulated:
            local.used = True
        box = [plan.exchange, plan.given, plan.taken, plan.ranks, local, note, None]
        outs = _Cross.apply(box, *comm.values(local))
        return plan.dst.mesh.comm.assemble(box[-1], outs)
    return _exchange(plan.exchange, plan.given, plan.taken, plan.ranks, local, note)


class _Cross(torch.autograd.Function):
    """The gradient of what a rank got goes back to a rank it came from; all of it lands where the source was held."""

    @staticmethod
    def forward(ctx: Any, box: list[Any], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        exchange, given, taken, ranks, local, note, _ = box
        result = _exchange(exchange, given, taken, ranks, local, note)
        ctx.move = exchange, given, taken, ranks, note
        ctx.before, ctx.after = given.mesh.comm.structure(local), taken.mesh.comm.structure(result)
        ctx.heard = listeners()
        box[-1] = ctx.after
        return taken.mesh.comm.values(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        exchange, given, taken, ranks, note = ctx.move
        local = taken.mesh.comm.assemble(ctx.after, grads)
        back = [exchange.reverse, taken, given, ranks, local, for_backward(note, note.source), None]
        with recording_to(ctx.heard):
            outs = _Cross.apply(back, *taken.mesh.comm.values(local))
        return None, *given.mesh.comm.pick(ctx.before, given.mesh.comm.assemble(back[-1], outs))


@torch.no_grad()
def _exchange(exchange: TilePlan, src: Layout, dst: Layout, ranks: tuple[int, ...], local: Any, note: Note) -> Any:
    if src.mesh.comm.simulated:
        return _exchange_simulated(exchange, src, dst, local, note)
    return exchange_bucket([Parcel(exchange, src, dst, ranks, local)], note)[0]


def _exchange_simulated(exchange: TilePlan, src: Layout, dst: Layout, local: Any, note: Note) -> Any:
    comm = src.mesh.comm
    held = {rank: comm.at(local, src.mesh.coords(rank)) for rank in src.mesh.ranks}
    parts = {rank: tiles_of(value, src, src.mesh.coords(rank)) for rank, value in held.items()}
    some = next(iter(held.values()))
    got = exchange.run_simulated({rank: tiles or [some.new_empty(0)] for rank, tiles in parts.items()})
    total = sum(exchange.bytes_in(rank) for rank in dst.mesh.ranks)
    record_between(total, note)
    made = {c: from_tiles(got.get(r, []), dst, c, some) for r, c in ((r, dst.mesh.coords(r)) for r in dst.mesh.ranks)}
    everyone = dst.mesh.comm.played()
    return dst.mesh.comm.assemble(tuple(range(len(everyone))), [made[c] for c in everyone])
