"""Many tensors as the columns of one matrix: row r is what rank r of the data axis keeps of each, one after another.

Gathering the rows gathers every tensor at once; summing them onto their ranks reduces every gradient at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from shardwise.parallel.data_home import chunk_sizes


class Rows:
    """The geometry for one rank: `shapes` of whole tensors and the `dims` they are cut along (None: not at all).

    A tensor has the same columns in every row, as many as the first row needs: no chunk is longer than the first."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dims: Sequence[int | None], parts: int) -> None:
        self.shapes, self.dims, self.parts = list(shapes), list(dims), parts
        self.sizes = [
            None if dim is None else chunk_sizes(shape[dim], parts) for shape, dim in zip(shapes, dims, strict=True)
        ]
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
        """The part of a whole tensor that a row has, as a view."""
        dim, sizes = self.dims[i], self.sizes[i]
        if dim is None or sizes is None:
            return whole
        return whole.narrow(dim, sum(sizes[:row]), sizes[row])

    def kept(self, row: torch.Tensor, number: int) -> list[torch.Tensor]:
        """What row `number` holds of each tensor, as views of it."""
        return [self._in_row(i, row, number) for i in range(len(self.shapes))]

    def _in_row(self, i: int, row: torch.Tensor, number: int) -> torch.Tensor:
        shape = self.piece_shape(i, number)
        return row.narrow(0, self.columns[i][0], math.prod(shape)).view(shape)

    def _blocks(self, i: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Where tensor i lies in the rows: first row, shape, and strides inside of a row; of all full chunks at once,
        then of the shorter last one."""
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
        """The same parts of the tensor itself, as views; where it is not cut every row has all of it."""
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
