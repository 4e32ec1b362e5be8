"""What one process writes: boxes of tensors at ranges of files, with the part of each block's checksum it knows."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from shardwise.checkpoint import crc
from shardwise.checkpoint.behind import Behind, Target, WriteFailed, write_all
from shardwise.checkpoint.blocks import Block, Cuts, Runs, meet, runs_of
from shardwise.checkpoint.files import DataFile, Entry
from shardwise.checkpoint.holders import Held, as_bytes
from shardwise.errors import CheckpointError
from shardwise.layout.tiles import Tile, Tiles, meetings

_SHORT_RUN = 8 << 10  # bytes of a run below which a mapping of the file is quicker than a call for each run


@dataclass(frozen=True)
class Job:
    """Values that go to a box of a block of a tensor."""

    file: int
    start: int  # of the tensor in the file
    entry: Entry
    number: int  # of the block among those of all tensors
    block: Block
    box: Tile
    values: torch.Tensor


Known = dict[tuple[int, tuple[int, ...], tuple[Tile, ...]], list[tuple[int, int, Tile]]]


def jobs_of(
    file: int,
    start: int,
    entry: Entry,
    blocks: Sequence[Block],
    first: int,
    pieces: Iterable[Held],
    mine: Sequence[int],
    known: Known | None = None,
) -> list[Job]:
    """The jobs of one tensor: the blocks in `mine`, as far as they are in the pieces held here.

    Args:
        known: What was found for other tensors, whose blocks live as long as it: many are cut alike.
    """
    distinct = list({piece.tile: piece for piece in pieces}.values())
    return [
        Job(file, start, entry, first + i, blocks[i], box, _narrowed(distinct[which].values, distinct[which].tile, box))
        for i, which, box in _shared(entry.shape, blocks, distinct, mine, known)
    ]


def _shared(
    shape: tuple[int, ...], blocks: Sequence[Block], pieces: Sequence[Held], mine: Sequence[int], known: Known | None
) -> list[tuple[int, int, Tile]]:
    """Blocks and pieces that share something, by number, and what they share."""
    key = id(blocks), tuple(mine), tuple(piece.tile for piece in pieces)
    if known is not None and key in known:
        return known[key]
    numbers = np.array(mine, dtype=np.int64)
    one = Tiles.of([blocks[i].tile for i in mine], len(shape))
    found = []
    for at, which in zip(*(pair.tolist() for pair in meetings(one, Tiles.of([p.tile for p in pieces], len(shape))))):
        i = int(numbers[at])
        box = meet(pieces[which].tile, blocks[i].tile)
        assert box is not None
        found.append((i, which, box))
    if known is not None:
        known[key] = found
    return found


def _narrowed(values: torch.Tensor, tile: Tile, box: Tile) -> torch.Tensor:
    for dim, (a, b, n) in enumerate(zip(tile.offsets, box.offsets, box.sizes, strict=True)):
        if n != values.shape[dim]:
            values = values.narrow(dim, b - a, n)
    return values


class Task(NamedTuple):
    """A tensor of which this process writes some blocks: of every `copies` of them the one at `turn`."""

    entry: Entry
    copies: int
    turn: int
    pieces: list[Held]

    def own(self, cuts: Cuts) -> Task:
        """The same with those pieces alone that this process writes."""
        if self.copies == 1:
            return self
        blocks = cuts[self.entry.shape, self.entry.dtype.itemsize][self.turn :: self.copies]
        distinct = {piece.tile: piece for piece in self.pieces}.values()
        found = []
        for block in blocks:
            for tile, values in distinct:
                box = meet(tile, block.tile)
                if box is not None:
                    found.append(Held(box, _narrowed(values, tile, box)))
        return self._replace(pieces=found)


class Written(NamedTuple):
    """The checksums, as far as this process knows them, and how many bytes it wrote."""

    checksums: np.ndarray
    bytes: int


def create(folder: Path, files: Sequence[DataFile]) -> None:
    """Make all files at their full size, with their headers: a full disk shows here."""
    for file in files:
        path = folder / file.name
        try:
            with open(path, "wb") as out:
                os.posix_fallocate(out.fileno(), 0, file.size)
                out.write(file.header)
        except OSError as error:
            raise write_error(path, f"{file.size} bytes", error) from error


def write_error(path: Path, what: str, error: OSError) -> CheckpointError:
    hint = {errno.ENOSPC: "; the disk is full: make room, or save elsewhere", errno.EDQUOT: "; the quota is used up"}
    return CheckpointError(f"{path}: writing {what} failed: {error.strerror}{hint.get(error.errno or 0, '')}")


def write(folder: Path, files: Sequence[DataFile], jobs: Sequence[Job], blocks: int) -> Written:
    """Do the jobs, and have the files reach the disk."""
    sums, total = np.zeros(blocks, dtype=np.int64), 0
    with Writer(folder, files) as writer:
        for job in sorted(jobs, key=lambda job: (job.file, job.start, job.block.start)):
            linear, size = writer.do(job)
            sums[job.number] ^= linear
            total += size
    return Written(sums, total)


class Writer:
    """Writes to the files of a draft; at the end of a `with` statement all of it has reached the disk."""

    def __init__(self, folder: Path, files: Sequence[DataFile]) -> None:
        self.folder, self.files = folder, files
        self._targets: dict[int, Target] = {}
        self._behind = Behind()

    def do(self, job: Job) -> tuple[int, int]:
        """Do a job: the linear part of its block's checksum, and how many bytes it was."""
        what = f"tensor {job.entry.name!r} at {job.box.offsets}"
        try:
            return _put(self._target(job.file), self._behind, job, what)
        except OSError as error:
            raise write_error(self._target(job.file).path, what, error) from error

    def put(self, file: int, data: np.ndarray, at: int, what: str) -> None:
        """Write some bytes at a place of a file."""
        self._behind.put(self._target(file), data, at, what)

    def _target(self, file: int) -> Target:
        if file not in self._targets:
            path = self.folder / self.files[file].name
            self._targets[file] = Target.of(path, opened(path))
        return self._targets[file]

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                self._behind.finish()
                for target in self._targets.values():
                    os.fsync(target.handle)
        except WriteFailed as failed:
            error = failed
        finally:
            self._behind.close()
            for target in self._targets.values():
                target.close()
        if isinstance(error, WriteFailed):
            raise write_error(error.path, error.what, error.error) from error.error


