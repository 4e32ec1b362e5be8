"""Moves between any two sets of tiles: which rank sends which box to which other rank.

`TilePlan` intersects the tiles every rank has with those every rank needs. It is pure integers: thousands of tiles cost
milliseconds. A `TileStep` runs it on a process group, where each rank has a list of tensors.

    plan = TilePlan({0: [((0,), (4,))], 1: [((4,), (4,))]}, {2: [((0,), (8,))]}, itemsize=4)
    plan.bytes_in(2), plan.lower_bound(2)            # 32, 32
    run_tiles(plan, parts, group)                    # on every rank of the group, differentiable

An element that a rank holds itself never travels; replicas share the sending.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from shardwise.comm.guard import Guard
from shardwise.comm.messages import Group, along_group
from shardwise.comm.record import Note, recorders
from shardwise.drawing import rank_names
from shardwise.errors import MoveError
from shardwise.layout.shapes import contiguous_stride
from shardwise.layout.tiles import TileLike, Tiles, as_tuples, cells_of, expand, first_overlap, meetings
from shardwise.layout.tileset import TileSet
from shardwise.move.run import run_now, run_steps
from shardwise.move.schedule import Pieces, Route, Routes, Shape
from shardwise.move.steps import Step
from shardwise.move.transfer import Exchanged, Transfer, begins_its_memory
from shardwise.protocols import Holder, Structure


class HeldBoxes(NamedTuple):
    """Disjoint tiles that together are the sources, each with its holders: rows holders[first[i]:first[i + 1]]."""

    tiles: Tiles
    first: np.ndarray
    holders: np.ndarray  # rows of the source TileSet


def _disjoint(sources: TileSet) -> HeldBoxes:
    """Equal tiles become one piece with several holders; tiles that overlap otherwise are cut up."""
    full = np.nonzero(sources.tiles.volumes)[0]
    boxes = sources.tiles.take(full)
    columns = np.concatenate([boxes.starts, boxes.ends], axis=1)
    order = np.lexsort((sources.ranks[full], *columns.T))
    sorted_columns = columns[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (sorted_columns[1:] != sorted_columns[:-1]).any(axis=1)
    first = np.append(np.nonzero(new)[0], len(order))
    distinct = boxes.take(order[new])
    if first_overlap(distinct) is None:
        return HeldBoxes(distinct, first, full[order])
    cells = cells_of(distinct)
    cell, within = meetings(cells, boxes)
    by_cell = np.lexsort((sources.ranks[full[within]], cell))
    return HeldBoxes(cells, np.searchsorted(cell[by_cell], np.arange(len(cells) + 1)), full[within[by_cell]])


class Rows(NamedTuple):
    """The boxes that travel or stay: row i is the part of source tile source[i] that target tile target[i] gets."""

    source: np.ndarray
    target: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    tiles: Tiles
    volumes: np.ndarray


class TilePlan(Exchanged):
    """What each rank sends to each other so that the ranks that hold `sources` come to hold `targets`.

    Both map global ranks to lists of boxes (offsets, sizes), or are a `TileSet`. Every target element must be in some
    source, unless `holes` allows that it is not: it is zero then. The plan holds for tensors of `itemsize` bytes per
    element; sizes in elements come with the default.
    """

    def __init__(
        self,
        sources: Mapping[int, Sequence[TileLike]] | TileSet,
        targets: Mapping[int, Sequence[TileLike]] | TileSet,
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
        target, piece = meetings(self.targets.tiles, pieces.tiles)
        boxes = self.targets.tiles.take(target).meet(pieces.tiles.take(piece))
        self._check_cover(target, boxes)
        source = self._choose(pieces, piece, self.targets.ranks[target], boxes.volumes)
        receiver, sender = self.targets.ranks[target], self.sources.ranks[source]
        order = np.lexsort((*boxes.starts.T[::-1], self.targets.slots[target], receiver, sender))
        boxes = boxes.take(order)
        self.rows = Rows(source[order], target[order], sender[order], receiver[order], boxes, boxes.volumes)
        self.is_local = bool((sender == receiver).all())
        self.kept: dict[Any, Any] = {}  # what was worked out for a rank

    @functools.cached_property
    def digest(self) -> int:
        """A number that is equal in all processes. Other tiles, or other owners, have very likely another one."""
        sides = (self.sources, self.targets)
        arrays = [a for side in sides for a in (side.tiles.starts, side.tiles.ends, side.ranks)]
        return crc32(b"".join(np.ascontiguousarray(a, dtype=np.int64).tobytes() for a in arrays))

    def describe(self) -> str:
        """A short text: how much is on which ranks before and afterwards."""
        held, needed = (
            f"{len(side.tiles)} tiles on {rank_names(sorted(set(side.ranks.tolist())))}"
            for side in (self.sources, self.targets)
        )
        return f"{held} -> {needed}"

    def _check_cover(self, target: np.ndarray, boxes: Tiles) -> None:
        found = np.bincount(target, weights=boxes.volumes, minlength=len(self.targets.tiles)).astype(np.int64)
        short = np.nonzero(found != self.targets.tiles.volumes)[0]
        self.zeros = bool(len(short))
        if len(short) and not self.holes:
            i = int(short[0])
            start, end = self.targets.tiles.starts[i], self.targets.tiles.ends[i]
            raise MoveError(
                f"rank {self.targets.ranks[i]} needs the tile at {start.tolist()} of sizes {(end - start).tolist()}, "
                f"of which no rank holds {int(self.targets.tiles.volumes[i] - found[i])} elements"
            )

    def _choose(self, pieces: HeldBoxes, piece: np.ndarray, needing: np.ndarray, volumes: np.ndarray) -> np.ndarray:
        """The holder that serves each request: the rank itself where it holds the piece, else the holders in turn,
        beginning with the largest requests."""
        first, counts = pieces.first[piece], np.diff(pieces.first)[piece]
        chosen = pieces.holders[first] if len(piece) else np.zeros(0, dtype=np.int64)
        many = np.nonzero(counts > 1)[0]
        if len(many):
            rows, place = expand(counts[many], first[many])
            own = self.sources.ranks[pieces.holders[place]] == needing[many[rows]]
            turn = self._turns(pieces, piece[many], volumes[many])
            chosen[many] = pieces.holders[first[many] + turn % counts[many]]
            chosen[many[rows[own]]] = pieces.holders[place[own]]
        return chosen

    def _turns(self, pieces: HeldBoxes, piece: np.ndarray, volumes: np.ndarray) -> np.ndarray:
        """The number of each request among those that the same holders can serve."""
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
        return int(self.rows.volumes[(self.rows.receiver == rank) & (self.rows.sender != rank)].sum()) * self.itemsize

    def bytes_out(self, rank: int) -> int:
        """Bytes that `rank` sends to others."""
        return int(self.rows.volumes[(self.rows.sender == rank) & (self.rows.receiver != rank)].sum()) * self.itemsize

    def lower_bound(self, rank: int) -> int:
        """Bytes of the rank's targets that it does not hold: no plan can bring fewer."""
        need, have = self.targets.of_rank(rank), self.sources.of_rank(rank)
        held = cells_of(have) if first_overlap(have) else have
        one, other = meetings(need, held)
        return int(need.volumes.sum() - need.take(one).meet(held.take(other)).volumes.sum()) * self.itemsize

    @functools.cached_property
    def all_ranks(self) -> frozenset[int]:
        """Every rank that holds or needs a tile."""
        return frozenset((*self.sources.ranks.tolist(), *self.targets.ranks.tolist()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds or needs a tile, in order."""
        return tuple(sorted(self.all_ranks))

    @functools.cached_property
    def reverse(self) -> TilePlan:
        """The plan of the gradient: from targets back to sources, zero where no target took from a source."""
        back = TilePlan(self.targets, self.sources, itemsize=self.itemsize, holes=True)
        back.__dict__["reverse"] = self
        return back

    # -- one rank's part ------------------------------------------------------------------------------------
    def routes(self, member: int) -> Routes:
        """What a rank sends and takes."""
        rows, held, needed = self.rows, self.sources.shapes(member), self.targets.shapes(member)
        sent, got = np.nonzero(rows.sender == member)[0], np.nonzero(rows.receiver == member)[0]
        stay = sent[rows.receiver[sent] == member]
        if len(stay):
            stay = self._staying(stay)
            sent, got = np.setdiff1d(sent, stay), np.setdiff1d(got, stay)
        out = self._pieces(sent, self.sources, rows.source[sent], held)
        into = self._pieces(got, self.targets, rows.target[got], needed)
        sends = {peer: out.some(first, stop) for peer, first, stop in _runs(rows.receiver[sent])}
        takes = [Route((peer,), into.some(first, stop)) for peer, first, stop in _runs(rows.sender[got])]
        after, before = self.targets.slots[rows.target[stay]], self.sources.slots[rows.source[stay]]
        return Routes(sends, takes, held, needed, dict(zip(after.tolist(), before.tolist(), strict=True)))

    def _staying(self, kept: np.ndarray) -> np.ndarray:
        """Of the rows that a rank keeps: those that are all of a tensor, before and after."""
        before = self._are_whole(kept, self.sources, self.rows.source[kept])
        after = self._are_whole(kept, self.targets, self.rows.target[kept])
        return kept[before & after]

    def _are_whole(self, rows: np.ndarray, side: TileSet, tiles: np.ndarray) -> np.ndarray:
        """For each of these rows, whether it moves a whole tensor that is exactly one of these tiles."""
        return (side.places is None) & (self.rows.volumes[rows] == side.tiles.take(tiles).volumes)

    def _pieces(self, rows: np.ndarray, side: TileSet, tiles: np.ndarray, tensors: Sequence[Shape]) -> Pieces:
        """The boxes of these rows, as places in the tensors of the rank that holds these tiles."""
        slots = tuple(side.slots[tiles].tolist())
        if self._are_whole(rows, side, tiles).all():
            return Pieces(slots, tuple(tensors[slot] for slot in slots), None, None, None, whole=True)
        boxes = self.rows.tiles.take(rows)
        offsets = boxes.starts - side.tiles.starts[tiles]
        if side.places is not None:
            offsets = offsets + side.places[tiles]
        by_slot = list(map(contiguous_stride, tensors))
        strides = tuple(by_slot[slot] for slot in slots)
        starts = (offsets * np.array(strides, dtype=np.int64).reshape(offsets.shape)).sum(axis=1)
        shapes = tuple(as_tuples(boxes.ends - boxes.starts))
        return Pieces(slots, shapes, strides, tuple(starts.tolist()), None, whole=False)


def _runs(peers: np.ndarray) -> list[tuple[int, int, int]]:
    """For each peer, with `peers` in order: the peer, its first row, and the row after its last one."""
    if not len(peers):
        return []
    bounds = [0, *(np.nonzero(peers[1:] != peers[:-1])[0] + 1).tolist(), len(peers)]
    return [(int(peers[first]), first, stop) for first, stop in itertools.pairwise(bounds)]


Tensors = Sequence[torch.Tensor]


class TensorLists:
    """A backend whose local value is a list of tensors: the tiles of one rank."""

    simulated = outside = False

    def values(self, local: Tensors) -> tuple[torch.Tensor, ...]:
        return tuple(local)

    def structure(self, local: Tensors) -> list[torch.Size]:
        return [x.shape for x in local]

    def assemble(self, structure: Structure, values: Tensors) -> list[torch.Tensor]:
        return list(values)

    def pick_gradients(self, structure: Sequence[torch.Size], local: Tensors) -> tuple[torch.Tensor, ...]:
        """A rank without tiles passes an empty tensor, of whatever shape."""
        return tuple(x.view(shape) if not x.numel() else x for x, shape in zip(local, structure, strict=True))


_LISTS = TensorLists()


@dataclass(frozen=True, eq=False)
class TileStep(Step):
    """The step that runs a plan on one rank of a group. Results are written `into` tensors if some are given."""

    plan: TilePlan
    group: Group
    into: list[torch.Tensor] | None = None

    where = "tiles"

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "local" if self.plan.is_local else "all_to_all"

    @property
    def partner(self) -> TileStep:
        return TileStep(self.plan.reverse, self.group)

    @property
    def digest(self) -> int:  # type: ignore[override]
        return self.plan.digest

    def describe(self) -> str:
        return self.plan.describe()

    def bytes_received(self, comm: object) -> int:
        return self.plan.bytes_in(dist.get_rank())

    def run(self, comm: Holder, local: Tensors) -> list[torch.Tensor]:
        me, along = dist.get_rank(), along_group(self.group, local[0].device)
        self._check(me, along.ranks, local)
        if self.plan.is_local:
            out = Transfer(self.plan, local, me, along, self.into).finish()
        else:
            guard = Guard(along, self.kind, f"tiles of {len(along.ranks)} ranks", f" on rank {me}")
            guard.carries(str(local[0].dtype))
            with guard:
                out = Transfer(self.plan, local, me, along, self.into).finish()
        return out or [local[0].new_empty(0)]

    def _check(self, me: int, ranks: Sequence[int], parts: Tensors) -> None:
        if not self.plan.all_ranks.issubset(ranks):
            missing = sorted(self.plan.all_ranks - set(ranks))
            raise MoveError(f"ranks {missing} hold or need tiles, but the group has the ranks {list(ranks)}")
        tiles = len(self.plan.sources.rows_of(me))
        if len(parts) != max(1, tiles):
            raise MoveError(f"rank {me} passes {len(parts)} tensors for its {tiles} source tiles")


def run_tiles(
    plan: TilePlan,
    parts: Tensors,
    group: Group | None = None,
    note: Note | None = None,
    into: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """This rank's target tiles, given its source tiles; every rank of the group calls it. Differentiable.

    A rank that holds no source passes one empty tensor. It says dtype and device, and its graph makes the rank take
    part in the backward pass. A rank without targets gets one empty tensor back. A tile that does not move is returned
    as the same tensor. With `into`, the targets are written into these tensors (of the same dtype, on the same device)
    and no graph is recorded.
    """
    note, group = note or Note("reshard"), dist.group.WORLD if group is None else group
    if into is None:
        return run_steps(_LISTS, (TileStep(plan, group),), tuple(parts), note)
    if all(map(begins_its_memory, into)):
        return run_now(_LISTS, (TileStep(plan, group, list(into)),), tuple(parts), note, recorders())
    with torch.no_grad():
        for room, value in zip(into, run_tiles(plan, parts, group, note), strict=True):
            room.copy_(value)
    return list(into)
