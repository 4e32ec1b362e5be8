"""From a layout on one mesh to a layout on another: other shapes of the same ranks, fewer, more or other ranks.

Pending sums are reduced on the source's mesh, where that needs the fewest bytes. Then every rank of the target's mesh
gets the tiles it needs, in one exchange (tiles.py). If the target is Partial, the parts are made on its mesh. A move
between a mesh and its own sub-mesh (`mesh["tp"]`, where each rank sees another one) is a move on the larger mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardwise.comm.base import Comm, Coords
from shardwise.comm.bridge import regroup, share
from shardwise.comm.guard import Guard
from shardwise.comm.messages import along_ranks
from shardwise.comm.outline import OutlineComm
from shardwise.comm.rank_tensor import RankTensor
from shardwise.comm.record import Note
from shardwise.comm.simulation import SimulatedComm
from shardwise.errors import MoveError
from shardwise.layout import Layout
from shardwise.layout.on_mesh import cached_on_mesh
from shardwise.layout.placement import REPLICATE, Partial
from shardwise.layout.tileset import TileSet
from shardwise.move.planner import plan_steps, without_sums
from shardwise.move.run import run_move, run_steps
from shardwise.move.steps import Step, Steps
from shardwise.move.tiles import TilePlan
from shardwise.move.transfer import Transfer
from shardwise.move.whole import Whole
from shardwise.protocols import Holder, LocalValue, MeshLike


@dataclass(frozen=True, eq=False)
class CrossStep(Step):
    """The step that brings what the ranks of one mesh hold to the ranks of another. Nothing is pending before or
    after."""

    src: Layout
    dst: Layout
    plan: TilePlan
    ranks: tuple[int, ...]  # all ranks that take part

    kind = "all_to_all"
    where = "meshes"

    @property
    def partner(self) -> CrossStep:
        """The step of the gradient: from the ranks that got something back to those that held the source."""
        return CrossStep(self.dst, self.src, self.plan.reverse, self.ranks)

    def comm_after(self, comm: Holder) -> Comm:
        return self.dst.mesh.comm

    def bytes_received(self, comm: Any) -> int:
        if comm.outlined:
            return self.bytes_in(comm.rank)
        return sum(map(self.bytes_in, self.dst.mesh.ranks if comm.simulated else (dist.get_rank(),)))

    @property
    def digest(self) -> int:  # type: ignore[override]
        return hash((self.src.digest, self.dst.digest))

    def describe(self) -> str:
        return f"{self.src!r} -> {self.dst!r}"

    def bytes_here(self) -> int:
        return self.bytes_received(self.dst.mesh.comm)

    def bytes_in(self, rank: int) -> int:
        return self.plan.bytes_in(rank)

    def bytes_out(self, rank: int) -> int:
        return self.plan.bytes_out(rank)

    def buffer_bytes(self, rank: int) -> int:
        return self.bytes_in(rank) + self.bytes_out(rank)

    def result_bytes(self, rank: int) -> int:
        inside = rank in self.dst.mesh.ranks
        return math.prod(self.dst.local_shape(rank)) * self.dst.dtype.itemsize if inside else 0

    def run(self, comm: Any, local: LocalValue) -> LocalValue:
        if comm.simulated:
            assert isinstance(local, RankTensor)
            return self._at_hand(comm, local)
        if comm.outlined:
            return self._outlined(comm, local)
        me, along = dist.get_rank(), along_ranks(self.ranks, local.device)
        with Guard(along, self.kind, f"meshes of {len(self.ranks)} ranks", f" on rank {me}"):
            out = Transfer(self.plan, (local,), me, along).finish()
        return out[0] if out else local.new_empty(0)

    def _outlined(self, comm: OutlineComm, local: torch.Tensor) -> torch.Tensor:
        if comm.rank not in self.dst.mesh.ranks:
            raise MoveError(f"rank {comm.rank}, which is played, is not in {self.dst.mesh!r}; play one that is in both")
        shape, axes = self.dst.local_shape(comm.rank), range(len(comm.shape))
        return comm.exchange(local, self.kind, axes, self.bytes_in(comm.rank), shape, self.buffer_bytes(comm.rank))[1]()

    def _at_hand(self, comm: SimulatedComm, local: RankTensor) -> RankTensor:
        before = {c: self.src.region(c) for c in map(self.src.mesh.coords, self.src.mesh.ranks)}
        after = {c: self.dst.region(c) for c in self.dst.mesh.comm.grid}
        whole = Whole([*before.values(), *after.values()], comm.first(local), zeros=True)
        for coords, region in before.items():
            whole.put(region, comm.at(local, coords))
        made = {coords: whole.take(region) for coords, region in after.items()}
        grid = self.dst.mesh.comm.grid
        return self.dst.mesh.comm.assemble(range(len(grid)), [made[coords] for coords in grid])

    def __str__(self) -> str:
        return f"one all_to_all among the {len(self.ranks)} ranks of two meshes"


class Crossing(NamedTuple):
    """The steps of a move between two meshes: on the first mesh, from it to the second, and on the second."""

    before: Steps
    exchange: CrossStep
    after: Steps


@partial(cached_on_mesh, "moves between meshes", 1024)
def plan_across(src: Layout, dst: Layout) -> Crossing:
    """What a move between two meshes does."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise MoveError(f"a move keeps shape and dtype, but {src} and {dst} differ")
    if (src.mesh.comm.simulated, src.mesh.comm.outlined) != (dst.mesh.comm.simulated, dst.mesh.comm.outlined):
        raise MoveError(f"cannot move between simulated and real ranks: from {src.mesh!r} to {dst.mesh!r}")
    leaving = without_sums(src)
    arriving = dst.placed({a: REPLICATE for a, p in enumerate(dst.placements) if p.is_partial()})
    tiles = TilePlan(TileSet.of_layout(leaving), TileSet.of_layout(arriving), itemsize=dst.dtype.itemsize)
    ranks = tuple(sorted({*src.mesh.ranks, *dst.mesh.ranks}))
    exchange = CrossStep(leaving, arriving, tiles, ranks)
    return Crossing(plan_steps(src, leaving), exchange, plan_steps(arriving, dst))


