"""What torch.distributed.checkpoint asks of a tensor: the boxes this rank can write, those it wants read, their memory.

A tile is such a box, so a checkpoint written from one tiling loads into any other. torch.distributed.checkpoint is
imported where it is needed: that takes half a second, and a program that comes here has done it already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def write_items(tensor: ShardedTensor, fqn: str, object: Any) -> list[WriteItem]:
    """One item for each tile held here."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=object.dtype, requires_grad=object.requires_grad)
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(shard.metadata.shard_offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(_chunk(shard.metadata), properties, object.size()),
        )
        for shard in object.local_shards()
        if shard.tensor.numel() or not object.numel()
    ]


def chunk_list(tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
    """The boxes to read, one a tile."""
    return [_chunk(shard.metadata) for shard in tensor.local_shards()]


def tensor_shard(tensor: ShardedTensor, index: MetadataIndex) -> torch.Tensor:
    """The memory of the tile at `index.offset`."""
    for shard in tensor.local_shards():
        if tuple(shard.metadata.shard_offsets) == tuple(index.offset or ()) and (
            shard.tensor.numel() or not tensor.numel()
        ):
            return shard.tensor.detach()
    held = [shard.metadata.shard_offsets for shard in tensor.local_shards()]
    raise ValueError(f"{index.fqn!r}: no tile at {index.offset} is held here; there are tiles at {held}")


def _chunk(shard: ShardMetadata) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(shard.shard_offsets), torch.Size(shard.shard_sizes))


ShardedTensor.__create_write_items__ = write_items  # type: ignore[attr-defined]
ShardedTensor.__create_chunk_list__ = chunk_list  # type: ignore[attr-defined]
ShardedTensor.__get_tensor_shard__ = tensor_shard  # type: ignore[attr-defined]
