"""Cutting a tensor that one rank holds into tiles on their owners."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note
from shardwise.errors import MeshError
from shardwise.move.tile_step import run_tiles
from shardwise.sharded.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.sharded.owners import as_group, is_member, ranks_of
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ShardingSpec
from shardwise.sharded.tensor import ShardedTensor
from shardwise.sharded.tiling import plan_between, tiles_of, whole_on


def scatter(tensor: torch.Tensor, spec: ShardingSpec, src_rank: int = 0, process_group: Any = None) -> ShardedTensor:
    """The tensor of `src_rank` (a rank of the group) in the tiles of the spec; one exact exchange."""
    group = as_group(process_group)
    if not is_member(group):
        raise ValueError(f"process_group: rank {dist.get_rank()} is not in it; call this on its ranks only")
    ranks = ranks_of(group)
    if not isinstance(src_rank, int) or not 0 <= src_rank < len(ranks):
        raise MeshError(f"src_rank={src_rank} is not a rank of the process group of {len(ranks)} ranks {ranks}")
    properties = TensorProperties.create_from_tensor(tensor)
    metadata = spec.build_metadata(tensor.size(), properties)
    tiles = tiles_of(metadata.shards_metadata, group)
    plan = plan_between(whole_on(ranks[src_rank], tensor.size()), tiles, tensor.dtype.itemsize)
    me, value = dist.get_rank(), tensor.detach()
    with torch.no_grad():
        parts = run_tiles(plan, [value if me == ranks[src_rank] else value.reshape(-1)[:0]], group, Note("shard"))
    mine = [metadata.shards_metadata[i] for i in tiles.rows_of(me)]
    return _settled(parts, mine, metadata, spec, group, tiles, value)


def _settled(
    parts: list[torch.Tensor],
    mine: list[Any],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    group: Any,
    tiles: Any,
    source: torch.Tensor,
) -> ShardedTensor:
    """The tiles as leaves with memory of their own, on their devices."""
    own = source.untyped_storage().data_ptr()
    shards = []
    for part, shard in zip(parts, mine):
        part = part.to(shard.placement.device())
        if part.untyped_storage().data_ptr() == own and part.numel():
            part = part.clone()
        shards.append(Shard(part.requires_grad_(metadata.tensor_properties.requires_grad), shard))
    return ShardedTensor._made(shards, metadata, spec, group, tiles=tiles)


ShardingSpec.scatter = staticmethod(scatter)
