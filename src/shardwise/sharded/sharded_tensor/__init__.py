"""The names of torch.distributed._shard.sharded_tensor."""

from shardwise.sharded.factories import empty, full, ones, rand, randn, zeros
from shardwise.sharded.local_shards import init_from_local_shards
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.op_registry_utils import _decorator_func
from shardwise.sharded.ops.compare import allclose, equal
from shardwise.sharded.ops.init import constant_, kaiming_uniform_, normal_, uniform_
from shardwise.sharded.registry import custom_ops as _CUSTOM_SHARDED_OPS
from shardwise.sharded.registry import custom_sharded_op_impl
from shardwise.sharded.registry import custom_sharded_op_impl as _sharded_op_impl
from shardwise.sharded.shard import Shard
from shardwise.sharded.sharded_tensor import _ops, api, metadata, reshard, shard, utils
from shardwise.sharded.sharding_spec.chunk_sharding_spec_ops.embedding import sharded_embedding
from shardwise.sharded.sharding_spec.chunk_sharding_spec_ops.embedding_bag import sharded_embedding_bag
from shardwise.sharded.spec import ShardingSpec
from shardwise.sharded.state_dict import pre_load_state_dict_hook, state_dict_hook
from shardwise.sharded.tensor import ShardedTensor, ShardedTensorBase

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
    "_CUSTOM_SHARDED_OPS",
    "_decorator_func",
    "_ops",
    "_sharded_op_impl",
    "allclose",
    "api",
    "constant_",
    "custom_sharded_op_impl",
    "empty",
    "equal",
    "full",
    "init_from_local_shards",
    "kaiming_uniform_",
    "metadata",
    "normal_",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "reshard",
    "shard",
    "sharded_embedding",
    "sharded_embedding_bag",
    "state_dict_hook",
    "uniform_",
    "utils",
    "zeros",
]