def opened(path: Path) -> int:
    """A file of a draft, to be written."""
    try:
        return os.open(path, os.O_RDWR)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}; do all ranks see this folder?") from error


def _put(target: Target, behind: Behind, job: Job, what: str) -> tuple[int, int]:
    """Write one job; the linear part of its block's checksum, and how many bytes it was."""
    runs = runs_of(job.box, job.entry.shape, job.entry.dtype.itemsize)
    data = as_bytes(job.values)
    if math.prod(runs.counts) == 1:
        behind.put(target, data, job.start + runs.start, what)
        linear = crc.raw(crc.buffer_of(data))
    else:
        rows = data.reshape(-1, runs.length)
        if runs.length >= _SHORT_RUN:
            for row, at in zip(rows, _offsets(runs).tolist()):
                write_all(target.handle, row, job.start + at)
        else:
            _write_mapped(target.handle, rows, job.start, runs)
        linear = crc.of_runs(rows, runs.counts, runs.pitches)
    return crc.shifted(linear, job.block.stop - runs.stop), data.size


def _offsets(runs: Runs) -> np.ndarray:
    """Where each run begins."""
    at = np.full(runs.counts, runs.start, dtype=np.int64)
    for dim, (n, pitch) in enumerate(zip(runs.counts, runs.pitches)):
        at += (np.arange(n) * pitch).reshape((n, *(1,) * (len(runs.counts) - dim - 1)))
    return at.reshape(-1)


def _write_mapped(handle: int, rows: np.ndarray, start: int, runs: Runs) -> None:
    """Many short runs through a mapping of the file, whose room on the disk is taken already."""
    low, high = start + runs.start, start + runs.stop
    page = low - low % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(handle, high - page, offset=page) as mapped:
        whole = np.frombuffer(mapped, dtype=np.uint8)
        shape, strides = (*runs.counts, runs.length), (*runs.pitches, 1)
        room = np.lib.stride_tricks.as_strided(whole[low - page :], shape, strides)
        room[...] = rows.reshape(shape)
        del room, whole
