"""What a redistribute would do, as people read it: steps, bytes, memory and how little would have been enough."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardwise.comm.base import Coords
from shardwise.errors import MoveError, check_type
from shardwise.layout import Layout
from shardwise.layout.layout import holders_of
from shardwise.layout.split import count, normalize
from shardwise.move.across import CrossPlan, plan_across
from shardwise.move.planner import peak, plan_steps, result_bytes, sample_coords
from shardwise.move.steps import Steps

_MOST_RANKS = 1024  # of larger meshes, explain() looks at a few ranks


class MovePlan:
    """What a redistribute does: `.steps`, and what they cost each rank."""

    def __init__(self, src: Layout, dst: Layout, steps: Steps) -> None:
        self.src, self.dst, self.steps = src, dst, steps

    def bytes_in(self, rank: int) -> int:
        """Bytes `rank` receives."""
        coords = self.src.mesh.coords(rank)
        return sum(step.bytes_in(coords) for step in self.steps)

    def bytes_out(self, rank: int) -> int:
        """Bytes `rank` sends."""
        coords = self.src.mesh.coords(rank)
        return sum(step.bytes_out(coords) for step in self.steps)

    def peak_bytes(self, rank: int) -> int:
        """The most bytes `rank` holds beyond the source while the move runs: results, buffers, what is on the way."""
        return peak(self.steps, [self.src.mesh.coords(rank)])

    def lower_bound(self, rank: int) -> int:
        """Bytes that no plan can do without, as this rank's share.

        An element must come to every rank that needs it and does not hold it. A pending sum of K parts needs K - 1
        transfers of each element to come together, and one more for every further rank that needs it."""
        src, dst, coords = self.src, self.dst, self.src.mesh.coords(rank)
        shape, places = src.mesh.shape, dst.placements
        changed = [a for a in _changed(src, dst) if not _may_stay_parts(src, dst, a)]
        summed = [a for a in changed if src.placements[a].is_partial()]
        anyone = [a for a in changed if places[a].is_partial()]
        free = {*anyone, *(a for a, p in enumerate(places) if summed and p.is_replicate())}
        pinned = {a: c for a, c in enumerate(coords) if a not in free and a not in summed}
        needed = have = 1
        for dim in range(dst.ndim):
            target = dst.held(dim, coords)
            needed *= count(target)
            found = holders_of(
                src, dim, target, pinned
            )  # what is held by those who need it, or who may hold it for all
            have *= count(normalize(piece for _, held in found for piece in held))
        parts = math.prod(shape[a] for a in summed)
        needers = math.prod(shape[a] for a in free - set(anyone)) if summed else 1
        shares = needers * math.prod(shape[a] for a in anyone)
        return (needed * (parts - 1 + needers) - have) * dst.dtype.itemsize // shares

    def explain(self) -> str:
        """The plan as a table: steps with their bytes and memory, for the busiest rank, and the lower bound."""
        mesh = self.src.mesh
        few = [mesh.ranks[_number(c, mesh.shape)] for c in sample_coords(mesh.shape)]
        ranks = mesh.ranks if len(mesh.ranks) <= _MOST_RANKS else few
        spots = [mesh.coords(rank) for rank in ranks]
        rows: list[tuple[str, ...]] = [("step", "bytes in", "bytes out", "result")]
        for i, step in enumerate(self.steps):
            most = max(step.bytes_in(c) for c in spots), max(step.bytes_out(c) for c in spots)
            held = max(result_bytes(step, c) for c in spots)
            rows.append((f"{i + 1}. {step}", f"{most[0]:,}", f"{most[1]:,}", f"{held:,}"))
        total = max(map(self.bytes_in, ranks)), max(map(self.bytes_out, ranks))
        rows.append(("busiest rank" if self.steps else "nothing to do", f"{total[0]:,}", f"{total[1]:,}", ""))
        bound, most_held = max(map(self.lower_bound, ranks)), max(map(self.peak_bytes, ranks))
        title = f"{_places(self.src)} -> {_places(self.dst)}, shape {self.src.shape}, {mesh!r}"
        foot = f"  lower bound {bound:,} bytes in; at most {most_held:,} bytes of memory beyond the source"
        return "\n".join([title, *_aligned(rows), foot])

    def __repr__(self) -> str:
        return self.explain()


def plan_move(src_layout: Layout, dst_layout: Layout, *, memory: int | None = None) -> MovePlan | CrossPlan:
    """What a redistribute from one layout to the other would do; `memory` caps its bytes beyond the source."""
    for name, layout in (("src_layout", src_layout), ("dst_layout", dst_layout)):
        if not isinstance(layout, Layout):
            raise MoveError(f"plan_move: {name} must be a Layout, got {layout!r}; a DTensor's is its .layout")
    if memory is not None:
        check_type(memory, int, "plan_move: memory", "give a number of bytes")
    if src_layout.mesh is not dst_layout.mesh:
        return plan_across(src_layout, dst_layout)
    return MovePlan(src_layout, dst_layout, plan_steps(src_layout, dst_layout, memory=memory))


def _changed(src: Layout, dst: Layout) -> list[int]:
    pairs = zip(src.placements, dst.placements, src.mesh.shape, strict=True)
    return [a for a, (p, q, k) in enumerate(pairs) if p != q and k > 1]


def _may_stay_parts(src: Layout, dst: Layout, axis: int) -> bool:
    """An average becomes a sum by dividing."""
    return src.placements[axis].is_partial("avg") and dst.placements[axis].is_partial("sum")


def _number(coords: Coords, shape: tuple[int, ...]) -> int:
    n = 0
    for c, k in zip(coords, shape, strict=True):
        n = n * k + c
    return n


def _aligned(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        yield "  " + "  ".join([first.ljust(widths[0]), *(x.rjust(w) for x, w in zip(rest, widths[1:], strict=True))])


def _places(layout: Layout) -> str:
    return "[" + ", ".join(map(str, layout.placements)) + "]"
