"""One rank's part of a plan between tiles, as slices: what it sends to whom, what it keeps, where the rest goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from shardwise.torch_private import foreach_copy_

if TYPE_CHECKING:
    from shardwise.move.tiles import TilePlan, TileSet


class Copy(NamedTuple):
    """A piece of a tile: which tile, where in it (None: all of it), its sizes, and its place in a flat buffer."""

    slot: int
    place: tuple[slice, ...] | None
    sizes: tuple[int, ...]
    start: int
    end: int

    def of(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """The piece itself, as a view."""
        tile = tiles[self.slot]
        return tile if self.place is None else tile[self.place]


class Message(NamedTuple):
    """What goes from one rank to another, piece after piece."""

    peer: int
    pieces: list[Copy]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    def packed(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pieces in one piece of memory: their own, if there is one piece without holes in its memory."""
        if len(self.pieces) == 1:
            return self.pieces[0].of(tiles).resolve_conj().resolve_neg().contiguous()
        wire = tiles[0].new_empty(self.end - self.start)
        self.pack_into(wire, tiles)
        return wire

    def pack_into(self, wire: torch.Tensor, tiles: Sequence[torch.Tensor]) -> None:
        foreach_copy_(self._views(wire), [piece.of(tiles) for piece in self.pieces])

    def landing(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The memory of the tiles that the message can be written to as it comes, if there is such."""
        if len(self.pieces) > 1:
            return None
        view = self.pieces[0].of(tiles)
        return view if view.is_contiguous() else None

    def unpack(self, wire: torch.Tensor, tiles: Sequence[torch.Tensor]) -> None:
        """Put the pieces of a buffer into their places."""
        foreach_copy_([piece.of(tiles) for piece in self.pieces], self._views(wire))

    def _views(self, wire: torch.Tensor) -> list[torch.Tensor]:
        if len(self.pieces) == 1:
            return [wire.view(self.pieces[0].sizes)]
        cut = wire.split([piece.end - piece.start for piece in self.pieces])
        return [flat.view(piece.sizes) for flat, piece in zip(cut, self.pieces)]


class Program:
    """What `rank` does: pack and send, keep, receive and unpack."""

    def __init__(self, plan: TilePlan, rank: int) -> None:
        self.rank, self.sources = rank, len(plan.sources.rows_of(rank))
        needed = plan.targets.of_rank(rank)
        self.targets, self.is_full = len(needed), plan.is_full
        self.shapes = [tuple(s) for s in (needed.ends - needed.starts).tolist()]
        rows = plan.rows
        away = rows.sender != rows.receiver
        sent = np.nonzero((rows.sender == rank) & away)[0]
        got = np.nonzero((rows.receiver == rank) & away)[0]
        kept = np.nonzero((rows.sender == rank) & ~away)[0]
        self.outgoing = _messages(rows.receiver[sent], _copies(plan, sent, plan.sources, rows.source))
        self.incoming = _messages(rows.sender[got], _copies(plan, got, plan.targets, rows.target))
        self.keeps = list(
            zip(_copies(plan, kept, plan.sources, rows.source), _copies(plan, kept, plan.targets, rows.target))
        )
        # a tile that stays where it is stays the same tensor
        self.stays = {to.slot: at.slot for at, to in self.keeps if at.place is None and to.place is None}
        self.send_counts = {m.peer: m.end - m.start for m in self.outgoing}
        self.receive_counts = {m.peer: m.end - m.start for m in self.incoming}
        self.received = sum(self.receive_counts.values())

    def pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Everything this rank sends, in one flat buffer, by receiver."""
        if len(self.outgoing) == 1:
            return self.outgoing[0].packed(parts).view(-1)
        wire = parts[0].new_empty(self.outgoing[-1].end if self.outgoing else 0)
        for message in self.outgoing:
            message.pack_into(wire[message.start : message.end], parts)
        return wire

    def unpack(
        self, wire: torch.Tensor, parts: Sequence[torch.Tensor], into: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """This rank's targets out of what it received, in one flat buffer by sender, and what it kept."""
        if into is None and self._arrives_whole:
            return [wire.view(self.shapes[0])]
        out = self.prepare(parts, into)
        self.keep(parts, out, into is None)
        for message in self.incoming:
            message.unpack(wire[message.start : message.end], out)
        return out

    def prepare(self, parts: Sequence[torch.Tensor], into: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """The target tiles, to be filled; tiles that stay are there already."""
        if not self.targets:
            return [parts[0].new_empty(0)]
        if into is not None:
            return into
        make = parts[0].new_empty if self.is_full else parts[0].new_zeros
        if not self.stays:
            return [make(shape) for shape in self.shapes]
        return [
            parts[self.stays[slot]] if slot in self.stays else make(shape) for slot, shape in enumerate(self.shapes)
        ]

    def keep(self, parts: Sequence[torch.Tensor], out: Sequence[torch.Tensor], stays: bool) -> None:
        """Copy what this rank has already; tiles that stay need none."""
        moved = [(at, to) for at, to in self.keeps if not (stays and to.slot in self.stays)]
        if moved:
            foreach_copy_([to.of(out) for _, to in moved], [at.of(parts) for at, _ in moved])

    @property
    def _arrives_whole(self) -> bool:
        """Whether all this rank gets is one tile in one piece: the buffer is the tile."""
        pieces = [piece for message in self.incoming for piece in message.pieces]
        return self.targets == len(pieces) == 1 and pieces[0].place is None


def _copies(plan: TilePlan, rows: np.ndarray, tiles: TileSet, which: np.ndarray) -> list[Copy]:
    """The boxes of these rows, as places in the tiles and, one after the other, in a buffer."""
    boxes, tile = plan.rows.boxes.take(rows), tiles.boxes.take(which[rows])
    volumes = plan.rows.volumes[rows]
    whole = ((boxes.starts == tile.starts) & (boxes.ends == tile.ends)).all(axis=1)
    return [
        Copy(slot, None if full else tuple(map(slice, low, high)), tuple(size), end - volume, end)
        for slot, full, low, high, size, end, volume in zip(
            tiles.slots[which[rows]].tolist(),
            whole.tolist(),
            (boxes.starts - tile.starts).tolist(),
            (boxes.ends - tile.starts).tolist(),
            (boxes.ends - boxes.starts).tolist(),
            np.cumsum(volumes).tolist(),
            volumes.tolist(),
        )
    ]


def _messages(peers: np.ndarray, copies: list[Copy]) -> list[Message]:
    """The pieces by peer; they come in the order of the peers."""
    found: dict[int, list[Copy]] = {}
    for peer, piece in zip(peers.tolist(), copies):
        found.setdefault(peer, []).append(piece)
    return [Message(peer, pieces) for peer, pieces in found.items()]
