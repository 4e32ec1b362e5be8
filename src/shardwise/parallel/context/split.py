"""The split of a sequence that gives all ranks the same work under a causal mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

from shardwise.errors import LayoutError
from shardwise.layout import Shard
from shardwise.layout.layout import shards_from_table
from shardwise.layout.split import Intervals, normalize


@overload
def zigzag(dim: int, length: int, ranks: int) -> Shard: ...
@overload
def zigzag(dim: int, length: int, ranks: Sequence[int]) -> tuple[Shard, ...]: ...
def zigzag(dim: int, length: int, ranks: int | Sequence[int]) -> Shard | tuple[Shard, ...]:
    """The Shard that gives rank i of n the chunks i and 2n-1-i of 2n: the same work for all under a causal mask.

    Args:
        dim: the dim that is the sequence.
        length: of the sequence.
        ranks: how many ranks are along the mesh axis. Or one number for each of several axes: the sequence is dealt to
            all ranks along these axes, in mesh order.

    Returns:
        The Shard; a tuple of one for each axis where `ranks` is a sequence.

    Raises:
        LayoutError: `length` or `ranks` is not a number of positions or ranks.

    Example:
        >>> zigzag(1, 16, 4).pieces[0][1]
        ((2, 4), (12, 14))
    """
    sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise LayoutError(f"zigzag: ranks must be an int > 0, or one for each axis, got {ranks!r}")
    if not isinstance(length, int) or length < 0:
        raise LayoutError(f"zigzag: length must be an int >= 0, got {length!r}")
    chunks = 2 * math.prod(sizes)

    def held(coords: tuple[int, ...]) -> Intervals:
        rank = 0
        for coord, n in zip(coords, sizes, strict=True):
            rank = rank * n + coord
        return normalize((length * j // chunks, length * (j + 1) // chunks) for j in (rank, chunks - 1 - rank))

    shards = shards_from_table(sizes, length, held, dim)
    return shards[0] if isinstance(ranks, int) else shards
