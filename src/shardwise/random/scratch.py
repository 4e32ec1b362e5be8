"""Memory for the steps of a chunk, used again by the next: fresh memory would cost more than the arithmetic."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt


class Scratch(threading.local):
    """A stack of arrays for each thread. `start` makes all its memory free again."""

    def __init__(self) -> None:
        self.memory = np.empty(1 << 20, dtype=np.uint8)
        self.used = 0

    def start(self) -> None:
        self.used = 0

    def new(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """An array whose values are arbitrary, good until the next `start`."""
        count = math.prod(shape) if isinstance(shape, tuple) else shape
        size = count * np.dtype(dtype).itemsize
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
