"""The names of torch.distributed._shard.sharding_spec.chunk_sharding_spec."""

from shardwise.sharded._utils import narrow_tensor
from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.owners import check_remote_device as _parse_and_validate_remote_device
from shardwise.sharded.shard import Shard
from shardwise.sharded.sharding_spec._internals import get_chunked_dim_size, get_split_size
from shardwise.sharded.spec import ChunkShardingSpec, ShardingSpec

__all__ = [
    "ChunkShardingSpec",
    "Shard",
    "ShardMetadata",
    "ShardingSpec",
    "_parse_and_validate_remote_device",
    "get_chunked_dim_size",
    "get_split_size",
    "narrow_tensor",
]
