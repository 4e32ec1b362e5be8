"""What a load reads from: tensors by name, each in blocks that are read at once."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from shardwise.checkpoint.blocks import LEAST_BLOCK, Block, Cuts
from shardwise.checkpoint.crc import buffer_of, crc_of
from shardwise.checkpoint.direct import Ahead
from shardwise.checkpoint.files import Checksums, Entry, Header, Place
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.storage import StorageLine, measured_storage
from shardwise.checkpoint.tree import Json, Node, flat_tree, walk
from shardwise.errors import CheckpointError


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal, NaN and all."""
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x.reshape(-1) for x in (one, other))
    return one.shape == other.shape and torch.equal(a, b)


class Source(ABC):
    """A checkpoint of any format. It can be sent to other processes, which open its files when they read."""

    path: Path
    entries: dict[str, Entry]
    tree: Node
    step: int | None = None
    random: torch.Tensor | None = None
    bytes_read: int = 0

    @property
    def values(self) -> dict[str, Json]:
        """The values by name."""
        return {name: said for name, kind, said in walk(self.tree) if kind == "value"}

    @abstractmethod
    def blocks(self, name: str) -> Sequence[Block]:
        """The blocks of a tensor: tiles that cover it, each read at once."""

    @abstractmethod
    def read_block(self, name: str, i: int, room: torch.Tensor) -> torch.Tensor:
        """Block `i` of a tensor, read into `room` (bytes, at least `size` of them); raises where it is damaged."""

    def read_run(self, name: str, first: int, count: int, room: torch.Tensor) -> None:
        """Some blocks that follow each other, read into `room` (bytes, as many as they have), where `reads_in_place`;
        raises where one is damaged."""
        raise NotImplementedError

    def same_values(self, one: str, other: str) -> bool:
        """Whether two tensors of one shape and dtype have the same values; reads both."""
        for i, j in zip(range(len(self.blocks(one))), range(len(self.blocks(other))), strict=True):
            rooms = (torch.empty(self.size(*at), dtype=torch.uint8) for at in ((one, i), (other, j)))
            a, b = self.read_block(one, i, next(rooms)), self.read_block(other, j, next(rooms))
            if self.blocks(one)[i].tile != self.blocks(other)[j].tile or not same_bits(a, b):
                return False
        return True

    def size(self, name: str, i: int) -> int:
        """The bytes that reading a block takes."""
        block = self.blocks(name)[i]
        return block.stop - block.start

    def order(self, name: str) -> tuple[str, int]:
        """Where the tensor lies on the disk: tensors are read in this order."""
        return name, 0

    def checksum(self, name: str, i: int) -> int | None:
        """The CRC-32 of a block, if reading compares it; None where that is not known."""
        return None

    def compares(self, name: str) -> bool:
        """Whether a tensor that was read was compared with checksums of any kind."""
        return self.checksum(name, 0) is not None

    def cast(self, name: str, dtype: torch.dtype) -> bool:
        """Give a tensor in another dtype from now on, if that is what this source is for; whether it does."""
        return False

    def cut(self, name: str) -> object:
        """Tensors of one shape and dtype for which this is equal have the same blocks."""
        return name

    def reads_in_place(self, name: str) -> bool:
        """Whether a block that is read is its values as they are, from the beginning of the room on."""
        return False

    def expect(self, name: str, first: int, count: int) -> None:
        """Tell the system that some blocks will be read soon."""
        return None

    def begin(self, name: str, first: int, count: int) -> None:
        """Start to read some blocks, which are asked for next but those that were begun before."""
        self.expect(name, first, count)

    def peek(self, name: str, i: int) -> torch.Tensor | None:
        """Block `i` of a tensor where it was begun and lies in memory as it is, until the next but one `begin`; else
        None. Raises where it is damaged."""
        return None

    def line(self) -> StorageLine:
        """What reading costs, measured."""
        return StorageLine()

    def close(self) -> None:
        """Let go of open files."""
        return None


