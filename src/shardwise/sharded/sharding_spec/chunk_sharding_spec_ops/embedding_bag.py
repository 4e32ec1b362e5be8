"""The names of torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops.embedding_bag."""

from __future__ import annotations

from typing import Any

from shardwise.sharded.ops.embedding import embedding_bag
from shardwise.sharded.spec import ChunkShardingSpec
from shardwise.sharded.tensor import ShardedTensor

__all__ = ["ChunkShardingSpec", "ShardedTensor", "sharded_embedding_bag"]


def sharded_embedding_bag(types: Any, args: Any, kwargs: Any, pg: Any) -> Any:
    """`embedding_bag` as registered ops are called; for tables in any tiles."""
    return embedding_bag(*args, **(kwargs or {}))
