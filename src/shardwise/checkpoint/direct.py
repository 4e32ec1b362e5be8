"""Reads that go from the disk to memory of this process, past the pages that the system keeps of files.

A checkpoint is read once: pages that the system would make for it cost more processor time than all else. So what is
not in such pages already is read by a thread into one of two buffers, while the program uses the other one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

LEAST = 256 << 10  # bytes below which a range is read the usual way
ALIGNED = 4096  # of offsets in files and of memory; what disks ask for divides it
_BUFFERS = 2
DIRECT = getattr(os, "O_DIRECT", 0)  # 0: this system has none
_AT_ONCE = 2 << 20  # bytes of a call: disks and what is between take turns between processes
_SAMPLES = 16  # pages of a range that are asked for
FILLED = getattr(mmap, "MAP_POPULATE", 0)  # pages are made at once, not one by one when they are touched


class _Range(NamedTuple):
    """Bytes `start` to `stop` of a file, the memory they are read to, and how many of them there are, once read."""

    path: Path
    start: int
    stop: int
    memory: np.ndarray
    ended: Future[int]


class Ahead:
    """Reads ranges of files before they are asked for: it has the last two of them."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._handles: dict[Path, int | None] = {}  # None: this file cannot be read so
        self._ranges: list[_Range] = []
        self._memories: list[np.ndarray] = []

    def begin(self, path: Path, handle: int, start: int, stop: int) -> bool:
        """Start to read a range; whether that is done. What was begun two calls before is forgotten.

        Args:
            handle: The file, opened as usual.
        """
        if stop - start < LEAST or is_cached(handle, start, stop):
            return False
        direct = self._direct(path)
        if direct is None:
            return False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "shardwise reader")
        if len(self._ranges) == _BUFFERS:
            self._ranges.pop(0).ended.exception()  # its memory is used again: the thread is done with it
        first, last = start - start % ALIGNED, stop + -stop % ALIGNED
        memory = self._buffer(last - first)
        count = self._thread.submit(_read, (direct, handle), memory[: last - first], first, start)
        self._ranges.append(_Range(path, start, stop, memory[start - first :], count))
        return True

    def take(self, path: Path, start: int, stop: int) -> np.ndarray | None:
        """These bytes, as far as the file has them; None where they are in no range that was begun."""
        for found in self._ranges:
            if found.path == path and found.start <= start and stop <= found.stop:
                end = min(stop - found.start, found.ended.result())
                return found.memory[start - found.start : end]
        return None

    def _buffer(self, size: int) -> np.ndarray:
        """Memory that begins where a disk can write to; in turns."""
        buffer = self._memories.pop(0) if len(self._memories) == _BUFFERS else np.empty(0, dtype=np.uint8)
        if buffer.size < size:
            buffer = filled_memory(size)
        self._memories.append(buffer)
        return buffer

    def _direct(self, path: Path) -> int | None:
        if path not in self._handles:
            self._handles[path] = None
            with contextlib.suppress(OSError):  # not every file system can
                self._handles[path] = os.open(path, os.O_RDONLY | DIRECT) if DIRECT else None
        return self._handles[path]

    def close(self) -> None:
        """Let go of files, memory and the thread."""
        if self._thread is not None:
            self._thread.shutdown()
        for handle in self._handles.values():
            if handle is not None:
                os.close(handle)
        self._thread, self._handles, self._ranges, self._memories = None, {}, [], []


def filled_memory(size: int) -> np.ndarray:
    """Memory of so many bytes, which begins at a page."""
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FILLED), dtype=np.uint8)


def _read(handles: tuple[int, int], memory: np.ndarray, first: int, start: int) -> int:
    """Fill memory from byte `first` of a file on; how many bytes there are from `start` on."""
    direct, usual = handles
    view, at = memoryview(memory), first  # type: ignore[arg-type]
    while view:
        try:
            got = os.preadv(direct, [view[:_AT_ONCE]], at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # the disk asks for more than was given, or the file ended here
            got = os.preadv(usual, [view[:_AT_ONCE]], at)
        if not got:
            break
        view, at = view[got:], at + got
    return at - start


@functools.cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def is_cached(handle: int, start: int, stop: int) -> bool:
    """Whether the system has about half of a range of a file or more in its pages, or nobody can tell. Some pages are
    asked for: to ask for all would take as long as checksums do."""
    first = start - start % mmap.ALLOCATIONGRANULARITY
    there = asked = 0
    try:
        is_there, known = _system().mincore, ctypes.c_ubyte()
        with mmap.mmap(handle, stop - first, offset=first, prot=mmap.PROT_READ) as mapped:
            where = np.frombuffer(mapped, dtype=np.uint8)
            base = where.ctypes.data
            del where
            step = max(1, (stop - first) // mmap.PAGESIZE // _SAMPLES) * mmap.PAGESIZE
            for at in range(0, stop - first, step):
                if is_there(ctypes.c_void_p(base + at), ctypes.c_size_t(1), ctypes.byref(known)):
                    return True
                there, asked = there + (known.value & 1), asked + 1
    except (OSError, ValueError, AttributeError):
        return True
    return 2 * there >= asked
