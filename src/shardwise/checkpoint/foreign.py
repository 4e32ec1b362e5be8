"""Checkpoints of others: folders of torch.distributed.checkpoint, files of torch.save. No code in them runs."""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.blocks import LEAST_BLOCK, Block, blocks_of
from shardwise.checkpoint.files import Entry
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.tree import Flat, Json, flat_tree, flatten
from shardwise.errors import CheckpointError
from shardwise.layout.tiles import Tile, Tiles, meetings

METADATA = ".metadata"
_METADATA_CLASSES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex TensorProperties "
    "StorageMeta _MEM_FORMAT_ENCODING"
).split()
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "StorageMeta"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch._C", "dtype"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


class _Unpickler(pickle.Unpickler):
    """Reads the metadata of a checkpoint: the classes on the list and torch's dtypes, nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"{METADATA}: {module}.{name} is not what the metadata of a checkpoint is made of")


class _Chunk(NamedTuple):
    """A box of a tensor in a file, as torch.save wrote it."""

    tile: Tile
    file: str
    begin: int
    length: int


def _damaged(file: Path | io.BytesIO) -> str | None:
    """The part of a file of torch.save whose bytes are not what was written, if there is one; older files have no
    checksums."""
    if not zipfile.is_zipfile(file):
        return None
    try:
        with zipfile.ZipFile(file) as opened:
            return opened.testzip()
    except Exception as error:  # a damaged list of parts raises anything
        return str(error)


class DcpSource(Source):
    """A folder of torch.distributed.checkpoint. A block is what one process wrote of a tensor."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.path, self.verify = folder, verify
        self.without: set[str] = set()  # names of which something was read that has no checksums
        try:
            with open(folder / METADATA, "rb") as file:
                said: Json = _Unpickler(file).load()
            storage = {(index.fqn, tuple(index.offset or ())): info for index, info in said.storage_data.items()}
            items = dict(said.state_dict_metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{folder / error.args[0]}") from None
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(f"{folder / METADATA}: the metadata is damaged: {error}") from error
        self.entries = {}
        self.chunks: dict[str, list[_Chunk]] = {}
        try:
            flat = flatten(self._read(items, storage))
        except CheckpointError:
            raise
        except Exception as error:  # of classes that are as they should be, with something else in them
            raise CheckpointError(f"{folder / METADATA}: the metadata is damaged: {error}") from error
        for name, tensor in flat.tensors.items():
            raise CheckpointError(f"{folder}: {name!r} has a tensor of shape {tuple(tensor.shape)} inside of an object")
        tree = flat_tree(list(self.entries), {})
        tree["dict"] += flat.tree["dict"]
        self.tree = tree

    def _read(self, items: dict[str, Json], storage: dict[tuple[str, tuple[int, ...]], Json]) -> dict[str, object]:
        """Find out what there is; the values."""
        values = {}
        for name, item in items.items():
            if hasattr(item, "chunks"):
                self.entries[name] = Entry(name, item.properties.dtype, tuple(item.size))
                self.chunks[name] = [self._chunk(name, chunk, storage) for chunk in item.chunks]
                self._check_whole(name)
            else:
                values[name] = self._value(name, storage[name, ()])
        return values

    def _chunk(self, name: str, chunk: Json, storage: dict[tuple[str, tuple[int, ...]], Json]) -> _Chunk:
        tile = Tile(tuple(chunk.offsets), tuple(chunk.sizes))
        info = storage.get((name, tile.offsets), storage.get((name, ())))
        file = self.path / (METADATA if info is None else info.relative_path)
        if info is None or not file.exists():
            how = "does not say where it is" if info is None else "the file is missing"
            raise CheckpointError(f"{file}: tensor {name!r}, part at {tile.offsets}: {how}")
        return _Chunk(tile, info.relative_path, info.offset, info.length)

    def _check_whole(self, name: str) -> None:
        """Raise where the parts of a tensor are not all of it: the rest would stay as it is in `into`."""
        shape = self.entries[name].shape
        tiles = Tiles.of(list({chunk.tile for chunk in self.chunks[name] if 0 not in chunk.tile.sizes}), len(shape))
        inside = bool((tiles.starts >= 0).all() and (tiles.ends <= np.array(shape, dtype=np.int64)).all())
        apart = len(meetings(tiles, tiles)[0]) == len(tiles.starts)
        if not (inside and apart and int(tiles.volumes.sum()) == math.prod(shape)):
            raise CheckpointError(
                f"{self.path / METADATA}: the {len(tiles.starts)} parts of tensor {name!r} are not the whole of its "
                f"shape {shape}: the metadata is damaged"
            )

    def _value(self, name: str, info: Json) -> object:
        data = io.BytesIO(self._bytes(name, info.relative_path, info.offset, info.length))
        try:
            return torch.load(data, weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{self.path / info.relative_path}: {name!r} is no plain value, or damaged: {_short(error)}"
            ) from error

    def _bytes(self, name: str, file: str, offset: int, length: int) -> bytes:
        with open(self.path / file, "rb") as opened:
            data = os.pread(opened.fileno(), length, offset)
        if len(data) < length:
            raise CheckpointError(
                f"{self.path / file}: cut short inside of {name!r}, bytes {offset} to {offset + length}"
            )
        self.bytes_read += length
        if not (self.verify and zipfile.is_zipfile(io.BytesIO(data))):
            self.without.add(name)
        if self.verify and _damaged(io.BytesIO(data)) is not None:
            raise CheckpointError(
                f"{self.path / file}: {name!r}, bytes {offset} to {offset + length} of the file are not what was "
                f"written: the file is damaged"
            )
        return data

    def blocks(self, name: str) -> Sequence[Block]:
        size = self.entries[name].dtype.itemsize
        full = [chunk.tile for chunk in self.chunks[name] if 0 not in chunk.tile.sizes]
        return [Block(tile, 0, torch.Size(tile.sizes).numel() * size) for tile in full]

    def order(self, name: str) -> tuple[str, int]:
        return min(((chunk.file, chunk.begin) for chunk in self.chunks[name]), default=("", 0))

    def read_block(self, name: str, i: int, room: torch.Tensor) -> torch.Tensor:
        full = [chunk for chunk in self.chunks[name] if 0 not in chunk.tile.sizes]
        tile, file, offset, length = full[i]
        data = self._bytes(name, file, offset, length)
        try:
            found: torch.Tensor = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except Exception as error:
            raise CheckpointError(
                f"{self.path / file}: tensor {name!r}, bytes {offset} to {offset + length}: {error}"
            ) from error
        dtype = self.entries[name].dtype
        if tuple(found.shape) != tile.sizes or found.dtype != dtype:
            raise CheckpointError(
                f"{self.path / file}: {name!r} is {found.dtype} of shape {tuple(found.shape)}, expected {dtype} of "
                f"shape {tile.sizes}: the file is of another save"
            )
        return found

    def compares(self, name: str) -> bool:
        return name not in self.without


class TorchSource(Source):
    """A file of torch.save, mapped into memory."""

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path, self.verify = path, verify
        flat = self._opened
        part = _damaged(path) if verify else None
        if part is not None:
            raise CheckpointError(f"{path}: {part!r} in it is not what was written: the file is damaged")
        self.entries = {name: Entry(name, x.dtype, tuple(x.shape)) for name, x in flat.tensors.items()}
        self.tree = flat.tree

    @cached_property
    def _opened(self) -> Flat:
        """The file, mapped by each process that reads from it."""
        try:
            zipped = zipfile.is_zipfile(self.path)  # what torch.save writes since 1.6; older files cannot be mapped
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:
            raise CheckpointError(
                f"{self.path}: no file of torch.save that holds tensors and values only: {_short(error)}"
            ) from error
        return flatten(state)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def blocks(self, name: str) -> Sequence[Block]:
        entry = self.entries[name]
        return blocks_of(entry.shape, entry.dtype.itemsize, LEAST_BLOCK)

    def read_block(self, name: str, i: int, room: torch.Tensor) -> torch.Tensor:
        block, values = self.blocks(name)[i], self._opened.tensors[name].detach()
        for dim, (a, n) in enumerate(zip(block.tile.offsets, block.tile.sizes)):
            values = values.narrow(dim, a, n)
        self.bytes_read += block.stop - block.start
        return values

    def compares(self, name: str) -> bool:
        return self.verify and zipfile.is_zipfile(self.path)


def _short(error: Exception) -> str:
    """What torch says is wrong, without its advice to run whatever the file holds."""
    lines = str(error).splitlines() or [type(error).__name__]
    found = [line.strip() for line in lines if "WeightsUnpickler error" in line]
    first = found[0] if found else lines[0].split(". ")[0]
    return first if " " in first else f"{type(error).__name__} {first}"  # a number alone says nothing


# -- writing -------------------------------------------------------------------------------------------------
def whole_tensors(source: Source, progress: object = None) -> dict[str, torch.Tensor]:
    """All tensors of a source in memory."""
    out = {}
    room = torch.empty(0, dtype=torch.uint8)
    for name, entry in source.entries.items():
        made = out[name] = torch.empty(entry.shape, dtype=entry.dtype)
        for i, block in enumerate(source.blocks(name)):
            if room.numel() < source.size(name, i):
                room = torch.empty(source.size(name, i), dtype=torch.uint8)
            view = made
            for dim, (a, n) in enumerate(zip(block.tile.offsets, block.tile.sizes)):
                view = view.narrow(dim, a, n)
            view.copy_(source.read_block(name, i, room))
            if callable(progress):
                progress(source.size(name, i))
    return out
