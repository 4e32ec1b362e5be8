"""What reading costs: a line of seconds over bytes, measured on the files themselves."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_SMALL, _LARGE = 4 << 10, 2 << 20


@dataclass(frozen=True)
class StorageLine:
    """Seconds to read: a latency, and bytes over a bandwidth.

    Attributes:
        latency: Seconds until the first byte.
        bandwidth: Bytes per second.
        measured: Whether it was measured here, or is a guess.
    """

    latency: float = 1e-4
    bandwidth: float = 1.5e9
    measured: bool = False

    def seconds(self, nbytes: float, calls: int = 1) -> float:
        return calls * self.latency + nbytes / self.bandwidth


def measured_storage(path: Path) -> StorageLine:
    """The line of a file, from a short and a long read near its middle; the guess where it is too short for them."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return StorageLine()  # reading it for good says what is wrong
    try:
        size = os.fstat(handle).st_size
        if size < 2 * (_SMALL + _LARGE):
            return StorageLine()
        short = _timed(handle, _SMALL, size // 2)
        long = _timed(handle, _LARGE, size // 2 + _SMALL)
    finally:
        os.close(handle)
    return StorageLine(short, (_LARGE - _SMALL) / max(long - short, 1e-6), measured=True)


def _timed(handle: int, size: int, at: int) -> float:
    begin = time.perf_counter()
    os.pread(handle, size, at)
    return time.perf_counter() - begin
