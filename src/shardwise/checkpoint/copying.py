"""Tensors that go from file to file as they are: the system copies their bytes, a thread compares their checksums."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch

from shardwise.checkpoint import crc
from shardwise.checkpoint.commit import draft_of
from shardwise.checkpoint.jobs import opened, write_error
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.write import Draft
from shardwise.errors import CheckpointError

_BATCH = 8 << 20
_CANNOT = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)
Some = list[tuple[str, int]]  # blocks: the names of their tensors, and their numbers


def is_copied(source: Source, draft: Draft, name: str) -> bool:
    """Whether a tensor is cut in the same blocks, with known checksums, in the files of both sides."""
    blocks = source.blocks(name)
    known = all(source.checksum(name, i) is not None for i in range(len(blocks)))
    return known and source.span(name) is not None and list(blocks) == list(draft.blocks[name])


def copy(
    source: Source, draft: Draft, names: Sequence[str], sums: np.ndarray, progress: Callable[[int], None] | None
) -> int:
    """Copy some tensors, and note the linear parts of their checksums in `sums`; how many bytes there were.

    While some blocks are copied, a thread reads and checks those that come next: the copy finds them in memory.
    """
    total, coming, before = 0, None, Some()
    with ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1, "shardwise reader"))
        copier = _Copier(source, draft, stack)
        for some in (*batches(source, names), Some()):
            for name, _ in some:
                source.span(name)  # its file is open before the thread asks for it
            following = thread.submit(_check, source, some)
            if coming is not None:
                coming.result()
                for name, first, last in _runs(before):
                    total += copier.copy(name, first, last)
                    for i in range(first, last + 1):
                        known = source.checksum(name, i) or 0
                        sums[draft.first[name] + i] = crc.whole(known, source.size(name, i))
                        if progress is not None:
                            progress(source.size(name, i))
            coming, before = following, some
        copier.sync()
    return total


def batches(source: Source, names: Sequence[str]) -> Iterator[Some]:
    """All blocks of some tensors, as many together as a hand-over between threads is worth."""
    some, size = Some(), 0
    for name in names:
        for i in range(len(source.blocks(name))):
            if some and size + source.size(name, i) > _BATCH:
                yield some
                some, size = [], 0
            some.append((name, i))
            size += source.size(name, i)
    if some:
        yield some


def _check(source: Source, some: Some) -> None:
    room = torch.empty(max((source.size(*at) for at in some), default=0), dtype=torch.uint8)
    for name, i in some:
        source.read_block(name, i, room)


def _runs(some: Some) -> Iterator[tuple[str, int, int]]:
    """Blocks of one tensor that follow each other: its name, the first and the last."""
    for at, (name, i) in enumerate(some):
        if at == 0 or some[at - 1][0] != name:
            first = i
        if at + 1 == len(some) or some[at + 1][0] != name:
            yield name, first, i


class _Copier:
    """Copies runs of blocks from the files of a source to those of a draft."""

    def __init__(self, source: Source, draft: Draft, stack: ExitStack) -> None:
        self.source, self.draft = source, draft
        self.out: dict[str, tuple[int, int]] = {}  # of each tensor: the file, and where it begins there
        self.folder = draft_of(draft.path)
        handles = []
        for file in draft.files:
            handles.append(opened(self.folder / file.name))
            stack.callback(os.close, handles[-1])
            self.out |= {name: (len(handles) - 1, start) for name, start in file.starts.items()}
        self.handles = handles
        self.by_system = hasattr(os, "copy_file_range")

    def copy(self, name: str, first: int, last: int) -> int:
        """Copy blocks `first` to `last` of a tensor; how many bytes that was."""
        blocks, span = self.source.blocks(name), self.source.span(name)
        assert span is not None
        file, start = self.out[name]
        begin, size = blocks[first].start, blocks[last].stop - blocks[first].start
        done = 0
        try:
            while done < size:
                places = span[1] + begin + done, start + begin + done
                got = self._some(span[0], self.handles[file], size - done, *places)
                if not got:
                    raise CheckpointError(f"{self.source.path}: cut short inside of tensor {name!r}")
                done += got
        except OSError as error:
            raise write_error(self.folder / self.draft.files[file].name, f"tensor {name!r}", error) from error
        return size

    def _some(self, one: int, other: int, size: int, at: int, to: int) -> int:
        if self.by_system:
            try:
                return os.copy_file_range(one, other, size, at, to)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self.by_system = False  # not between these two file systems
        return os.pwrite(other, os.pread(one, min(size, 1 << 20), at), to)

    def sync(self) -> None:
        """Have all of it reach the disk."""
        for handle in self.handles:
            os.fsync(handle)
