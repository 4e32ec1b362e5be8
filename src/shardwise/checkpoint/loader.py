"""One process's part of a load: it reads spans, others take parts of them, and it takes its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.autograd.graph import increment_version

from shardwise.checkpoint.blocks import meet
from shardwise.checkpoint.holders import Held, lies_together
from shardwise.checkpoint.plan import LoadPlan, Read
from shardwise.checkpoint.shared import Sharing
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.spans import Part, up
from shardwise.checkpoint.world import World
from shardwise.comm.guard import Guard
from shardwise.comm.messages import start_sends
from shardwise.layout.tiles import Tile

Messages = dict[int, list[tuple[Read, Part]]]


class Loader:
    """Reads the spans of a round, and puts their parts into the pieces of this process."""

    def __init__(
        self, source: Source, pieces: dict[str, list[Held]], world: World, made: LoadPlan, sharing: Sharing | None
    ) -> None:
        self.source, self.pieces, self.world, self.sharing = source, pieces, world, sharing
        self.begun: dict[str, None] = {}  # names of which something was put in its place
        self.near = {world.rank}  # processes whose memory can be seen
        if sharing is not None:
            mine = sharing.hosts[world.ranks.index(world.rank)]
            self.near |= {rank for rank, host in zip(world.ranks, sharing.hosts) if host == mine}
        self.arena = sharing.arena(made.arena) if sharing is not None and made.arena else torch.empty(0)
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.mine = [read for reads in made.rounds for read in reads if read.reader == world.rank]
        self.started = self.finished = 0  # of these
        self.ahead = made.ahead > 0

    # -- reading ------------------------------------------------------------------------------------------------
    def read_round(self, reads: Sequence[Read]) -> Exception | None:
        """Read this process's spans of a round; what nobody else needs is put in its place at once. What went wrong."""
        mine = [read for read in reads if read.reader == self.world.rank]
        try:
            with torch.no_grad():
                for read in mine:
                    self._begin()
                    self._read(read)
                    self.finished += 1
                self._begin()  # while others take their parts, the disk has something to do
                self._pack(reads)
        except Exception as error:
            return error
        return None

    def _begin(self) -> None:
        """Start to read the span that is next and the one after it, be it in the next round."""
        start = self.source.begin if self.ahead else self.source.expect
        while self.started < min(self.finished + 2, len(self.mine)):
            read = self.mine[self.started]
            start(read.name, read.span.first, read.span.blocks)
            self.started += 1

    def _read(self, read: Read) -> None:
        name, span, source, at = read.name, read.span, self.source, 0
        room = self._run_of(read) if source.reads_in_place(name) else None
        if room is not None:
            source.read_run(name, span.first, span.blocks, room)
            return
        blocks, dtype = source.blocks(name), source.entries[name].dtype
        for i in range(span.first, span.first + span.blocks):
            tile = blocks[i].tile
            if read.slot is None:
                found = source.peek(name, i)
                values = source.read_block(name, i, self._scratch(source.size(name, i))) if found is None else found
                for part in read.parts:
                    box = meet(tile, part.box)
                    if box is not None:
                        self._put(name, part.tile, box, inside(values, tile, box))
                continue
            size = torch.Size(tile.sizes).numel() * dtype.itemsize
            values = source.read_block(name, i, self._scratch(source.size(name, i)))
            self.arena[read.slot + at : read.slot + at + size].view(dtype).view(tile.sizes).copy_(values)
            at += size

    def _run_of(self, read: Read) -> torch.Tensor | None:
        """The memory that is a span as the file has it: what others take it from, or where all of it belongs; None
        where its values do not lie so."""
        if read.slot is not None:
            return self.arena[read.slot : read.slot + read.span.bytes]
        if len(read.parts) != 1 or read.parts[0].box != read.span.tile:
            return None
        tile, values = self.pieces[read.name][read.parts[0].tile]
        room = inside(values, tile, read.span.tile)
        if not lies_together(room) or room.is_inference():
            return None
        self.begun[read.name] = None
        increment_version(room)
        return room.as_strided((room.numel(),), (1,)).view(torch.uint8)

    def _scratch(self, size: int) -> torch.Tensor:
        if self.scratch.numel() < size:
            self.scratch = torch.empty(size, dtype=torch.uint8)
        return self.scratch

    # -- taking -------------------------------------------------------------------------------------------------
    def _pack(self, reads: Sequence[Read]) -> None:
        """Put what others need of this process's spans into messages, and make room for theirs."""
        me, sent, self.coming = self.world.rank, Messages(), Messages()
        for read in reads:
            for part in read.parts if read.slot is not None else ():
                if part.rank != me:
                    sent.setdefault(part.rank, []).append((read, part))
                elif read.reader not in self.near:
                    self.coming.setdefault(read.reader, []).append((read, part))
        self.out, self.into = _room_for(sent), _room_for(self.coming)
        for rank, parts in sent.items():
            for room, read, part in self._laid(self.out[rank], parts):
                room.copy_(inside(self._span(read), read.span.tile, part.box))

    def take(self, reads: Sequence[Read]) -> None:
        """Put the parts that this process needs where they belong."""
        if len(self.near) < self.world.size and self.world.group is not None:
            along = self.world.along()
            number = {rank: i for i, rank in enumerate(along.ranks)}
            with Guard(along, "all_to_all", f"checkpoint of {self.world.size} ranks", f" on rank {self.world.rank}"):
                going, expected = ([(number[r], found[r]) for r in sorted(found)] for found in (self.out, self.into))
                work = start_sends(going, expected, along)
                self._take_near(reads)
                work.wait()
        else:
            self._take_near(reads)
        for rank, parts in self.coming.items():
            for value, read, part in self._laid(self.into[rank], parts):
                self._put(read.name, part.tile, part.box, value)

    def _take_near(self, reads: Sequence[Read]) -> None:
        for read in reads:
            if read.slot is not None and read.reader in self.near:
                whole = self._span(read)
                for part in read.parts:
                    if part.rank == self.world.rank:
                        self._put(read.name, part.tile, part.box, inside(whole, read.span.tile, part.box))

    def _span(self, read: Read) -> torch.Tensor:
        """The values of a span in the memory of its reader."""
        assert read.slot is not None
        own = read.reader == self.world.rank or self.sharing is None
        arena = self.arena if own or self.sharing is None else self.sharing.of_peer(read.reader)
        flat = arena[read.slot : read.slot + read.span.bytes].view(self.source.entries[read.name].dtype)
        return flat.view(read.span.tile.sizes)

    def _laid(
        self, buffer: torch.Tensor, parts: Sequence[tuple[Read, Part]]
    ) -> Iterator[tuple[torch.Tensor, Read, Part]]:
        """The parts of a message, one after the other."""
        at = 0
        for read, part in parts:
            flat = buffer[at : at + part.bytes].view(self.source.entries[read.name].dtype)
            yield flat.view(part.box.sizes), read, part
            at += up(part.bytes)

    def _put(self, name: str, number: int, box: Tile, value: torch.Tensor) -> None:
        self.begun[name] = None
        tile, values = self.pieces[name][number]
        inside(values, tile, box).copy_(value)


def _room_for(messages: Messages) -> dict[int, torch.Tensor]:
    """Room for a message with each peer."""
    sizes = {rank: sum(up(part.bytes) for _, part in parts) for rank, parts in messages.items()}
    return {rank: torch.empty(size, dtype=torch.uint8) for rank, size in sizes.items()}


def inside(values: torch.Tensor, tile: Tile, box: Tile) -> torch.Tensor:
    """The values of a box, from those of a tile around it."""
    for dim, (a, b, n) in enumerate(zip(tile.offsets, box.offsets, box.sizes, strict=True)):
        if n != values.shape[dim]:
            values = values.narrow(dim, b - a, n)
    return values
