"""The files of a checkpoint, or of others, as a table of names shows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.checkpoint.blocks import Block, meet
from shardwise.checkpoint.mapping import Map, Piece, all_of
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.storage import StorageLine
from shardwise.checkpoint.tree import flat_tree


class MappedSource(Source):
    """A source as a table says it: its tensors are those of the program."""

    def __init__(self, inner: Source, table: Map) -> None:
        self.inner, self.path, self.step, self.random = inner, inner.path, inner.step, inner.random
        self.dtype = table.dtype
        self.mapped = table.apply(inner.entries)
        self.entries = {name: made.entry for name, made in self.mapped.items()}
        same = self.entries.keys() == inner.entries.keys()
        self.tree = inner.tree if same else flat_tree(list(self.entries), inner.values)
        self._found: dict[str, list[tuple[Piece, int, Block]]] = {}

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self.inner.bytes_read

    def _parts(self, name: str) -> list[tuple[Piece, int, Block]]:
        """The blocks of files that a tensor is made of, with their tiles in it."""
        if name not in self._found:
            found = []
            for piece in self.mapped[name].pieces:
                for i, block in enumerate(self.inner.blocks(piece.name)):
                    part = meet(block.tile, piece.box)
                    if part is not None:
                        found.append((piece, i, Block(piece.tile(part), block.start, block.stop)))
            self._found[name] = found
        return self._found[name]

    def blocks(self, name: str) -> Sequence[Block]:
        return [block for _, _, block in self._parts(name)]

    def order(self, name: str) -> tuple[str, int]:
        return self.inner.order(self.mapped[name].pieces[0].name)

    def reads_in_place(self, name: str) -> bool:
        entry, pieces = self.mapped[name]
        piece, inner = pieces[0], self.inner.entries[pieces[0].name]
        as_it_is = piece[2:5] == (None, None, None) and piece.box == all_of(inner.shape)
        return len(pieces) == 1 and as_it_is and entry.dtype == inner.dtype and self.inner.reads_in_place(piece.name)

    def cast(self, name: str, dtype: torch.dtype) -> bool:
        entry = self.entries[name]
        if dtype != self.dtype or entry.shape or not entry.dtype.is_floating_point:
            return False
        self.entries[name] = entry._replace(dtype=dtype)
        self.mapped[name] = self.mapped[name]._replace(entry=self.entries[name])
        return True

    def checksum(self, name: str, i: int) -> int | None:
        piece, number, _ = self._parts(name)[i]
        return self.inner.checksum(piece.name, number) if self.reads_in_place(name) else None

    def expect(self, name: str, first: int, count: int) -> None:
        for piece, number, _ in self._parts(name)[first : first + count]:
            self.inner.expect(piece.name, number, 1)

    def line(self) -> StorageLine:
        return self.inner.line()

    def read_block(self, name: str, i: int, room: torch.Tensor) -> torch.Tensor:
        piece, number, _ = self._parts(name)[i]
        values, tile = self.inner.read_block(piece.name, number, room), self.inner.blocks(piece.name)[number].tile
        part = meet(tile, piece.box)
        assert part is not None
        for dim, (a, b, n) in enumerate(zip(tile.offsets, part.offsets, part.sizes, strict=True)):
            values = values.narrow(dim, b - a, n)
        return piece.value(values).to(self.entries[name].dtype)

    def read_run(self, name: str, first: int, count: int, room: torch.Tensor) -> None:
        self.inner.read_run(self.mapped[name].pieces[0].name, first, count, room)

    def close(self) -> None:
        self.inner.close()
