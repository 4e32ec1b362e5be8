"""Where every tensor lies in which file: standard safetensors files, laid out by names, dtypes and shapes alone."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.checkpoint.blocks import LEAST_BLOCK, Cuts
from shardwise.checkpoint.dtypes import NAMES, from_name, from_short, short, stored
from shardwise.checkpoint.tree import Json
from shardwise.errors import CheckpointError

MOST_FILE_BYTES = 1 << 30
INDEX = "model.safetensors.index.json"
_ALIGNED = 4096  # a header is padded to this, a page of memory: what follows it can be written past the system's pages
_LONGEST_HEADER = 100_000_000
_BY_MEMORY = "dtypes_stored_by_memory"  # in headers: of tensors whose dtype safetensors has no name for
Checksums = dict[str, tuple[int, ...]]


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


def lay_out(entries: Sequence[Entry], most: int = MOST_FILE_BYTES, cuts: Cuts | None = None) -> list[DataFile]:
    """Deal tensors out to files of at most `most` bytes (a larger tensor has one to itself).

    In a file those come first that fill whole pages: so they and most of their tiles begin where a page does, and no
    two processes write to one page. All are aligned in memory.

    Args:
        cuts: The blocks of which headers have room for checksums; None where those are in a manifest.
    """
    parts: list[list[Entry]] = [[]]
    size = 0
    # those of the widest elements come first, so that all are aligned; else in the order of the state
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
        if parts[-1] and size + entry.nbytes > most:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.nbytes
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        names = ["model.safetensors"]
    ordered = (sorted(part, key=lambda entry: entry.nbytes % _ALIGNED != 0) for part in parts)
    return [_data_file(name, part, cuts) for name, part in zip(names, ordered, strict=True)]


def _data_file(name: str, entries: Sequence[Entry], cuts: Cuts | None) -> DataFile:
    beside = {"manifest": "manifest.json"} if cuts is None else _room_for_sums(entries, cuts)
    by_memory = {entry.name: short(entry.dtype) for entry in entries if entry.dtype not in NAMES}
    beside |= {_BY_MEMORY: json.dumps(by_memory)} if by_memory else {}
    said: dict[str, Json] = {"__metadata__": {"format": "pt"} | beside}
    starts, at = {}, 0
    for entry in entries:
        dtype, shape = stored(entry.dtype, entry.shape)
        starts[entry.name] = at
        said[entry.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)  # its length comes before it
    header = len(text).to_bytes(8, "little") + text
    return DataFile(name, header, {name: len(header) + start for name, start in starts.items()}, len(header) + at)


# -- checksums in headers: of each block of each tensor, in the order of the header, then of the header itself -----
def _room_for_sums(entries: Iterable[Entry], cuts: Cuts) -> dict[str, str]:
    count = sum(len(cuts[entry.shape, entry.dtype.itemsize]) for entry in entries)
    return {"block_bytes": str(cuts.most), "header_crc32": "0" * 8, _ALL: "0" * 8, "crc32": "0" * 8 * count}


def sealed(file: DataFile, checksums: Mapping[str, Sequence[int]]) -> bytes:
    """The header of a file with checksums in the room for them: those of its blocks, and one of all blocks of all
    files, by which the files of one save know each other."""
    everything = zlib.crc32(json.dumps(list(checksums.items())).encode())
    sums = "".join(f"{n:08x}" for name in file.starts for n in checksums[name]).encode()
    header = file.header.replace(b'"crc32":"' + b"0" * len(sums), b'"crc32":"' + sums, 1)
    header = header.replace(b'"%s":"00000000"' % _ALL.encode(), b'"%s":"%08x"' % (_ALL.encode(), everything), 1)
    return header.replace(_NO_SUM, b'"header_crc32":"%08x"' % zlib.crc32(header), 1)


_ALL = "all_files_crc32"
_NO_SUM = b'"header_crc32":"00000000"'


def _sums(path: Path, header: bytes, beside: Mapping[str, Json], entries: Iterable[Entry]) -> tuple[int, Checksums]:
    """The size of a block, and the checksums of each tensor, from a header; none of them where it has none."""
    if "header_crc32" not in beside:
        return LEAST_BLOCK, {}
    own = str(beside["header_crc32"])
    if zlib.crc32(header.replace(b'"header_crc32":"' + own.encode(), _NO_SUM[:-1], 1)) != int(own, 16):
        raise CheckpointError(f"{path}: the header (bytes 0 to {len(header)}) is not what was written")
    size, text = int(beside["block_bytes"]), str(beside["crc32"])
    sums, cuts, found, at = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)], Cuts(size), {}, 0
    for entry in entries:
        count = len(cuts[entry.shape, entry.dtype.itemsize])
        found[entry.name], at = tuple(sums[at : at + count]), at + count
    if at != len(sums):
        raise ValueError(f"it has {len(sums)} checksums for {at} blocks")
    return size, found


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


class Header(NamedTuple):
    """What the header of a safetensors file says: its tensors, and their checksums as far as it has some."""

    tensors: dict[str, tuple[Entry, Place]]
    block_bytes: int
    checksums: Checksums
    manifest: bool  # whether the checksums are in a manifest beside the file
    save: str | None  # equal in all files of one save; None where it is not said


def read_header(path: Path) -> Header:
    """The header of a safetensors file. Raises CheckpointError where it makes no sense."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        begin = file.read(8)
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise CheckpointError(f"{path}: no safetensors file, or cut short: its {size} bytes hold no whole header")
        text = file.read(length)
    try:
        said = json.loads(text)
        beside = said.pop("__metadata__", None) or {}
        own = json.loads(beside.get(_BY_MEMORY, "{}"))
        found = {name: _entry(name, at, path, 8 + length, own.get(name)) for name, at in said.items()}
        size_of_block, checksums = _sums(path, begin + text, beside, (entry for entry, _ in found.values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is damaged: {error}") from error
    _check_ranges(path, found, 8 + length, size)
    return Header(found, size_of_block, checksums, "manifest" in beside, beside.get(_ALL))


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


def _entry(name: str, said: Mapping[str, Json], path: Path, data: int, own: Json = None) -> tuple[Entry, Place]:
    """A tensor of a header, and where it is. `own`: the dtype whose memory is stored under another one."""
    dtype, shape = from_name(str(said["dtype"]), f"{path}: tensor {name!r}"), tuple(int(n) for n in said["shape"])
    begin, end = said["data_offsets"]
    if own is not None:
        dtype, shape = (
            from_short(own, f"{path}: tensor {name!r}"),
            shape[:-1] if len(shape) and dtype.is_floating_point else shape,
        )
        if stored(dtype, shape) != (said["dtype"], said["shape"]):
            raise ValueError(f"tensor {name!r} of dtype {said['dtype']} and shape {said['shape']} is no {own}")
    entry = Entry(name, dtype, shape)
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


def seal(path: Path, header: bytes) -> None:
    """Write the header of a file that is there, and have it reach the disk."""
    with open(path, "r+b") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())


def write_synced(path: Path, text: str) -> None:
    """Write a file and have it reach the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
