"""The names of torch.distributed._shard.api."""

from shardwise.sharded.loading import current_process_group as _get_current_process_group
from shardwise.sharded.loading import load_with_process_group
from shardwise.sharded.module import (
    _collect_local_shard,
    _reshard_output,
    _shard_tensor,
    shard_module,
    shard_parameter,
)
from shardwise.sharded.plan import ShardingPlan
from shardwise.sharded.sharder import Sharder
from shardwise.sharded.spec import ChunkShardingSpec, ShardingSpec
from shardwise.sharded.tensor import ShardedTensor

__all__ = [
    "ChunkShardingSpec",
    "ShardedTensor",
    "Sharder",
    "ShardingPlan",
    "ShardingSpec",
    "_collect_local_shard",
    "_get_current_process_group",
    "_reshard_output",
    "_shard_tensor",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
]
