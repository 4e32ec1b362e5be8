"""The names of torch.distributed._shard.sharded_tensor.reshard: one local shard, moved to the tiles of another spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note
from shardwise.move.tile_step import run_tiles
from shardwise.sharded.metadata import ShardMetadata, TensorProperties
from shardwise.sharded.owners import rank_of
from shardwise.sharded.shard import Shard
from shardwise.sharded.sharding_spec._internals import get_chunked_dim_size, get_split_size
from shardwise.sharded.spec import ShardingSpec
from shardwise.sharded.tiling import plan_between, tiles_of

__all__ = [
    "Shard",
    "ShardMetadata",
    "build_reshard_metadata",
    "get_chunked_dim_size",
    "get_idx_from_placements",
    "get_split_size",
    "reshard_local_shard",
    "reshuffle_local_shard",
]


def get_idx_from_placements(placements: Sequence[Any], current_rank: int) -> int:
    """Which of the placements is the rank's."""
    for i, placement in enumerate(placements):
        if rank_of(placement) == current_rank:
            return i
    raise RuntimeError(f"current_rank not in the placement: rank {current_rank}, placements {list(placements)}")


def build_reshard_metadata(
    st_size: torch.Size, sharding_spec: ShardingSpec, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """The tiles of a spec by rank, and for each the rank's place among the placements. One tile a rank."""
    shards = sharding_spec.build_metadata(st_size, TensorProperties()).shards_metadata
    ranks = [rank_of(shard.placement) for shard in shards]
    if sorted(ranks) != list(range(world_size)):
        raise ValueError(f"sharding_spec: its tiles are on ranks {ranks}; each of {world_size} ranks must have one")
    places = [ranks.index(rank) for rank in range(world_size)]
    return [shards[place] for place in places], places


def reshard_local_shard(
    local_tensor: torch.Tensor, st_size: torch.Size, sharding_spec: ShardingSpec, resharding_spec: ShardingSpec, pg: Any
) -> tuple[list[Shard], list[ShardMetadata]]:
    """What this rank holds after a move from one spec to another, and every tile of the new one. Differentiable.

    `local_tensor` is the one tile this rank holds; a rank without any passes an empty tensor.
    """
    properties = TensorProperties.create_from_tensor(local_tensor)
    before = tiles_of(sharding_spec.build_metadata(st_size, properties).shards_metadata, pg)
    shards = resharding_spec.build_metadata(st_size, properties).shards_metadata
    after, me = tiles_of(shards, pg), dist.get_rank()
    parts = run_tiles(plan_between(before, after, local_tensor.dtype.itemsize), [local_tensor], pg, Note("reshard"))
    return [Shard(part, shards[i]) for part, i in zip(parts, after.rows_of(me))], list(shards)


def reshuffle_local_shard(
    local_shard: torch.Tensor, st_size: torch.Size, sharding_spec: ShardingSpec, resharding_spec: ShardingSpec, pg: Any
) -> tuple[list[Shard], list[ShardMetadata]]:
    """The same: torch has one function for specs that cut the same dim, one for others."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)
