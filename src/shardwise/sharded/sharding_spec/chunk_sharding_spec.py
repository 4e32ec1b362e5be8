"""The names of torch.distributed._shard.sharding_spec.chunk_sharding_spec."""

from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ChunkShardingSpec, ShardingSpec

__all__ = ["ChunkShardingSpec", "Shard", "ShardMetadata", "ShardingSpec"]
