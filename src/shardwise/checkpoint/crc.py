"""Checksums that several ranks find together: CRC-32 as zlib has it, put together from parts in any order.

The CRC of a block is linear in its bits. So a rank that holds some runs of a block sums up those alone, as if the rest
were zero, and the sums of all ranks, combined by XOR, are the checksum of the block.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

_ONES = 0xFFFFFFFF
_POLYNOMIAL = 0xEDB88320
_SHORT = 64  # bytes of a run below which many runs at a time are quicker than one after the other
_LONG = 16 << 10  # bytes from which on a call of another library is worth its price


def buffer_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array of bytes."""
    return memoryview(array)  # type: ignore[arg-type]


def crc_of(data: bytes | memoryview | np.ndarray, before: int = 0) -> int:
    """The CRC-32 of some bytes, as zlib has it, after those whose CRC is `before`."""
    known = _quicker() if len(data) >= _LONG else None
    if known is None:
        return zlib.crc32(data, before)  # type: ignore[arg-type]
    found = np.frombuffer(data, dtype=np.uint8)
    return known(before, found.ctypes.data, found.size)


@functools.cache
def _quicker() -> Callable[[int, int, int], int] | None:
    """The CRC-32 of libdeflate, which takes half the time of zlib's or less; None where it is not installed."""
    for name in ("libdeflate.so.0", "libdeflate.so", "libdeflate.dylib"):
        with contextlib.suppress(OSError, AttributeError):
            found = ctypes.CDLL(name).libdeflate_crc32
            found.restype, found.argtypes = ctypes.c_uint32, (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
            sample = np.arange(_LONG + 7, dtype=np.uint32).view(np.uint8)[1:]
            if found(5, sample.ctypes.data, sample.size) == zlib.crc32(buffer_of(sample), 5):
                return found  # type: ignore[no-any-return]
    return None


def raw(data: bytes | memoryview) -> int:
    """The linear part of the CRC of some bytes: of zeros it is zero."""
    return crc_of(data, _ONES) ^ _ONES


def whole(linear: int, length: int) -> int:
    """The CRC that zlib gives for a block of so many bytes, from its linear part; and the other way round."""
    return linear ^ _of_zeros(length)


@functools.lru_cache(maxsize=4096)
def _of_zeros(length: int) -> int:
    """The CRC of so many zero bytes: most blocks of a checkpoint are of one length."""
    return shifted(_ONES, length) ^ _ONES


def shifted(linear: int, zeros: int) -> int:
    """The linear part after so many more bytes that are zero."""
    if not zeros or not linear:
        return linear
    return int(_apply(_tables(zeros), np.array([linear], dtype=np.uint32))[0])


def of_runs(rows: np.ndarray, counts: Sequence[int], pitches: Sequence[int]) -> int:
    """The linear part of runs that lie `pitches` apart along `counts`, up to the end of the last one.

    Args:
        rows: A uint8 matrix, one run a row.
        counts: How many runs there are along each outer dim.
        pitches: How many bytes apart they begin along each.
    """
    sums = _each(rows).reshape(tuple(counts))
    for pitch in reversed(pitches):
        sums = _along_last(sums, pitch)
    return int(sums)


def _each(rows: np.ndarray) -> np.ndarray:
    n, length = rows.shape
    if length >= _SHORT or n < _SHORT:
        view = buffer_of(rows.reshape(-1))
        return np.array([raw(view[i * length : (i + 1) * length]) for i in range(n)], dtype=np.uint32)
    table, sums = _byte_table(), np.zeros(n, dtype=np.uint32)
    for column in rows.T:
        sums = table[(sums ^ column) & 0xFF] ^ (sums >> np.uint32(8))
    return sums


def _along_last(sums: np.ndarray, pitch: int) -> np.ndarray:
    """Pairs of neighbours become one, then pairs of those, up to one."""
    while sums.shape[-1] > 1:
        if sums.shape[-1] % 2:
            sums = np.concatenate([np.zeros((*sums.shape[:-1], 1), dtype=np.uint32), sums], axis=-1)
        sums = _apply(_tables(pitch), sums[..., 0::2]) ^ sums[..., 1::2]
        pitch *= 2
    return sums[..., 0]


# -- arithmetic of polynomials over two elements -------------------------------------------------------------
@functools.cache
def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), table >> np.uint32(1))
    return table.astype(np.uint32)


def _apply(tables: np.ndarray, sums: np.ndarray) -> np.ndarray:
    return (
        tables[0][sums & 0xFF]
        ^ tables[1][(sums >> np.uint32(8)) & 0xFF]
        ^ tables[2][(sums >> np.uint32(16)) & 0xFF]
        ^ tables[3][sums >> np.uint32(24)]
    )


@functools.lru_cache(maxsize=1024)
def _tables(zeros: int) -> np.ndarray:
    """What the four bytes of a sum become after so many zero bytes."""
    bits = _columns(zeros)
    numbers = np.arange(256, dtype=np.uint32)
    out = np.zeros((4, 256), dtype=np.uint32)
    for i in range(32):
        out[i // 8] ^= np.where(numbers >> np.uint32(i % 8) & 1, bits[i], np.uint32(0)).astype(np.uint32)
    return out


@functools.lru_cache(maxsize=1024)
def _columns(zeros: int) -> np.ndarray:
    """What each bit of a sum becomes after so many zero bytes."""
    if zeros == 1:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        return _byte_table()[bits & 0xFF] ^ (bits >> np.uint32(8))
    half = _tables(zeros // 2)
    doubled = _apply(half, _columns(zeros // 2))
    return _apply(_tables(1), doubled) if zeros % 2 else doubled
