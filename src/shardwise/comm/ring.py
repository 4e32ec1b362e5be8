"""A ring of records of 64 bytes in memory that the system writes out even if the process is killed."""

from __future__ import annotations

import itertools
import mmap
import struct
import time

# number, time of begin, time of end, count, memory in KiB, thread, and what is the same in all records of one place:
# what, where, clock, module, flags (`kept`)
RECORD = struct.Struct("<QQQIIHxx20s8x")
SIZE = 64
HEAD = 4096  # bytes before the first record
FAILED, WAIT, BACKWARD, MODULE, OP = 1, 2, 4, 8, 16  # flags
_KEPT = struct.Struct("<IIIII")
_FLAGS = struct.Struct("<I")
_LEFT = struct.Struct("<Q")
_LEFT_AT, _FLAGS_AT = 16, 52
_write, _write_left = RECORD.pack_into, _LEFT.pack_into
_now = time.monotonic_ns


def kept(what: int, where: int, clock: int, module: int, flags: int) -> bytes:
    """Pack what stays the same in all records of one place of the program. It is made once and copied into each
    record."""
    return _KEPT.pack(what, where, clock, module, flags)


class Ring:
    """The newest `keep` records of one file. The record of something that began and has not ended has no end time."""

    __slots__ = ("_next", "buffer")

    def __init__(self, path: str, keep: int) -> None:
        end = HEAD + keep * SIZE
        slots = itertools.chain.from_iterable(itertools.repeat(range(HEAD, end, SIZE)))
        self._next = zip(itertools.count(1), slots)  # noqa: B905  (both have no end)
        with open(path, "w+b") as file:
            file.truncate(end)
            self.buffer = mmap.mmap(file.fileno(), end)

    def enter(self, now: int, count: int, memory: int, thread: int, same: bytes) -> int:
        """Write that something begins; return where that was written, for `leave`. `same` is what `kept` made."""
        number, slot = next(self._next)
        _write(self.buffer, slot, number, now, 0, count, memory, thread, same)
        return slot

    def leave(self, slot: int, error: BaseException | None = None) -> None:
        """Write that it has ended, and whether with an error."""
        _write_left(self.buffer, slot + _LEFT_AT, _now())
        if error is not None:
            (flags,) = _FLAGS.unpack_from(self.buffer, slot + _FLAGS_AT)
            _FLAGS.pack_into(self.buffer, slot + _FLAGS_AT, flags | FAILED)

    def close(self) -> None:
        """Write no more."""
        self.buffer.close()
