"""Philox-4x32-10: a block of four 32-bit words for every counter, the same words on every machine.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). Any block can be made on its own.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CHUNK = 24576  # blocks made at a time: enough to hide the cost of a call, few enough to stay in the processor's cache

_ROUNDS = 10
_WEYL = 0x9E3779B9, 0xBB67AE85
_MULTIPLIERS = np.array(0xD2511F53, dtype=np.uint64), np.array(0xCD9E8D57, dtype=np.uint64)
_LOW, _HALF = np.array(0xFFFFFFFF, dtype=np.uint64), np.array(32, dtype=np.uint64)

Keys = tuple[tuple[np.ndarray, np.ndarray], ...]  # two numbers for each round, as arrays: numpy is fastest with those


class Scratch(threading.local):
    """A stack of arrays for each thread, free again at `start`: fresh memory would cost more than the arithmetic."""

    def __init__(self) -> None:
        self.memory = np.empty(1 << 20, dtype=np.uint8)
        self.used = 0

    def start(self) -> None:
        self.used = 0

    def new(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """An array whose values are arbitrary, good until the next `start`."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        begin, self.used = self.used, self.used + (size + 63) // 64 * 64
        if self.used > len(self.memory):  # arrays that are out keep the old memory alive
            self.memory = np.empty(2 * self.used, dtype=np.uint8)
        return self.memory[begin : begin + size].view(dtype).reshape(shape)

    def cast(self, x: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
        """A copy of `x` in another dtype, good until the next `start`."""
        out = self.new(x.shape, dtype)
        out[...] = x
        return out


SCRATCH = Scratch()


class Words(NamedTuple):
    """The four words of each block: words 0 and 2 are the rows of `even`, 1 and 3 those of `odd`, as uint64
    whose upper halves are zero in `even` and anything in `odd`."""

    even: np.ndarray
    odd: np.ndarray

    def pairs(self) -> np.ndarray:
        """Two uint64 for each block, as rows: (words 0 and 1, words 2 and 3), the first of each in the lower half."""
        rows = np.left_shift(self.odd, _HALF, out=SCRATCH.new(self.odd.shape, np.uint64))
        rows |= self.even
        return rows

    def elements(self, two_words: bool) -> np.ndarray:
        """The words of each element in order: two words as a uint64, or one as a uint32."""
        whole = in_turn(self.pairs())
        return whole if two_words else whole.view(np.uint32)


def in_turn(rows: np.ndarray) -> np.ndarray:
    """rows[0][0], rows[1][0], rows[0][1], ... (one column at a time: three times as fast as a transposed copy)."""
    out = SCRATCH.new((rows.shape[1], len(rows)), rows.dtype)
    for i, row in enumerate(rows):
        out[:, i] = row
    return out.reshape(-1)


def words(blocks: np.ndarray, key: int, draw: int = 0) -> Words:
    """The words of at most CHUNK blocks (int64, the smallest first and the largest last) under a 64-bit key, in scratch
    memory: good until the next call. The counter of a block is (its number in 64 bits, draw, 0)."""
    SCRATCH.start()
    even, odd, spare = (SCRATCH.new((2, blocks.size), np.uint64) for _ in range(3))
    numbers, keys = blocks.reshape(-1).view(np.uint64), _round_keys(key)
    high = int(numbers[0]) >> 32
    if high == int(numbers[-1]) >> 32:
        _two_rounds(numbers, high, draw, keys, even, odd)
        keys = keys[2:]
    else:
        np.bitwise_and(numbers, _LOW, out=even[0])
        np.right_shift(numbers, _HALF, out=odd[0])
        even[1], odd[1] = draw, 0
    word0, word2, both = even[0], even[1], even.reshape(-1)
    for key0, key1 in keys:
        np.multiply(word0, _MULTIPLIERS[0], out=spare[1])
        np.multiply(word2, _MULTIPLIERS[1], out=spare[0])
        np.right_shift(spare.reshape(-1), _HALF, out=both)
        np.bitwise_xor(both, odd.reshape(-1), out=both)
        np.bitwise_xor(word0, key0, out=word0)
        np.bitwise_xor(word2, key1, out=word2)
        np.bitwise_and(both, _LOW, out=both)
        odd, spare = spare, odd
    return Words(even, odd)


def _two_rounds(numbers: np.ndarray, high: int, draw: int, keys: Keys, even: np.ndarray, odd: np.ndarray) -> None:
    """The first two rounds where three of the four words are the same for all blocks: half the work."""
    (first0, first1), (second0, second1) = keys[:2]
    product = draw * int(_MULTIPLIERS[1])
    word0, word1 = product >> 32 ^ high ^ int(first0), product & 0xFFFFFFFF
    np.bitwise_and(numbers, _LOW, out=even[0])
    np.multiply(even[0], _MULTIPLIERS[0], out=odd[1])  # words 2 and 3 differ from here on
    np.right_shift(odd[1], _HALF, out=even[1])
    np.bitwise_xor(even[1], first1, out=even[1])
    np.multiply(even[1], _MULTIPLIERS[1], out=odd[0])  # and all words from here on, but word 3 is the same again
    product = word0 * int(_MULTIPLIERS[0])
    np.right_shift(odd[0], _HALF, out=even[0])
    np.bitwise_xor(even[0], np.uint64(word1 ^ int(second0)), out=even[0])
    np.bitwise_xor(odd[1], np.uint64(product >> 32 ^ int(second1)), out=even[1])
    np.bitwise_and(even[1], _LOW, out=even[1])
    odd[1] = product & 0xFFFFFFFF


@functools.lru_cache(maxsize=64)
def _round_keys(key: int) -> Keys:
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    starts = (low, _WEYL[0]), (high, _WEYL[1])
    rounds = [[(start + i * step) & 0xFFFFFFFF for start, step in starts] for i in range(_ROUNDS)]
    return tuple((np.array(a, dtype=np.uint64), np.array(b, dtype=np.uint64)) for a, b in rounds)
