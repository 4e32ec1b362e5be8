"""A ring of records of 64 bytes in memory that the system writes out even if the process is killed."""

from __future__ import annotations

import itertools
import mmap
import struct
import time

# number, entered, left, unused, what, where, clock, count, module, thread, flags, memory in KiB
RECORD = struct.Struct("<QQQQIIIIIHHI")
SIZE = 64
HEAD = 4096  # bytes before the first record
FAILED, WAIT, BACKWARD, MODULE, OP = 1, 2, 4, 8, 16  # flags
_LEFT = struct.Struct("<Q")
_FLAGS = struct.Struct("<H")
_LEFT_AT, _FLAGS_AT = 16, 54
_write, _write_left = RECORD.pack_into, _LEFT.pack_into
_now = time.monotonic_ns


class Ring:
    """The newest `keep` records of one file. The record of something that began and has not ended has no end time."""

    __slots__ = ("_numbers", "buffer", "keep")

    def __init__(self, path: str, keep: int) -> None:
        self.keep = keep
        self._numbers = itertools.count()
        with open(path, "w+b") as file:
            file.truncate(HEAD + keep * SIZE)
            self.buffer = mmap.mmap(file.fileno(), HEAD + keep * SIZE)

    def enter(self, now: int, what: int, where: int, clock: int, count: int, module: int, thread: int, flags: int,
              memory: int) -> int:  # fmt: skip
        """Write that something begins; return where that was written, for `leave`."""
        number = next(self._numbers)
        slot = HEAD + number % self.keep * SIZE
        _write(self.buffer, slot, number + 1, now, 0, 0, what, where, clock, count, module, thread, flags, memory)
        return slot

    def leave(self, slot: int, error: BaseException | None = None) -> None:
        """Write that it has ended, and whether with an error."""
        buffer = self.buffer
        _write_left(buffer, slot + _LEFT_AT, _now())
        if error is not None:
            (flags,) = _FLAGS.unpack_from(buffer, slot + _FLAGS_AT)
            _FLAGS.pack_into(buffer, slot + _FLAGS_AT, flags | FAILED)

    def close(self) -> None:
        """Write no more."""
        self.buffer.close()
