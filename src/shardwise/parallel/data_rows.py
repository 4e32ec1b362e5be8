"""Many tensors as the rows of one matrix: row r is what rank r of the data axis keeps of each, one after another.

Gathering the rows gathers every tensor at once; summing them onto their ranks reduces every gradient at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwise.parallel.data_home import chunk_sizes


class Rows:
    """The geometry for one rank: `shapes` of whole tensors and the `dims` they are cut along (None: not at all)."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dims: Sequence[int | None], parts: int) -> None:
        self.shapes, self.dims, self.parts = list(shapes), list(dims), parts
        self.sizes = [
            None if dim is None else chunk_sizes(shape[dim], parts) for shape, dim in zip(shapes, dims, strict=True)
        ]
        self.counts = [[math.prod(self.piece_shape(i, r)) for i in range(len(self.shapes))] for r in range(parts)]
        self.length = max((sum(row) for row in self.counts), default=0)

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

    def pieces(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of all tensors, row by row; those cut along dim 0 are contiguous."""
        return [self.piece(i, whole, row) for row in range(self.parts) for i, whole in enumerate(wholes)]

    def unpacked(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The same parts as they lie in the rows."""
        out: list[torch.Tensor] = []
        for row, counts in zip(rows.unbind(0), self.counts, strict=True):
            parts = row.split([*counts, row.numel() - sum(counts)])
            out += [part.view(self.piece_shape(i, len(out) // len(counts))) for i, part in enumerate(parts[:-1])]
        return out

    def packed(
        self, wholes: Sequence[torch.Tensor], tail: torch.Tensor, length: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The rows of these whole tensors, each followed by `tail` and filled up with zeros."""
        flat: list[torch.Tensor] = []
        for row, counts in enumerate(self.counts):
            flat += [self.piece(i, whole, row).reshape(-1) for i, whole in enumerate(wholes)]
            flat += [tail, tail.new_zeros(length - sum(counts) - tail.numel())]
        out = torch.empty(self.parts * length, dtype=dtype, device=tail.device)
        torch.cat(flat, out=out)
        return out.view(self.parts, length)

    def kept(self, row: torch.Tensor, number: int) -> list[torch.Tensor]:
        """The parts that row `number` holds, as views of it."""
        counts = self.counts[number]
        parts = row.split([*counts, row.numel() - sum(counts)])[: len(counts)]
        return [part.view(self.piece_shape(i, number)) for i, part in enumerate(parts)]
