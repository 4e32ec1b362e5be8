"""How the elements of a tile are numbered, and where they lie in memory. An element's number is its place in the whole
tensor, row by row, whatever its strides: the words it gets depend on nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardwise.layout import contiguous_stride


class Walk(NamedTuple):
    """The number of the first element, and for each dim (merged where they can be) the size, the step of the number and
    the step in memory. The last dim has consecutive numbers: it is a run."""

    start: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    strides: tuple[int, ...]

    def pieces(self, limit: int) -> Iterator[tuple[int, Walk]]:
        """Walks of at most `limit` elements, each with its offset in memory."""
        inner, cut = 1, len(self.sizes) - 1
        while cut >= 0 and inner * self.sizes[cut] <= limit:
            inner *= self.sizes[cut]
            cut -= 1
        if cut < 0:
            yield 0, self
            return
        length = limit // inner
        for outer in itertools.product(*map(range, self.sizes[:cut])):
            for first in range(0, self.sizes[cut], length):
                where = (*outer, first)
                sizes = (*[1] * cut, min(length, self.sizes[cut] - first), *self.sizes[cut + 1 :])
                number, offset = (sum(i * k for i, k in zip(where, by)) for by in (self.steps, self.strides))
                yield offset, Walk(self.start + number, sizes, self.steps, self.strides)

    def run_starts(self) -> np.ndarray:
        """The number of the first element of every run."""
        starts = np.array(self.start, dtype=np.int64)
        for size, step in zip(self.sizes[:-1], self.steps[:-1]):
            starts = starts[..., None] + np.arange(size, dtype=np.int64) * step
        return starts.reshape(-1)


def walk_over(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> Walk:
    """Over the tile at `offsets` of a tensor of this shape, held in memory with these strides; neighbouring dims are
    merged where both number and memory run on."""
    steps = contiguous_stride(shape)
    dims: list[tuple[int, int, int]] = []
    for size, step, stride in zip(sizes, steps, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (step * size, stride * size):
            size *= dims.pop()[0]
        dims.append((size, step, stride))
    if not dims or dims[-1][1] != 1:
        dims.append((1, 1, 1))
    return Walk(sum(i * k for i, k in zip(offsets, steps, strict=True)), *zip(*dims, strict=True))
