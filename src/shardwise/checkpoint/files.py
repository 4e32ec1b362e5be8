"""Where every tensor lies in which file: standard safetensors files, laid out by names, dtypes and shapes alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.checkpoint.dtypes import from_name, stored
from shardwise.checkpoint.tree import Json
from shardwise.errors import CheckpointError

MOST_FILE_BYTES = 1 << 30
INDEX = "model.safetensors.index.json"
_ALIGNED = 8  # safetensors pads headers to this
_LONGEST_HEADER = 100_000_000


class Entry(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class DataFile:
    """One file: its name, its header, and where each tensor's bytes begin."""

    name: str
    header: bytes
    starts: dict[str, int]
    size: int


def lay_out(entries: Sequence[Entry], most: int = MOST_FILE_BYTES) -> list[DataFile]:
    """Deal tensors out to files of at most `most` bytes (a larger tensor has one to itself)."""
    parts: list[list[Entry]] = [[]]
    size = 0
    # widest elements first, so that all are aligned in memory; else in the order of the state
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
        if parts[-1] and size + entry.nbytes > most:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.nbytes
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        names = ["model.safetensors"]
    return [_data_file(name, part) for name, part in zip(names, parts, strict=True)]


def _data_file(name: str, entries: Iterable[Entry]) -> DataFile:
    said: dict[str, Json] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for entry in entries:
        dtype, shape = stored(entry.dtype, entry.shape)
        starts[entry.name] = at
        said[entry.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    header = len(text).to_bytes(8, "little") + text
    return DataFile(name, header, {name: len(header) + start for name, start in starts.items()}, len(header) + at)


def index_json(files: Sequence[DataFile]) -> str:
    """What tells other programs which file has which tensor."""
    weights = {name: file.name for file in files for name in file.starts}
    total = sum(file.size - len(file.header) for file in files)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=1)


# -- reading -------------------------------------------------------------------------------------------------
class Place(NamedTuple):
    """Where the bytes of a tensor are."""

    file: Path
    start: int


def read_header(path: Path) -> tuple[dict[str, tuple[Entry, Place]], bytes]:
    """The tensors of a safetensors file, and the header's own bytes. Raises CheckpointError where it makes no sense."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        begin = file.read(8)
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise CheckpointError(f"{path}: no safetensors file, or cut short: its {size} bytes hold no whole header")
        text = file.read(length)
    try:
        said = json.loads(text)
        found = {name: _entry(name, at, path, 8 + length) for name, at in said.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: the header is damaged: {error}") from error
    _check_ranges(path, found, 8 + length, size)
    return found, begin + text


def _check_ranges(path: Path, found: Mapping[str, tuple[Entry, Place]], begin: int, size: int) -> None:
    """Raise where the tensors of a file do not lie one after the other from `begin` to its end."""
    at = begin
    for entry, place in sorted(found.values(), key=lambda item: (item[1].start, item[0].nbytes)):
        if place.start + entry.nbytes > size:
            raise CheckpointError(
                f"{path}: cut short: tensor {entry.name!r} is bytes {place.start} to {place.start + entry.nbytes}, "
                f"the file has {size}"
            )
        if place.start != at:
            raise CheckpointError(
                f"{path}: the header is damaged: tensor {entry.name!r} begins at byte {place.start}, the one before it "
                f"ends at {at}"
            )
        at += entry.nbytes
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes follow the last tensor; it was overwritten or is damaged")


def _entry(name: str, said: Mapping[str, Json], path: Path, data: int) -> tuple[Entry, Place]:
    dtype, shape = from_name(str(said["dtype"]), f"{path}: tensor {name!r}"), said["shape"]
    begin, end = said["data_offsets"]
    entry = Entry(name, dtype, tuple(int(n) for n in shape))
    if end - begin != entry.nbytes or begin < 0 or min(entry.shape, default=0) < 0:
        raise ValueError(f"tensor {name!r} of shape {entry.shape} has {entry.nbytes} bytes, not {begin} to {end}")
    return entry, Place(path, data + begin)


def sync_folder(path: Path) -> None:
    """Have the names in a folder reach the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, text: str) -> None:
    """Write a file and have it reach the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
