"""The names of torch.distributed._shard.sharding_spec."""

from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.registry import custom_sharding_spec_op
from shardwise.sharded.sharding_spec import api, chunk_sharding_spec
from shardwise.sharded.spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
)
from shardwise.sharded.spec import spec_of as _infer_sharding_spec_from_shards_metadata

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_infer_sharding_spec_from_shards_metadata",
    "api",
    "chunk_sharding_spec",
    "custom_sharding_spec_op",
]
