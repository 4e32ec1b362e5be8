"""The functions that torch has about tiles and metadata: chunks of a dim, overlaps, one shard moved to another spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note
from shardwise.sharded.base import new_tile
from shardwise.sharded.checks import local_metadata, wrong_out
from shardwise.sharded.groups import rank_of
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.shard import Shard, cut
from shardwise.sharded.spec import ChunkShardingSpec, ShardingSpec, chunk_size
from shardwise.sharded.tiles import move_parts, overlapping, tiles_of
from shardwise.torch_private.distributed import remote_device

Parts = tuple[list[Shard], list[ShardMetadata]]  # of this rank; all tiles


# -- chunks of a dim -----------------------------------------------------------------------------------------------
def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Return where the chunk of `rank` starts and how long it is; (-1, -1) for a rank that the spec does not name."""
    split = chunk_size(sharding_dim_size, world_size)
    for idx, placement in enumerate(spec.placements):
        if rank_of(placement) == rank:
            return min(split * idx, sharding_dim_size), get_chunked_dim_size(sharding_dim_size, split, idx)
    return -1, -1


def get_idx_from_placements(placements: Sequence[remote_device], current_rank: int) -> int:
    for i, placement in enumerate(placements):
        if rank_of(placement) == current_rank:
            return i
    raise RuntimeError(f"current_rank not in the placement: rank {current_rank}, placements {list(placements)}")


# -- views ---------------------------------------------------------------------------------------------------------
def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return cut(tensor, (offsets, sizes))


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    return cut(tensor, (metadata.shard_offsets, metadata.shard_sizes))


def _create_tensor_from_params(
    *size: int, local_device: torch.device | str, tensor_properties: TensorProperties
) -> torch.Tensor:
    return new_tile(size, torch.device(local_device), tensor_properties)


# -- overlaps ------------------------------------------------------------------------------------------------------
def _check_shard_metadata_pair_overlap(shard1: ShardMetadata, shard2: ShardMetadata) -> bool:
    return overlapping([shard1, shard2]) is not None


def _find_nd_overlapping_shards(shards: Sequence[ShardMetadata], sharded_dims: Sequence[int]) -> tuple[int, int] | None:
    """Return the positions of two tiles that overlap in all of these dims, or None."""
    cut = [
        ShardMetadata([s.shard_offsets[d] for d in sharded_dims], [s.shard_sizes[d] for d in sharded_dims])
        for s in shards
    ]
    return overlapping(cut)


def _find_1d_overlapping_shards(shards: Sequence[ShardMetadata], dim: int) -> tuple[int, int] | None:
    return _find_nd_overlapping_shards(shards, [dim])


# -- metadata ------------------------------------------------------------------------------------------------------
def build_metadata_from_local_shards(
    local_shards: list[Shard], global_size: torch.Size, current_rank: int, pg: dist.ProcessGroup
) -> ShardedTensorMetadata:
    return local_metadata(local_shards, global_size, pg)


def _validate_output_tensor_for_gather(
    my_rank: int, dst_rank: int, size: torch.Size, dst_tensor: torch.Tensor | None
) -> None:
    """Raise where `gather` cannot write into the tensor that a rank passed."""
    wrong = wrong_out(my_rank, dst_rank, size, dst_tensor)
    if wrong is not None:
        raise ValueError(wrong)


# -- one local shard, moved to the tiles of another spec -----------------------------------------------------------
def build_reshard_metadata(
    st_size: torch.Size, sharding_spec: ShardingSpec, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """Return the tiles of a spec by rank, and for each the rank's position among the placements. One tile per rank."""
    shards = sharding_spec.build_metadata(st_size, TensorProperties()).shards_metadata
    ranks = [rank_of(shard.placement) for shard in shards]
    if sorted(ranks) != list(range(world_size)):
        raise ValueError(f"sharding_spec: its tiles are on ranks {ranks}; each of {world_size} ranks must have one")
    places = [ranks.index(rank) for rank in range(world_size)]
    return [shards[place] for place in places], places


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: dist.ProcessGroup,
) -> Parts:
    """Return what this rank holds after a move from one spec to another, and every tile of the new spec.

    `local_tensor` is the one tile this rank holds; a rank without a tile passes an empty tensor. Differentiable.
    """
    properties = TensorProperties.create_from_tensor(local_tensor)
    before = tiles_of(sharding_spec.build_metadata(st_size, properties).shards_metadata, pg)
    shards = resharding_spec.build_metadata(st_size, properties).shards_metadata
    after, me = tiles_of(shards, pg), dist.get_rank()
    parts = move_parts([local_tensor], before, after, pg, Note("reshard"))
    return [Shard(part, shards[i]) for part, i in zip(parts, after.rows_of(me))], list(shards)


def reshuffle_local_shard(local_shard: torch.Tensor, *args: Any, **kwargs: Any) -> Parts:
    """The same as `reshard_local_shard`: torch has one function for specs that cut the same dim, one for others."""
    return reshard_local_shard(local_shard, *args, **kwargs)
