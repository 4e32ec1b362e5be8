"""Writes that go from memory of this process to the disk, past the pages that the system keeps of files.

Bytes that follow each other in a file are put together in one of a few buffers; threads write the full ones while the
program fills the next. Only what shares a page with the bytes of another process is written the usual way.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.crc import buffer_of
from shardwise.checkpoint.direct import ALIGNED, DIRECT, LEAST

_BUFFER = 2 << 20  # bytes of a call: those of several processes together are not to be more than a cache has
_BUFFERS = 4
_WRITERS = 2  # calls at a time: the disk has the next one before the end of the last is heard of


class Target(NamedTuple):
    """A file to write to: opened as usual, and past the pages of the system (None: it cannot be)."""

    path: Path
    handle: int
    direct: int | None

    @staticmethod
    def of(path: Path, handle: int) -> Target:
        """A file that is open."""
        direct = None
        with contextlib.suppress(OSError):  # not every file system can
            direct = os.open(path, os.O_WRONLY | DIRECT) if DIRECT else None
        return Target(path, handle, direct)

    def close(self) -> None:
        os.close(self.handle)
        if self.direct is not None:
            os.close(self.direct)


class WriteFailed(Exception):
    """Writing some bytes failed: where, what they are, and why."""

    def __init__(self, path: Path, what: str, error: OSError) -> None:
        super().__init__(path, what, error)
        self.path, self.what, self.error = path, what, error


class Behind:
    """Takes bytes for files, and has written all of them once `finish` returns."""

    def __init__(self) -> None:
        self._memories = [np.frombuffer(mmap.mmap(-1, _BUFFER), dtype=np.uint8) for _ in range(_BUFFERS)]
        self._busy: list[Future[None] | None] = [None] * _BUFFERS
        self._turn = 0  # the buffer that is being filled
        self._target: Target | None = None
        self._what = self._last = ""  # the first and the last of what is in the buffer
        self._start = self._stop = 0  # of the bytes in it, in the file
        self._threads: ThreadPoolExecutor | None = None

    def put(self, target: Target, data: np.ndarray, at: int, what: str) -> None:
        """Write some bytes at a place of a file, now or later.

        Raises:
            WriteFailed: These or earlier ones could not be written.
        """
        if target is not self._target or at != self._stop:
            self._flush()
            self._target, self._start, self._stop, self._what = target, at, at, what
        while data.size:
            base = self._start - self._start % ALIGNED  # of the buffer, in the file
            room = self._memories[self._turn][self._stop - base :]
            if not room.size:
                self._flush()
                self._start, self._what = self._stop, what
                continue
            self._last = what
            if self._start == self._stop:
                self._wait(self._turn)
            n = min(room.size, data.size)
            room[:n] = data[:n]
            data, self._stop = data[n:], self._stop + n

    def _flush(self) -> None:
        """Have the bytes of the buffer written, and take the next one."""
        target, start, stop = self._target, self._start, self._stop
        if target is None or start == stop:
            return
        shift, what = start % ALIGNED, self._what if self._what == self._last else f"{self._what} to {self._last}"
        memory = self._memories[self._turn][shift : shift + stop - start]
        if target.direct is None or stop - start < LEAST:
            _write(target, memory, start, what)
            self._start = stop
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_WRITERS, "shardwise writer")
        self._busy[self._turn] = self._threads.submit(_write, target, memory, start, what)
        self._turn, self._start = (self._turn + 1) % _BUFFERS, stop

    def _wait(self, turn: int) -> None:
        busy, self._busy[turn] = self._busy[turn], None
        if busy is not None:
            busy.result()

    def finish(self) -> None:
        """Wait until all is written."""
        self._flush()
        for turn in range(_BUFFERS):
            self._wait(turn)

    def close(self) -> None:
        """Let go of the threads, once they are done with what they have."""
        if self._threads is not None:
            self._threads.shutdown()


def _write(target: Target, data: np.ndarray, start: int, what: str) -> None:
    """Write bytes that lie in memory as they do in the file, seen from the edges of pages."""
    stop = start + data.size
    first, last = start + -start % ALIGNED, stop - stop % ALIGNED
    try:
        if target.direct is None or last - first < LEAST:
            write_all(target.handle, data, start)
            return
        write_all(target.handle, data[: first - start], start)
        _write_direct(target, target.direct, data[first - start : last - start], first)
        write_all(target.handle, data[last - start :], last)
    except OSError as error:
        raise WriteFailed(target.path, what, error) from error


def _write_direct(target: Target, direct: int, data: np.ndarray, at: int) -> None:
    while data.size:
        try:
            done = os.pwrite(direct, buffer_of(data), at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            write_all(target.handle, data, at)  # the disk asks for more than was given
            return
        if done % ALIGNED:  # the disk is nearly full, or a limit is near: the usual way says which
            write_all(target.handle, data[done:], at + done)
            return
        data, at = data[done:], at + done


def write_all(handle: int, data: np.ndarray, at: int) -> None:
    """Write bytes to a place of a file, however many calls that takes."""
    view = buffer_of(data)
    while view:
        done = os.pwrite(handle, view, at)
        view, at = view[done:], at + done
