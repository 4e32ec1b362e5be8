"""Moves between any two sets of tiles: who sends which box to whom, found by a sweep, run as one exact all-to-all.

A tile is a box of global indices (offsets, sizes) that a rank holds. `TilePlan` intersects the tiles every rank has
with those every rank needs. It is pure integers: thousands of tiles cost milliseconds.

    plan = TilePlan({0: [((0,), (4,))], 1: [((4,), (4,))]}, {2: [((0,), (8,))]}, itemsize=4)
    plan.bytes_in(2), plan.lower_bound(2)            # 32, 32
    plan.run(parts, group)                           # on every rank of the group, differentiable

An element that a rank holds itself never travels; replicas share the sending.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shardwise.comm.record import Note, for_backward, listeners, record, user_line
from shardwise.errors import CommError, MoveError

Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


class Boxes(NamedTuple):
    """Many boxes: row i is the box from starts[i] up to, not including, ends[i]."""

    starts: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(boxes: Iterable[Box], ndim: int | None = None) -> Boxes:
        boxes = list(boxes)
        width = ndim if ndim is not None else len(boxes[0][0]) if boxes else 0
        starts = np.array([b[0] for b in boxes], dtype=np.int64).reshape(len(boxes), width)
        return Boxes(starts, starts + np.array([b[1] for b in boxes], dtype=np.int64).reshape(len(boxes), width))

    @property
    def volumes(self) -> np.ndarray:
        return (self.ends - self.starts).clip(min=0).prod(axis=1)

    def take(self, rows: Any) -> Boxes:
        return Boxes(self.starts[rows], self.ends[rows])

    def meet(self, other: Boxes) -> Boxes:
        """Row by row, what both share."""
        return Boxes(np.maximum(self.starts, other.starts), np.minimum(self.ends, other.ends))

    def __len__(self) -> int:
        return len(self.starts)


def _expand(counts: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row i the numbers first[i], first[i] + 1, ... (counts[i] of them): the rows, and the numbers."""
    rows = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return rows, np.arange(len(rows)) - np.repeat(before - first, counts)


