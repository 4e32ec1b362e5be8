"""The names of torch.distributed._shard.sharding_spec._internals: chunks of a dim, and checks on tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.owners import rank_of
from shardwise.sharded.spec import chunk_size as get_split_size
from shardwise.sharded.tiling import check_cover as check_tensor
from shardwise.sharded.tiling import check_disjoint as validate_non_overlapping_shards_metadata
from shardwise.sharded.tiling import overlapping

__all__ = [
    "ShardMetadata",
    "_check_shard_metadata_pair_overlap",
    "_find_1d_overlapping_shards",
    "_find_nd_overlapping_shards",
    "check_tensor",
    "get_chunk_sharding_params",
    "get_chunked_dim_size",
    "get_split_size",
    "validate_non_overlapping_shards_metadata",
]


def _check_shard_metadata_pair_overlap(shard1: ShardMetadata, shard2: ShardMetadata) -> bool:
    """Whether two tiles share an element."""
    return overlapping([shard1, shard2]) is not None


def _find_nd_overlapping_shards(shards: Sequence[ShardMetadata], sharded_dims: Sequence[int]) -> tuple[int, int] | None:
    """The numbers of two tiles that overlap in all of these dims, if any do."""
    cut = [
        ShardMetadata([s.shard_offsets[d] for d in sharded_dims], [s.shard_sizes[d] for d in sharded_dims])
        for s in shards
    ]
    return overlapping(cut)


def _find_1d_overlapping_shards(shards: Sequence[ShardMetadata], dim: int) -> tuple[int, int] | None:
    """The numbers of two tiles that overlap in one dim, if any do."""
    return _find_nd_overlapping_shards(shards, [dim])


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """How many indices chunk `idx` has."""
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(sharding_dim_size: int, world_size: int, spec: Any, rank: int) -> tuple[int, int]:
    """Where the chunk of `rank` starts, and how long it is."""
    split = get_split_size(sharding_dim_size, world_size)
    for idx, placement in enumerate(spec.placements):
        if rank_of(placement) == rank:
            return min(split * idx, sharding_dim_size), get_chunked_dim_size(sharding_dim_size, split, idx)
    return -1, -1
