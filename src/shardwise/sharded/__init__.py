"""Tile tensors: tiles of any shape on any rank of a process group, with the names of torch.distributed._shard."""

from shardwise.sharded import from_dtensor  # noqa: F401  (gives DTensor its to_sharded)
from shardwise.sharded.base import ShardedTensorBase
from shardwise.sharded.factories import empty, full, init_from_local_shards, ones, rand, randn, zeros
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.module import (
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    _collect_local_shard,
    _reshard_output,
    _shard_tensor,
    named_params_with_sharded_tensor,
    pre_load_state_dict_hook,
    shard_module,
    shard_parameter,
    state_dict_hook,
)
from shardwise.sharded.ops import elementwise, embedding, fills, methods, over_mesh  # noqa: F401
from shardwise.sharded.ops.registry import custom_sharded_op_impl, custom_sharding_spec_op
from shardwise.sharded.optim import ShardedOptimizer
from shardwise.sharded.pickling import load_with_process_group
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
)
from shardwise.sharded.tensor import ShardedTensor

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "_collect_local_shard",
    "_reshard_output",
    "_shard_tensor",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "empty",
    "full",
    "init_from_local_shards",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "shard_module",
    "shard_parameter",
    "state_dict_hook",
    "zeros",
]
