"""The report on what a redistribute would do: steps, bytes, memory, and the lower bound of the bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from shardwise.drawing import Picture, figure, markup, page_table
from shardwise.errors import MoveError, check_type
from shardwise.layout import Layout
from shardwise.layout.holders import holders_of
from shardwise.layout.picture import picture_of
from shardwise.layout.split import count, normalize
from shardwise.move.across import CrossStep, plan_across
from shardwise.move.planner import plan_steps, sample_coords
from shardwise.move.steps import MeshStep

_MOST_RANKS = 64  # explain() looks at all ranks of meshes up to this size, and at a few of larger ones


class MovePlan:
    """What a redistribute does, on one mesh or between two: `.steps`, and what they cost each rank."""

    def __init__(self, src: Layout, dst: Layout, steps: Sequence[MeshStep | CrossStep]) -> None:
        self.src, self.dst, self.steps = src, dst, steps

    @property
    def ranks(self) -> list[int]:
        """Everyone who takes part."""
        return sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks})

    def bytes_in(self, rank: int) -> int:
        """Bytes `rank` receives."""
        return sum(step.bytes_in(at) for step, at in self._taking_part(rank))

    def bytes_out(self, rank: int) -> int:
        """Bytes `rank` sends."""
        return sum(step.bytes_out(at) for step, at in self._taking_part(rank))

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that `rank` holds in addition to the source while the move runs: results, buffers and
        intermediate values."""
        most = before = 0  # the source is the caller's
        for step, at in self._taking_part(rank):
            if not step.reuses_memory:
                after = step.result_bytes(at)
                most = max(most, before + after + step.buffer_bytes(at))
                before = after
        return most

    def _taking_part(self, rank: int) -> Iterator[tuple[Any, Any]]:
        """The steps that a rank takes part in, each with what names the rank there: its coordinates on a mesh, or its
        number."""
        for step in self.steps:
            if isinstance(step, CrossStep):
                yield step, rank
            elif self.src.mesh is self.dst.mesh or rank in step.layout.mesh.ranks:
                yield step, step.layout.mesh.coords(rank)

    def lower_bound(self, rank: int) -> int:
        """The bytes that any plan must transfer, as this rank's share.

        An element must come to every rank that needs it and does not hold it. A pending sum of K parts needs K - 1
        transfers of each element to come together, and one more for every further rank that needs it."""
        for step in self.steps:
            if isinstance(step, CrossStep):  # pending sums are not counted between meshes
                return step.plan.lower_bound(rank)
        src, dst, coords = self.src, self.dst, self.src.mesh.coords(rank)
        shape, places = src.mesh.shape, dst.placements
        pairs = zip(src.placements, places, shape, strict=True)
        becomes_sum = lambda p, q: p.is_partial("avg") and q.is_partial("sum")  # by a division
        changed = [a for a, (p, q, k) in enumerate(pairs) if p != q and k > 1 and not becomes_sum(p, q)]
        summed = [a for a in changed if src.placements[a].is_partial()]
        anyone = [a for a in changed if places[a].is_partial()]
        free = {*anyone, *(a for a, p in enumerate(places) if summed and p.is_replicate())}
        pinned = {a: c for a, c in enumerate(coords) if a not in free and a not in summed}
        needed = have = 1
        for dim in range(dst.ndim):
            target = dst.held(dim, coords)
            needed *= count(target)
            found = holders_of(src, dim, target, pinned)  # by those who need it, or who may hold it for all
            have *= count(normalize(piece for _, held in found for piece in held))
        parts = math.prod(shape[a] for a in summed)
        needers = math.prod(shape[a] for a in free - set(anyone)) if summed else 1
        shares = needers * math.prod(shape[a] for a in anyone)
        return (needed * (parts - 1 + needers) - have) * dst.dtype.itemsize // shares

    def explain(self) -> str:
        """The plan as a table: steps with their bytes and memory, for the busiest rank, and the lower bound."""
        return self._text(memory=True)

    def _text(self, memory: bool) -> str:
        title, rows, foot = self._table(memory)
        return "\n".join([title, *_aligned(rows), f"  {foot}"])

    def _table(self, memory: bool = True) -> tuple[str, list[tuple[str, ...]], str]:
        """The title, the rows with their header, and the line below.

        Args:
            memory: Whether to say how much memory it takes, for which everything that a rank sends to its peers is
                worked out.
        """
        mesh, other = self.src.mesh, self.dst.mesh
        ranks = list(dict.fromkeys((*_shown(self.src), *_shown(self.dst))))
        costs: dict[Any, list[list[int]]] = {step: [] for step in self.steps}
        for rank in ranks:
            for step, at in self._taking_part(rank):
                costs[step].append([step.bytes_in(at), step.bytes_out(at), step.result_bytes(at)])
        rows: list[tuple[str, ...]] = [("step", "bytes in", "bytes out", "result")]
        for i, (step, found) in enumerate(costs.items()):
            rows.append((f"{i + 1}. {step}", *(f"{max(column):,}" for column in zip(*found, strict=True))))
        total = max(map(self.bytes_in, ranks)), max(map(self.bytes_out, ranks))
        rows.append(("busiest rank" if self.steps else "nothing to do", f"{total[0]:,}", f"{total[1]:,}", ""))
        bound = f"lower bound {max(map(self.lower_bound, ranks)):,} bytes in"
        held = f"at most {max(map(self.peak_bytes, ranks)):,} bytes of" if memory else ".explain() says how much"
        meshes = repr(mesh) if mesh is other else f"{mesh!r} -> {other!r}"
        title = f"{_places(self.src)} -> {_places(self.dst)}, shape {self.src.shape}, {meshes}"
        return title, rows, f"{bound}; {held} memory beyond the source"

    def __repr__(self) -> str:
        return self._text(memory=max(len(self.src.mesh.ranks), len(self.dst.mesh.ranks)) <= _MOST_RANKS)

    def _pictures(self) -> tuple[Picture, Picture]:
        return picture_of(self.src, f"from {_places(self.src)}"), picture_of(self.dst, f"to {_places(self.dst)}")

    def _repr_html_(self) -> str:
        title, (header, *rows), foot = self._table()
        before, after = map(figure, self._pictures())
        pair = f'<div style="display:flex;flex-wrap:wrap;gap:24px">{before}{after}</div>'
        table = page_table(header, rows, numbers=(1, 2, 3))
        below = f'<div style="font-size:12px">{escape(foot)}</div>'
        return f'<div style="font:13px monospace">{escape(title)}</div>{pair}{table}{below}'

    def __rich__(self) -> str:
        return "\n".join([*map(markup, self._pictures()), repr(self).replace("[", r"\[")])


