"""Many tensors as the columns of one matrix: row r is what rank r of the data axis keeps of each, one after another.

Gathering the rows gathers every tensor at once; summing them onto their ranks reduces every gradient at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from shardwise.layout.split import chunk_pieces, count


class Rows:
    """Where the parts of some tensors lie in the matrix of one rank.

    A tensor has the same columns in every row, as many as the first row needs: no chunk is longer than the first.
    `dims` are those along which the tensors are cut; of a tensor with None, every row has all."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dims: Sequence[int | None], parts: int) -> None:
        self.shapes, self.dims, self.parts = list(shapes), list(dims), parts
        cuts = zip(shapes, dims, strict=True)
        self.sizes = [None if d is None else list(map(count, chunk_pieces(shape[d], parts))) for shape, d in cuts]
        widths = [math.prod(self.piece_shape(i, 0)) for i in range(len(self.shapes))]
        self.columns = list(itertools.pairwise(itertools.accumulate(widths, initial=0)))
        self.length = sum(widths)
        self.even = all(sizes is None or sizes[0] == sizes[-1] for sizes in self.sizes)
        self.blocks = [self._blocks(i) for i in range(len(self.shapes))]

    def piece_shape(self, i: int, row: int) -> tuple[int, ...]:
        dim, sizes, shape = self.dims[i], self.sizes[i], self.shapes[i]
        if dim is None or sizes is None:
            return shape
        return (*shape[:dim], sizes[row], *shape[dim + 1 :])

    def piece(self, i: int, whole: torch.Tensor, row: int) -> torch.Tensor:
        dim, sizes = self.dims[i], self.sizes[i]
        if dim is None or sizes is None:
            return whole
        return whole.narrow(dim, sum(sizes[:row]), sizes[row])

    def kept(self, row: torch.Tensor, number: int) -> list[torch.Tensor]:
        """What row `number` holds of each tensor, as views of it."""
        shapes = [self.piece_shape(i, number) for i in range(len(self.shapes))]
        starts = [start for start, _ in self.columns]
        return [row.narrow(0, at, math.prod(s)).view(s) for at, s in zip(starts, shapes, strict=True)]

    def _blocks(self, i: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Where tensor i lies, as (first row, shape, strides inside of a row): one block for all full chunks, and one
        for the shorter last chunk, if there is one."""
        (start, stop), sizes = self.columns[i], self.sizes[i]
        if start == stop:
            return []
        full = self.parts if sizes is None else sizes.count(sizes[0])
        shape = self.piece_shape(i, 0)
        blocks = [(0, (full, *shape), _strides(shape))]
        if sizes is not None and full < self.parts and sizes[full]:
            shape = self.piece_shape(i, full)
            blocks.append((full, shape, _strides(shape)))
        return blocks

    def in_matrix(self, i: int, matrix: torch.Tensor) -> list[torch.Tensor]:
        """Tensor i as it lies in the rows of a contiguous matrix, as views."""
        start, length = matrix.storage_offset() + self.columns[i][0], matrix.shape[1]
        found = []
        for row, shape, strides in self.blocks[i]:
            strides = strides if len(strides) == len(shape) else (length, *strides)  # of one row, or of several
            found.append(matrix.as_strided(shape, strides, row * length + start))
        return found

    def in_whole(self, i: int, whole: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the whole tensor i that `in_matrix` gives places for, in the same order, as views."""
        (start, stop), dim, sizes = self.columns[i], self.dims[i], self.sizes[i]
        if start == stop:
            return []
        if dim is None or sizes is None:
            return [whole.expand(self.parts, *whole.shape)]
        (_, shape, _), strides = self.blocks[i][0], whole.stride()
        parts = [whole.as_strided(shape, (sizes[0] * strides[dim], *strides), whole.storage_offset())]
        if len(self.blocks[i]) > 1:
            parts.append(self.piece(i, whole, shape[0]))
        return parts


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
