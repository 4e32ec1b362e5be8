"""Moves between any two sets of tiles: who sends which box to whom, found by a sweep.

A tile is a box of global indices (offsets, sizes) that a rank holds. `TilePlan` intersects the tiles every rank has
with those every rank needs. It is pure integers: thousands of tiles cost milliseconds.

    plan = TilePlan({0: [((0,), (4,))], 1: [((4,), (4,))]}, {2: [((0,), (8,))]}, itemsize=4)
    plan.bytes_in(2), plan.lower_bound(2)            # 32, 32
    plan.run(parts, group)                           # on every rank of the group, differentiable

An element that a rank holds itself never travels; replicas share the sending.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.comm.record import Note, listeners
from shardwise.errors import MoveError
from shardwise.move.boxes import Box, Boxes, cells_of, expand, first_overlap, meetings
from shardwise.move.tile_exchange import GroupExchange, Simulated, Way
from shardwise.move.tile_program import Program


@dataclass(frozen=True, eq=False)
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

    def rows_of(self, rank: int) -> list[int]:
        """The rows of one rank's tiles, in its order."""
        found = self._rows.get(rank)
        if found is None:
            mine = np.nonzero(self.ranks == rank)[0]
            found = self._rows[rank] = mine[np.argsort(self.slots[mine], kind="stable")].tolist()
        return found

    @functools.cached_property
    def _rows(self) -> dict[int, list[int]]:
        return {}

    def of_rank(self, rank: int) -> Boxes:
        """The tiles of one rank, in its order."""
        return self.boxes.take(self.rows_of(rank))

    @functools.cached_property
    def key(self) -> tuple[bytes, ...]:
        """Equal for equal tiles with equal holders."""
        return self.ranks.tobytes(), self.slots.tobytes(), self.boxes.starts.tobytes(), self.boxes.ends.tobytes()


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
    cells = cells_of(distinct)
    cell, within = meetings(cells, boxes)
    by_cell = np.lexsort((sources.ranks[full[within]], cell))
    return Pieces(cells, np.searchsorted(cell[by_cell], np.arange(len(cells) + 1)), full[within[by_cell]])


class Rows(NamedTuple):
    """The boxes that are taken: row i is a box of source tile source[i] that target tile target[i] gets."""

    source: np.ndarray
    target: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    boxes: Boxes
    volumes: np.ndarray


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
        boxes = boxes.take(order)
        self.rows = Rows(source[order], target[order], sender[order], receiver[order], boxes, boxes.volumes)
        self.is_local = bool((sender == receiver).all())
        self._programs: dict[int, Program] = {}

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
            rows, place = expand(counts[many], first[many])
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
        (of the same dtype, on the same device) and no graph is recorded.
        """
        note, exchange = note or Note("reshard"), GroupExchange(group)
        if into is not None:
            return exchange.swap(self, tuple(parts), note, listeners(), list(into))
        return Way(self, exchange, note).go(tuple(parts))

    def run_simulated(self, parts: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """The same for all ranks in one process: each rank's source tiles in, its target tiles out."""
        ranks = sorted({*parts, *self.ranks})
        like = next(t for held in parts.values() for t in held)
        given = {r: tuple(parts.get(r, ())) or (like.new_empty(0),) for r in ranks}
        flat = tuple(t for r in ranks for t in given[r])
        outs = iter(Way(self, Simulated(ranks), Note("reshard")).go(flat))
        return {r: [next(outs) for _ in range(max(1, self.program(r).targets))] for r in ranks}

    def program(self, rank: int) -> Program:
        """What `rank` packs and unpacks."""
        found = self._programs.get(rank)
        if found is None:
            found = self._programs[rank] = Program(self, rank)
        return found
