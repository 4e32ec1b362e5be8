"""A tensor in a file, cut into blocks: tiles that are one run of the file each. Integers only.

A block is what is read at once, what has a checksum, and what replicas share out when they write. The blocks follow
from the shape, the size of an element and the size of a block alone, so every rank finds the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.layout.shapes import contiguous_stride
from shardwise.layout.tiles import Tile

LEAST_BLOCK = 1 << 20
_MOST_BLOCKS = 1 << 16


class Block(NamedTuple):
    """A tile of a tensor that is the bytes from `start` to `stop` of its memory."""

    tile: Tile
    start: int
    stop: int


def block_bytes_for(total: int) -> int:
    """The size of the blocks of a checkpoint of so many bytes: a power of two, so that checksums never take much room.

    >>> block_bytes_for(10**9), block_bytes_for(10**12)
    (1048576, 16777216)
    """
    return max(LEAST_BLOCK, 1 << math.ceil(math.log2(max(total, 1) / _MOST_BLOCKS)) if total > _MOST_BLOCKS else 0)


def blocks_of(shape: Sequence[int], itemsize: int, most: int) -> list[Block]:
    """The blocks of a tensor, in the order of its memory; one empty block where it has no elements.

    >>> [block.tile.sizes for block in blocks_of((5, 4), 2, 16)]
    [(2, 4), (2, 4), (1, 4)]
    >>> [block.tile.offsets for block in blocks_of((2, 4), 4, 8)]
    [(0, 0), (0, 2), (1, 0), (1, 2)]
    """
    shape = tuple(shape)
    if math.prod(shape) * itemsize <= most:
        return [Block(Tile((0,) * len(shape), shape), 0, math.prod(shape) * itemsize)]
    return list(_cut(shape, itemsize, max(most, itemsize), (), 0))


class Cuts(dict[tuple[Sequence[int], int], list[Block]]):
    """The blocks of tensors, by shape and size of an element: most tensors of a model share those with others."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __missing__(self, key: tuple[Sequence[int], int]) -> list[Block]:
        found = self[key] = blocks_of(*key, self.most)
        return found


def _cut(shape: tuple[int, ...], itemsize: int, most: int, outer: tuple[int, ...], at: int) -> Iterator[Block]:
    row = math.prod(shape[1:]) * itemsize
    if row > most:
        for i in range(shape[0]):
            yield from _cut(shape[1:], itemsize, most, (*outer, i), at + i * row)
        return
    step = max(1, most // row)
    for first in range(0, shape[0], step):
        n = min(step, shape[0] - first)
        offsets, sizes = (*outer, first, *(0,) * (len(shape) - 1)), (*(1,) * len(outer), n, *shape[1:])
        yield Block(Tile(offsets, sizes), at + first * row, at + (first + n) * row)


class Runs(NamedTuple):
    """A box of a tensor as runs of its memory, in bytes: `counts` runs of `length` along the outer dims, which lie
    `pitches` apart, the first at `start`."""

    start: int
    length: int
    counts: tuple[int, ...]
    pitches: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Behind the last run."""
        return self.start + sum((n - 1) * p for n, p in zip(self.counts, self.pitches)) + self.length


def runs_of(box: Tile, shape: Sequence[int], itemsize: int) -> Runs:
    """Where a box lies in the memory of a contiguous tensor.

    >>> runs_of(Tile((1, 2), (2, 2)), (4, 8), 4)
    Runs(start=40, length=8, counts=(2,), pitches=(32,))
    """
    stride = [step * itemsize for step in contiguous_stride(shape)]
    start = sum(a * step for a, step in zip(box.offsets, stride))
    length, dim = itemsize, len(shape)
    while dim and (length == itemsize * math.prod(shape[dim:])):
        dim -= 1
        length *= box.sizes[dim]
    return Runs(start, length, tuple(box.sizes[:dim]), tuple(stride[:dim]))


def meet(one: Tile, other: Tile) -> Tile | None:
    """What two tiles share; None where that is nothing."""
    low = tuple(map(max, one.offsets, other.offsets))
    high = [min(a + n, b + m) for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes)]
    sizes = tuple(b - a for a, b in zip(low, high))
    return Tile(low, sizes) if all(n > 0 for n in sizes) else None
