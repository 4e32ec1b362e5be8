"""Tiles in torch.distributed.checkpoint: a tile is a box, so what was saved in one tiling loads into any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.protocol import Box, chunk, items_for
from shardwise.sharded.shard import Shard
from shardwise.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def write_items(tensor: ShardedTensor, fqn: str, object: Any) -> list[WriteItem]:
    """One item for each tile held here that has elements; for a tensor without any, for each."""
    full = [shard for shard in object.local_shards() if shard.tensor.numel() or not object.numel()]
    return items_for(fqn, object, map(_box, full))


def chunk_list(tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
    """The boxes to read, one a tile."""
    return [chunk(_box(shard)) for shard in tensor.local_shards()]


def tensor_shard(tensor: ShardedTensor, index: MetadataIndex) -> torch.Tensor:
    """The memory of the tile at `index.offset`."""
    for shard in tensor.local_shards():
        if tuple(shard.metadata.shard_offsets) == tuple(index.offset or ()) and (
            shard.tensor.numel() or not tensor.numel()
        ):
            return shard.tensor.detach()
    held = [shard.metadata.shard_offsets for shard in tensor.local_shards()]
    raise ValueError(f"{index.fqn!r}: no tile at {index.offset} is held here; there are tiles at {held}")


def _box(shard: Shard) -> Box:
    return shard.metadata.shard_offsets, shard.metadata.shard_sizes


ShardedTensor.__create_write_items__ = write_items  # type: ignore[attr-defined]
ShardedTensor.__create_chunk_list__ = chunk_list  # type: ignore[attr-defined]
ShardedTensor.__get_tensor_shard__ = tensor_shard  # type: ignore[attr-defined]