def meetings(one: Boxes, other: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of all pairs of boxes that share an element."""
    found = list(_meetings(one, other))
    if len(found) == 1:
        return found[0]
    nothing = np.zeros(0, dtype=np.int64)
    return tuple(np.concatenate([nothing, *(pair[i] for pair in found)]) for i in (0, 1))  # type: ignore[return-value]


_MOST_AT_ONCE = 4_000_000  # candidate pairs, so that boxes that all overlap do not fill the memory


def _meetings(one: Boxes, other: Boxes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A coarse grid is laid over the boxes, about one box a cell; boxes are compared where they are in the same cell.
    A pair counts in the cell of the first element both have, so it is found once."""
    lines = _grid(one, other)
    row, cell, low = _in_cells(one, lines)
    other_row, other_cell, other_low = _in_cells(other, lines)
    order = np.argsort(other_cell, kind="stable")
    other_row, sorted_cell = other_row[order], other_cell[order]
    first = np.searchsorted(sorted_cell, cell, side="left")
    counts = np.searchsorted(sorted_cell, cell, side="right") - first
    blocks = np.cumsum(counts) // _MOST_AT_ONCE
    for block in np.unique(blocks):
        here = np.nonzero(blocks == block)[0]
        at, place = _expand(counts[here], first[here])
        at = here[at]
        i, j = row[at], other_row[place]
        shared = np.maximum(low[i], other_low[j])
        meet = cell[at] == shared[:, -1] if shared.shape[1] == 1 else cell[at] == _cell_number(shared, lines)
        i, j = i[meet], j[meet]
        both = (np.maximum(one.starts[i], other.starts[j]) < np.minimum(one.ends[i], other.ends[j])).all(axis=1)
        yield i[both], j[both]


def _grid(one: Boxes, other: Boxes) -> list[np.ndarray]:
    """The lines of the grid in each dim, where many boxes start; as many cells as boxes, about."""
    starts = np.concatenate([one.starts, other.starts])
    distinct = [np.unique(starts[:, dim]) for dim in range(starts.shape[1])]
    lines, budget = list(distinct), max(len(one), len(other), 1)
    for done, dim in enumerate(sorted(range(len(distinct)), key=lambda d: len(distinct[d]))):
        most = max(1, math.ceil(budget ** (1 / (len(distinct) - done))))
        if len(distinct[dim]) > most:
            column = np.sort(starts[:, dim])
            lines[dim] = np.unique(column[np.arange(most) * len(column) // most])
        budget = max(1, budget // max(1, len(lines[dim])))
    return lines


def _in_cells(boxes: Boxes, lines: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every cell a box reaches into: the box's number, the cell's number; and for each box its first cell a dim."""
    rows = np.nonzero(boxes.volumes)[0]
    cells = np.zeros(len(rows), dtype=np.int64)
    low = np.empty(boxes.starts.shape, dtype=np.int64)
    for dim, line in enumerate(lines):
        low[:, dim] = np.searchsorted(line, boxes.starts[:, dim], side="right") - 1
        high = np.searchsorted(line, boxes.ends[:, dim], side="left") - 1
        at, number = _expand((high - low[:, dim])[rows] + 1, low[rows, dim])
        rows, cells = rows[at], cells[at] * len(line) + number
    return rows, cells, low


def _cell_number(low: np.ndarray, lines: list[np.ndarray]) -> np.ndarray:
    number = np.zeros(len(low), dtype=np.int64)
    for dim, line in enumerate(lines):
        number = number * len(line) + low[:, dim]
    return number


def first_overlap(boxes: Boxes) -> tuple[int, int] | None:
    """Two of the boxes that share an element, if any do."""
    if _neighbours_alone(boxes):
        return None
    twins = _first_twins(boxes)
    if twins is not None:
        return twins
    for one, other in _meetings(boxes, boxes):
        clash = np.nonzero(one < other)[0]
        if len(clash):
            return int(one[clash[0]]), int(other[clash[0]])
    return None


def _first_twins(boxes: Boxes) -> tuple[int, int] | None:
    """Two equal boxes: many of them would meet in far too many pairs."""
    full = np.nonzero(boxes.volumes)[0]
    columns = np.concatenate([boxes.starts, boxes.ends], axis=1)[full]
    order = np.lexsort(columns.T)
    same = np.nonzero((columns[order[1:]] == columns[order[:-1]]).all(axis=1))[0]
    if not len(same):
        return None
    one, other = sorted(full[order[same[0] : same[0] + 2]].tolist())
    return one, other


def _neighbours_alone(boxes: Boxes) -> bool:
    """A quick yes where the boxes follow each other in some dim."""
    full = boxes.take(boxes.volumes > 0)
    for dim in range(boxes.starts.shape[1]):
        order = np.argsort(full.starts[:, dim], kind="stable")
        if (full.ends[order, dim][:-1] <= full.starts[order, dim][1:]).all():
            return True
    return len(full) < 2


def first_hole(boxes: Boxes, shape: Sequence[int]) -> Box | None:
    """A box of the shape that none of the (disjoint) boxes covers, if there is one."""
    whole = int(np.prod(shape, dtype=np.int64))
    if int(boxes.volumes.sum()) == whole:
        return None
    if not len(shape):
        return (), ()
    full = boxes.take(boxes.volumes > 0)
    cuts = np.unique(np.concatenate([full.starts[:, 0], full.ends[:, 0], [0, shape[0]]]))
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist()):
        here = full.take((full.starts[:, 0] <= low) & (full.ends[:, 0] >= high))
        hole = first_hole(Boxes(here.starts[:, 1:], here.ends[:, 1:]), shape[1:])
        if hole is not None:
            return (low, *hole[0]), (high - low, *hole[1])
    return None


@dataclass(frozen=True)
class TileSet:
    """Tiles with their holders: row i is box i, held by ranks[i] as number slots[i] of its tiles."""

    ranks: np.ndarray
    slots: np.ndarray
    boxes: Boxes

    @staticmethod
    def of(tiles: Mapping[int, Sequence[Box]] | TileSet) -> TileSet:
        if isinstance(tiles, TileSet):
            return tiles
        counts = [len(held) for held in tiles.values()]
        ranks = np.repeat(np.array(list(tiles), dtype=np.int64), counts)
        slots = np.concatenate([np.arange(n) for n in counts] or [np.zeros(0, dtype=np.int64)])
        return TileSet(ranks, slots, Boxes.of(box for held in tiles.values() for box in held))

    @staticmethod
    def owned(ranks: np.ndarray, boxes: Boxes) -> TileSet:
        """Tiles in any order of owners; a rank's tiles keep theirs."""
        order = np.argsort(ranks, kind="stable")
        slots = np.empty(len(ranks), dtype=np.int64)
        slots[order] = np.arange(len(ranks)) - np.searchsorted(ranks[order], ranks[order], side="left")
        return TileSet(ranks, slots, boxes)

    def of_width(self, ndim: int | None) -> TileSet:
        """This set; one without tiles as one of that many dims."""
        return self if len(self.boxes) else TileSet(self.ranks, self.slots, Boxes.of([], ndim or 0))

    @property
    def ndim(self) -> int | None:
        return self.boxes.starts.shape[1] if len(self.boxes) else None

    def of_rank(self, rank: int) -> Boxes:
        """The tiles of one rank, in its order."""
        mine = np.nonzero(self.ranks == rank)[0]
        return self.boxes.take(mine[np.argsort(self.slots[mine], kind="stable")])


class Pieces(NamedTuple):
    """Disjoint boxes that together are the sources, each with its holders: rows holders[first[i]:first[i + 1]]."""

    boxes: Boxes
    first: np.ndarray
    holders: np.ndarray  # rows of the source TileSet


def _disjoint(sources: TileSet) -> Pieces:
    """Equal tiles become one piece with several holders; tiles that overlap otherwise are cut up."""
    full = np.nonzero(sources.boxes.volumes)[0]
    boxes = sources.boxes.take(full)
    columns = np.concatenate([boxes.starts, boxes.ends], axis=1)
    order = np.lexsort((sources.ranks[full], *columns.T))
    sorted_columns = columns[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (sorted_columns[1:] != sorted_columns[:-1]).any(axis=1)
    first = np.append(np.nonzero(new)[0], len(order))
    distinct = boxes.take(order[new])
    if first_overlap(distinct) is None:
        return Pieces(distinct, first, full[order])
    cells = _cells(distinct)
    cell, within = meetings(cells, boxes)
    by_cell = np.lexsort((sources.ranks[full[within]], cell))
    return Pieces(cells, np.searchsorted(cell[by_cell], np.arange(len(cells) + 1)), full[within[by_cell]])


def _cells(boxes: Boxes) -> Boxes:
    """The boxes cut along every edge of the boxes they overlap with; each cell once."""
    one, other = meetings(boxes, boxes)
    out: set[tuple[tuple[int, int], ...]] = set()
    for i in range(len(boxes)):
        near = boxes.take(other[one == i])
        sides = []
        for dim, (low, high) in enumerate(zip(boxes.starts[i].tolist(), boxes.ends[i].tolist())):
            cuts = {low, high, *near.starts[:, dim].tolist(), *near.ends[:, dim].tolist()}
            inside = sorted(c for c in cuts if low <= c <= high)
            sides.append(list(zip(inside[:-1], inside[1:])))
        grid: list[tuple[tuple[int, int], ...]] = [()]
        for side in sides:
            grid = [(*cell, interval) for cell in grid for interval in side]
        out.update(grid)
    return _without_coarser(Boxes.of([(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in sorted(out)]))


def _without_coarser(cells: Boxes) -> Boxes:
    """Neighbours cut the same place differently fine: go on until no two cells overlap."""
    return cells if first_overlap(cells) is None else _cells(cells)


class TilePlan:
    """What each rank sends to each other so that the ranks that hold `sources` come to hold `targets`.

    Both map global ranks to lists of boxes (offsets, sizes), or are a `TileSet`. Every target element must be in some
    source, unless `holes` allows that it is not: it is zero then. The plan holds for tensors of `itemsize` bytes an
    element; sizes in elements come with the default.
    """

    def __init__(
        self,
        sources: Mapping[int, Sequence[Box]] | TileSet,
        targets: Mapping[int, Sequence[Box]] | TileSet,
        *,
        itemsize: int = 1,
        holes: bool = False,
    ) -> None:
        held, needed = TileSet.of(sources), TileSet.of(targets)
        if None not in (held.ndim, needed.ndim) and held.ndim != needed.ndim:
            raise MoveError(f"targets: boxes of {needed.ndim} dims, but the sources have {held.ndim}")
        self.sources, self.targets = held.of_width(needed.ndim), needed.of_width(held.ndim)
        self.itemsize, self.holes = itemsize, holes
        pieces = _disjoint(self.sources)
        target, piece = meetings(self.targets.boxes, pieces.boxes)
        boxes = self.targets.boxes.take(target).meet(pieces.boxes.take(piece))
        self._check_cover(target, boxes)
        source = self._choose(pieces, piece, self.targets.ranks[target], boxes.volumes)
        receiver, sender = self.targets.ranks[target], self.sources.ranks[source]
        order = np.lexsort((*boxes.starts.T[::-1], self.targets.slots[target], receiver, sender))
        self._from, self._to, self._boxes = source[order], target[order], boxes.take(order)
        self._volumes = self._boxes.volumes
        self._sender, self._receiver = self.sources.ranks[self._from], self.targets.ranks[self._to]
        self.is_local = bool((self._sender == self._receiver).all())
        self._programs: dict[int, _Program] = {}

    def _check_cover(self, target: np.ndarray, boxes: Boxes) -> None:
        found = np.bincount(target, weights=boxes.volumes, minlength=len(self.targets.boxes)).astype(np.int64)
        short = np.nonzero(found != self.targets.boxes.volumes)[0]
        self.is_full = not len(short)
        if len(short) and not self.holes:
            i = int(short[0])
            start, end = self.targets.boxes.starts[i], self.targets.boxes.ends[i]
            raise MoveError(
                f"rank {self.targets.ranks[i]} needs the tile at {start.tolist()} of sizes {(end - start).tolist()}, "
                f"of which no rank holds {int(self.targets.boxes.volumes[i] - found[i])} elements"
            )

    def _choose(self, pieces: Pieces, piece: np.ndarray, needing: np.ndarray, volumes: np.ndarray) -> np.ndarray:
        """The holder that serves each request: the rank itself where it can, else the holders in turn, the largest
        requests first."""
        first, counts = pieces.first[piece], np.diff(pieces.first)[piece]
        chosen = pieces.holders[first] if len(piece) else np.zeros(0, dtype=np.int64)
        many = np.nonzero(counts > 1)[0]
        if len(many):
            rows, place = _expand(counts[many], first[many])
            own = self.sources.ranks[pieces.holders[place]] == needing[many[rows]]
            turn = self._turns(pieces, piece[many], volumes[many])
            chosen[many] = pieces.holders[first[many] + turn % counts[many]]
            chosen[many[rows[own]]] = pieces.holders[place[own]]
        return chosen

    def _turns(self, pieces: Pieces, piece: np.ndarray, volumes: np.ndarray) -> np.ndarray:
        """Which request this is of those that the same holders can serve."""
        team: dict[bytes, int] = {}  # pieces with the same holders
        number = np.empty(len(piece), dtype=np.int64)
        for i, p in enumerate(piece.tolist()):
            held = pieces.holders[pieces.first[p] : pieces.first[p + 1]]
            number[i] = team.setdefault(self.sources.ranks[held].tobytes(), len(team))
        order = np.lexsort((piece, -volumes, number))
        turn = np.empty(len(piece), dtype=np.int64)
        turn[order] = np.arange(len(piece)) - np.searchsorted(number[order], number[order], side="left")
        return turn

    # -- prices ---------------------------------------------------------------------------------------------
    def bytes_in(self, rank: int) -> int:
        """Bytes that `rank` receives from others."""
        return int(self._volumes[(self._receiver == rank) & (self._sender != rank)].sum()) * self.itemsize

    def bytes_out(self, rank: int) -> int:
        """Bytes that `rank` sends to others."""
        return int(self._volumes[(self._sender == rank) & (self._receiver != rank)].sum()) * self.itemsize

    def lower_bound(self, rank: int) -> int:
        """Bytes of the rank's targets that it does not hold: no plan can bring fewer."""
        need, have = self.targets.of_rank(rank), self.sources.of_rank(rank)
        one, other = meetings(need, _cells(have) if first_overlap(have) else have)
        held = _cells(have) if first_overlap(have) else have
        return int(need.volumes.sum() - need.take(one).meet(held.take(other)).volumes.sum()) * self.itemsize

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds or needs a tile."""
        return tuple(sorted({*self.sources.ranks.tolist(), *self.targets.ranks.tolist()}))

    @functools.cached_property
    def reverse(self) -> TilePlan:
        """The way of the gradient: from targets back to sources, zero where no target took from a source."""
        back = TilePlan(self.targets, self.sources, itemsize=self.itemsize, holes=True)
        back.__dict__["reverse"] = self
        return back

    # -- running --------------------------------------------------------------------------------------------
    def run(
        self,
        parts: Sequence[torch.Tensor],
        group: Any = None,
        note: Note | None = None,
        into: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """This rank's target tiles, given its source tiles; every rank of the group calls it. Differentiable.

        A rank that holds no source passes one empty tensor: it says dtype and device, and carries the graph, so that
        the rank takes part in the backward pass. A rank without targets gets one empty tensor back.
        A tile that stays where it is stays the same tensor. With `into`, the targets are written into these tensors
        and no graph is recorded.
        """
        note, exchange = note or Note("reshard"), _GroupExchange(group)
        if into is not None:
            return exchange.swap(self, tuple(parts), note, listeners(), list(into))
        return _Way(self, exchange, note).go(tuple(parts))

    def run_simulated(self, parts: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """The same for all ranks in one process: each rank's source tiles in, its target tiles out."""
        ranks = sorted({*parts, *self.ranks})
        like = next(t for held in parts.values() for t in held)
        given = {r: tuple(parts.get(r, ())) or (like.new_empty(0),) for r in ranks}
        flat = tuple(t for r in ranks for t in given[r])
        outs = iter(_Way(self, _Simulated(ranks), Note("reshard")).go(flat))
        return {r: [next(outs) for _ in range(max(1, self.program(r).targets))] for r in ranks}

    def program(self, rank: int) -> _Program:
        """What `rank` packs and unpacks."""
        found = self._programs.get(rank)
        if found is None:
            found = self._programs[rank] = _Program(self, rank)
        return found


class _Copy(NamedTuple):
    """A piece of a tile: which tile, where in it, its sizes, and its place in a flat buffer."""

    slot: int
    place: tuple[slice, ...]
    sizes: tuple[int, ...]
    start: int
    end: int


class _Program:
    """One rank's part of a plan, as slices."""

    def __init__(self, plan: TilePlan, rank: int) -> None:
        mine, needed = plan.sources.of_rank(rank), plan.targets.of_rank(rank)
        self.rank, self.sources, self.targets = rank, len(mine), len(needed)
        self.shapes = [tuple(s) for s in (needed.ends - needed.starts).tolist()]
        away = plan._sender != plan._receiver
        sent = np.nonzero((plan._sender == rank) & away)[0]
        got = np.nonzero((plan._receiver == rank) & away)[0]
        kept = np.nonzero((plan._sender == rank) & ~away)[0]
        self.sends = _copies(plan, sent, plan.sources, plan._from)
        self.receives = _copies(plan, got, plan.targets, plan._to)
        self.keeps = list(
            zip(_copies(plan, kept, plan.sources, plan._from), _copies(plan, kept, plan.targets, plan._to))
        )
        self.send_counts = _counts(plan._receiver[sent], plan._volumes[sent])
        self.receive_counts = _counts(plan._sender[got], plan._volumes[got])
        self.stays = {to.slot: at.slot for at, to in self.keeps if _same_tile(plan, rank, at, to, mine, needed)}
        self.is_full = plan.is_full

    def pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Everything this rank sends, in one flat buffer, by receiver."""
        if len(self.sends) == 1:
            return parts[self.sends[0].slot][self.sends[0].place].contiguous().view(-1)
        wire = parts[0].new_empty(self.sends[-1].end if self.sends else 0)
        for piece in self.sends:
            wire[piece.start : piece.end].view(piece.sizes).copy_(parts[piece.slot][piece.place])
        return wire

    def unpack(
        self, wire: torch.Tensor, parts: Sequence[torch.Tensor], into: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """This rank's targets out of what it received and what it kept."""
        if not self.targets:
            return [parts[0].new_empty(0)]
        if into is not None:
            return self._fill(into, wire, parts, {})
        if self._arrives_whole:
            return [wire.view(self.shapes[0])]
        make = torch.Tensor.new_empty if self.is_full else torch.Tensor.new_zeros
        out = [
            parts[self.stays[slot]] if slot in self.stays else make(parts[0], shape)  # type: ignore[operator]
            for slot, shape in enumerate(self.shapes)
        ]
        return self._fill(out, wire, parts, self.stays)

    def _fill(
        self, out: list[torch.Tensor], wire: torch.Tensor, parts: Sequence[torch.Tensor], stays: dict[int, int]
    ) -> list[torch.Tensor]:
        for piece in self.receives:
            out[piece.slot][piece.place] = wire[piece.start : piece.end].view(piece.sizes)
        for at, to in self.keeps:
            if to.slot not in stays:
                out[to.slot][to.place] = parts[at.slot][at.place]
        return out

    @property
    def _arrives_whole(self) -> bool:
        """Whether all this rank gets is one tile in one piece: the buffer is the tile."""
        return len(self.receives) == self.targets == 1 and self.receives[0].sizes == self.shapes[0]


def _copies(plan: TilePlan, rows: np.ndarray, tiles: TileSet, which: np.ndarray) -> list[_Copy]:
    """The boxes of these rows, as places in the tiles and, one after the other, in a buffer."""
    boxes = plan._boxes.take(rows)
    origin = tiles.boxes.starts[which[rows]]
    ends = np.cumsum(plan._volumes[rows])
    return [
        _Copy(slot, tuple(map(slice, low, high)), tuple(size), end - volume, end)
        for slot, low, high, size, end, volume in zip(
            tiles.slots[which[rows]].tolist(),
            (boxes.starts - origin).tolist(),
            (boxes.ends - origin).tolist(),
            (boxes.ends - boxes.starts).tolist(),
            ends.tolist(),
            plan._volumes[rows].tolist(),
        )
    ]


def _same_tile(plan: TilePlan, rank: int, at: _Copy, to: _Copy, mine: Boxes, needed: Boxes) -> bool:
    a, b = mine.take(at.slot), needed.take(to.slot)
    return bool((a.starts == b.starts).all() and (a.ends == b.ends).all())


def _counts(ranks: np.ndarray, volumes: np.ndarray) -> dict[int, int]:
    """Elements for each rank."""
    counts: dict[int, int] = {}
    for rank, volume in zip(ranks.tolist(), volumes.tolist()):
        counts[rank] = counts.get(rank, 0) + volume
    return counts


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous flat tensor: one element may come with any stride, but a view of bytes asks for 1."""
    return (flat.as_strided(flat.shape, (1,)) if flat.numel() <= 1 else flat).view(torch.uint8)


class _GroupExchange:
    """One all_to_all_single over a process group, of bytes: no dtype is special."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)

    axis_names: tuple[str, ...] = ("tiles",)

    def swap(
        self,
        plan: TilePlan,
        parts: tuple[torch.Tensor, ...],
        note: Note,
        heard: list[Any],
        into: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        mine = plan.program(dist.get_rank())
        self._check(plan, mine, parts)
        if plan.is_local:
            return mine.unpack(parts[0].new_empty(0), parts, into)
        if heard:
            received = sum(mine.receive_counts.values()) * parts[0].element_size()
            record(self, "all_to_all", 0, received, note)  # type: ignore[arg-type]
        return mine.unpack(self._all_to_all(mine, mine.pack(parts)), parts, into)

    def _all_to_all(self, mine: _Program, send: torch.Tensor) -> torch.Tensor:
        width = send.element_size()
        out = send.new_empty(sum(mine.receive_counts.values()))
        try:
            dist.all_to_all_single(
                as_bytes(out),
                as_bytes(send),
                [mine.receive_counts.get(r, 0) * width for r in self.ranks],
                [mine.send_counts.get(r, 0) * width for r in self.ranks],
                group=self.group,
            )
        except (RuntimeError, ValueError) as error:
            raise CommError(f"all_to_all of tiles failed on rank {mine.rank} of {self.ranks}: {error}") from error
        return out

    def _check(self, plan: TilePlan, mine: _Program, parts: tuple[torch.Tensor, ...]) -> None:
        missing = [r for r in plan.ranks if r not in self.ranks]
        if missing:
            raise MoveError(f"ranks {missing} hold or need tiles, but the group has the ranks {self.ranks}")
        if len(parts) != max(1, mine.sources):
            raise MoveError(f"rank {mine.rank} passes {len(parts)} tensors for its {mine.sources} source tiles")


class _Simulated:
    """Every rank in this process: buffers are handed over."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks

    def swap(self, plan: TilePlan, parts: tuple[torch.Tensor, ...], note: Note, heard: list[Any]) -> list[torch.Tensor]:
        flat = iter(parts)
        held = {r: tuple(next(flat) for _ in range(max(1, plan.program(r).sources))) for r in self.ranks}
        sent = {}
        for r in self.ranks:
            program = plan.program(r)
            wires = program.pack(held[r]).split(list(program.send_counts.values()))
            sent.update({(r, to): wire for to, wire in zip(program.send_counts, wires)})
        outs: list[torch.Tensor] = []
        for r in self.ranks:
            wires = [sent[(source, r)] for source in plan.program(r).receive_counts]
            wire = torch.cat(wires) if wires else held[r][0].new_empty(0)
            outs += plan.program(r).unpack(wire, held[r])
        return outs


class _Way:
    """A plan, how its buffers travel, and on whose behalf."""

    def __init__(self, plan: TilePlan, exchange: Any, note: Note) -> None:
        self.plan, self.exchange, self.note = plan, exchange, note

    def go(self, parts: tuple[torch.Tensor, ...], heard: list[Any] | None = None) -> list[torch.Tensor]:
        heard = listeners() if heard is None else heard
        if torch.is_grad_enabled() and any(t.requires_grad for t in parts):
            return list(_Moved.apply(self, heard, *parts))
        return self.exchange.swap(self.plan, parts, self.note, heard)


class _Moved(torch.autograd.Function):
    """One node a move; the gradient takes the reverse plan, whose reverse is the plan: second derivatives are exact."""

    @staticmethod
    def forward(ctx: Any, way: _Way, heard: list[Any], *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = way.exchange.swap(way.plan, parts, way.note, heard)
        ctx.way, ctx.heard, ctx.source = way, heard, user_line() if heard else None
        ctx.shapes = [p.shape for p in parts]
        return tuple(out.view_as(out) if any(out is p for p in parts) else out for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        way = ctx.way
        back = _Way(way.plan.reverse, way.exchange, for_backward(way.note, ctx.source))
        got = back.go(tuple(grads), ctx.heard)
        return None, None, *(g.view(shape) if g.numel() == 0 else g for g, shape in zip(got, ctx.shapes))
