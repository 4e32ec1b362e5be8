"""The names of torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops.embedding."""

from __future__ import annotations

from typing import Any

from shardwise.sharded.ops.embedding import embedding
from shardwise.sharded.spec import ChunkShardingSpec
from shardwise.sharded.tensor import ShardedTensor

__all__ = ["ChunkShardingSpec", "ShardedTensor", "sharded_embedding"]


def sharded_embedding(types: Any, args: Any, kwargs: Any, pg: Any) -> Any:
    """`embedding` as registered ops are called; for tables in any tiles."""
    return embedding(*args, **(kwargs or {}))