# -- running it --------------------------------------------------------------------------------------------
def move_across(local: LocalValue, src: Layout, dst: Layout, note: Note) -> LocalValue:
    """What the ranks of `dst`'s mesh hold, from what those of `src`'s hold; differentiable. Every rank of both calls
    it; outside of the target's mesh the result is empty."""
    if isinstance(local, RankTensor):
        _check_groups(src.mesh.comm, local, src)
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
    replicas = [a for a, p in enumerate(plan.exchange.dst.placements) if p.is_replicate()]
    return run_move(share(dst.mesh.comm, crossed, replicas), dst.mesh.comm, plan.after, note)


def _check_groups(comm: SimulatedComm, local: RankTensor, src: Layout) -> None:
    """Raise LayoutError where the groups of a simulated sub-mesh hold different values, since only those of one group
    would move."""
    with torch.no_grad():
        for axis, place in enumerate(src.placements):
            if isinstance(place, Partial):  # groups may have different parts of the same value
                local = comm.all_reduce(local, (axis,), "sum" if place.reduce_op == "avg" else place.reduce_op)
    comm.agreed(local, "redistribute to another mesh")


def _on_one_mesh(src: Layout, dst: Layout) -> tuple[Layout, Layout] | None:
    """Both layouts on the larger of a mesh and its sub-mesh, where one is the other's."""
    if is_part_of(dst.mesh, src.mesh):
        return src, spelled_out(dst, src.mesh)
    if is_part_of(src.mesh, dst.mesh):
        return spelled_out(src, dst.mesh), dst
    return None


class MeshOfUser(MeshLike, Protocol):
    """A mesh that was made from one of the user's."""

    @property
    def source(self) -> Any: ...  # a DeviceMesh, or what `simulate` or `outline` returned


def is_part_of(part: MeshOfUser, whole: MeshOfUser) -> bool:
    """Whether `part` is what `whole[names]` gives: the sub-mesh that this rank is in."""
    if len(part.shape) >= len(whole.shape) or not set(part.axis_names) <= set(whole.axis_names):
        return False
    if part.comm.simulated or part.comm.outlined:
        family = getattr(whole.source, "_family", None) is getattr(part.source, "_family", ())
        return family and whole.source[part.axis_names] is part.source
    if whole.source.mesh_dim_names is None or whole.comm.outside or part.comm.outside:
        return False
    inside = [a for a, name in enumerate(whole.axis_names) if name in part.axis_names]
    line = [rank for rank in whole.ranks if _agree(whole.coords(rank), whole.comm.coords, inside)]
    return tuple(line) == part.ranks


def _agree(one: Coords, other: Coords, except_on: list[int]) -> bool:
    return all(c == d for a, (c, d) in enumerate(zip(one, other, strict=True)) if a not in except_on)


def spelled_out(layout: Layout, whole: MeshLike) -> Layout:
    """The layout of a sub-mesh's tensor on the whole mesh: replicated on the axes the sub-mesh does not have."""
    places = dict(zip(layout.mesh.axis_names, layout.placements, strict=True))
    return layout.replace(mesh=whole, placements=tuple(places.get(name, REPLICATE) for name in whole.axis_names))


def _each_line_its_own(value: LocalValue, dst: Layout) -> LocalValue:
    """On a simulated sub-mesh, give every group of ranks a tensor of its own, with a graph of its own."""
    comm = dst.mesh.comm
    if not comm.simulated:
        return value
    cut = [a for a, p in enumerate(dst.placements) if not p.is_replicate()]
    numbers: dict[Any, int] = {}
    lines = zip(comm.spectators, comm.grid, strict=True)
    return regroup(comm, value, tuple(numbers.setdefault((s, *(c[a] for a in cut)), len(numbers)) for s, c in lines))