class FileSource(Source):
    """Safetensors files: a checkpoint of this library, or any other."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[Entry, Place]],
        manifest: Manifest | None = None,
        *,
        headers: Sequence[Header] = (),
        verify: bool = True,
    ) -> None:
        self.path = path
        self.entries = {name: entry for name, (entry, _) in tensors.items()}
        self.places = {name: place for name, (_, place) in tensors.items()}
        self.block_bytes = LEAST_BLOCK if manifest is None else manifest.block_bytes
        self.checksums: Checksums = dict(manifest.checksums) if manifest is not None and verify else {}
        self.own_block_bytes: dict[str, int] = {}  # of tensors whose file has its own checksums
        for header in headers:
            self.own_block_bytes |= dict.fromkeys(header.checksums, header.block_bytes)
            self.checksums |= header.checksums if verify else {}
        self.tree = flat_tree(list(self.entries), {}) if manifest is None else manifest.tree
        self.step = None if manifest is None else manifest.step
        self.random = None if manifest is None else manifest.random
        self._cuts: dict[int, Cuts] = {}
        self._handles: dict[Path, int] = {}
        self._ahead = Ahead()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_handles": {}, "_cuts": {}, "_ahead": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state | {"_ahead": Ahead()})

    def blocks(self, name: str) -> Sequence[Block]:
        entry, size = self.entries[name], self.own_block_bytes.get(name, self.block_bytes)
        if size not in self._cuts:
            self._cuts[size] = Cuts(size)
        return self._cuts[size][entry.shape, entry.dtype.itemsize]

    def order(self, name: str) -> tuple[str, int]:
        return str(self.places[name].file), self.places[name].start

    def cut(self, name: str) -> object:
        return self.own_block_bytes.get(name)

    def checksum(self, name: str, i: int) -> int | None:
        return self.checksums[name][i] if name in self.checksums else None

    def same_values(self, one: str, other: str) -> bool:
        alike = self.own_block_bytes.get(one) == self.own_block_bytes.get(other)
        if alike and one in self.checksums and other in self.checksums:
            return self.checksums[one] == self.checksums[other]
        return super().same_values(one, other)

    def reads_in_place(self, name: str) -> bool:
        return True

    def expect(self, name: str, first: int, count: int) -> None:
        blocks, place = self.blocks(name), self.places[name]
        start, stop = blocks[first].start, blocks[first + count - 1].stop
        os.posix_fadvise(self._handle(place.file), place.start + start, stop - start, os.POSIX_FADV_WILLNEED)

    def begin(self, name: str, first: int, count: int) -> None:
        blocks, place = self.blocks(name), self.places[name]
        start, stop = place.start + blocks[first].start, place.start + blocks[first + count - 1].stop
        if not self._ahead.begin(place.file, self._handle(place.file), start, stop):
            self.expect(name, first, count)

    def peek(self, name: str, i: int) -> torch.Tensor | None:
        block, place, entry = self.blocks(name)[i], self.places[name], self.entries[name]
        size, itemsize = block.stop - block.start, entry.dtype.itemsize
        found = self._begun(name, place, block.start, block.stop)
        if found is None or found.size < size or found.ctypes.data % itemsize:
            return None
        self.bytes_read += size
        self._check(name, i, found)
        return torch.from_numpy(found).view(entry.dtype).view(block.tile.sizes)

    def _begun(self, name: str, place: Place, start: int, stop: int) -> np.ndarray | None:
        try:
            return self._ahead.take(place.file, place.start + start, place.start + stop)
        except OSError as error:
            raise _read_error(place.file, name, place.start + start, error) from error

    def line(self) -> StorageLine:
        largest = max(self.entries, key=lambda name: self.entries[name].nbytes, default=None)
        return StorageLine() if largest is None else measured_storage(self.places[largest].file)

    def read_block(self, name: str, i: int, room: torch.Tensor) -> torch.Tensor:
        block, dtype = self.blocks(name)[i], self.entries[name].dtype
        data = room[: block.stop - block.start]
        self.read_run(name, i, 1, data)
        if not data.numel():
            return torch.empty(block.tile.sizes, dtype=dtype)
        return data.view(dtype).view(block.tile.sizes)

    def read_run(self, name: str, first: int, count: int, room: torch.Tensor) -> None:
        blocks, place, data = self.blocks(name)[first : first + count], self.places[name], room.numpy()
        start, stop = blocks[0].start, blocks[-1].stop
        begun = self._begun(name, place, start, stop)
        for i, block in enumerate(blocks, first):
            here = slice(block.start - start, block.stop - start)
            if begun is None or begun.size < here.stop:
                self._fill(name, place, block, data[here])
                self._check(name, i, data[here])
            else:  # checked while it is read for the first time: it is in the processor's cache then
                self._check(name, i, begun[here])
                data[here] = begun[here]
        self.bytes_read += stop - start

    def _check(self, name: str, i: int, data: np.ndarray) -> None:
        block, place = self.blocks(name)[i], self.places[name]
        if name in self.checksums and crc_of(data) != self.checksums[name][i]:
            raise CheckpointError(
                f"{place.file}: tensor {name!r}, bytes {place.start + block.start} to {place.start + block.stop} of "
                f"the file (rows from {block.tile.offsets}, sizes {block.tile.sizes}) are not what was written: the "
                f"file is damaged"
            )

    def _fill(self, name: str, place: Place, block: Block, data: np.ndarray) -> None:
        view, at = buffer_of(data), place.start + block.start
        try:
            handle = self._handle(place.file)
            while view:
                got = os.preadv(handle, [view], at)
                if not got:
                    raise CheckpointError(
                        f"{place.file}: ends at byte {at}, inside of tensor {name!r}: it was cut short"
                    )
                view, at = view[got:], at + got
        except OSError as error:
            raise _read_error(place.file, name, at, error) from error

    def _handle(self, path: Path) -> int:
        if path not in self._handles:
            try:
                self._handles[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be opened: {error.strerror}; do all ranks see this folder?"
                ) from error
        return self._handles[path]

    def close(self) -> None:
        self._ahead.close()
        while self._handles:
            os.close(self._handles.popitem()[1])


def _read_error(path: Path, name: str, at: int, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: reading tensor {name!r}, bytes {at} and on, failed: {error.strerror}")