def plan_move(src_layout: Layout, dst_layout: Layout, *, memory: int | None = None) -> MovePlan:
    """Plan a move from one layout to another, without running it.

    Args:
        src_layout: Where the tensor is.
        dst_layout: Where it goes.
        memory: The most bytes that a rank may use in addition to the source; by default there is no limit.

    Returns:
        The plan. Its `explain()` says what is sent, and what it costs.

    Raises:
        MoveError: An argument is no layout.
    """
    for name, layout in (("src_layout", src_layout), ("dst_layout", dst_layout)):
        if not isinstance(layout, Layout):
            got = type(layout).__name__ if hasattr(layout, "layout") else repr(layout)  # no page of a tensor's numbers
            raise MoveError(f"plan_move: {name} must be a Layout, got {got}; a DTensor's is its .layout")
    if memory is not None:
        check_type(memory, int, "plan_move: memory", "give a number of bytes")
    if src_layout.mesh is not dst_layout.mesh:
        before, exchange, after = plan_across(src_layout, dst_layout)
        return MovePlan(src_layout, dst_layout, (*before, exchange, *after))
    return MovePlan(src_layout, dst_layout, plan_steps(src_layout, dst_layout, memory=memory))


def _shown(layout: Layout) -> Sequence[int]:
    """The ranks of a mesh that explain() looks at."""
    mesh = layout.mesh
    if len(mesh.ranks) <= _MOST_RANKS:
        return mesh.ranks
    few = set(sample_coords(mesh.shape))
    return [rank for rank in mesh.ranks if mesh.coords(rank) in few]


def _aligned(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        yield "  " + "  ".join([first.ljust(widths[0]), *(x.rjust(w) for x, w in zip(rest, widths[1:], strict=True))])


def _places(layout: Layout) -> str:
    return "[" + ", ".join(map(str, layout.placements)) + "]"
