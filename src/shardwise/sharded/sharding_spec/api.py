"""The names of torch.distributed._shard.sharding_spec.api."""

from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.op_registry_utils import _decorator_func
from shardwise.sharded.registry import custom_sharding_spec_op
from shardwise.sharded.registry import dispatch_spec_op as _dispatch_custom_op
from shardwise.sharded.registry import has_spec_op as _has_custom_op
from shardwise.sharded.registry import spec_ops as _CUSTOM_SHARDING_SPEC_OPS
from shardwise.sharded.sharding_spec._internals import get_chunked_dim_size
from shardwise.sharded.spec import DevicePlacementSpec, EnumerableShardingSpec, PlacementSpec, ShardingSpec
from shardwise.sharded.spec import chunk_size as get_split_size
from shardwise.sharded.spec import spec_of as _infer_sharding_spec_from_shards_metadata
from shardwise.sharded.tiling import check_cover as check_tensor
from shardwise.sharded.tiling import check_disjoint as validate_non_overlapping_shards_metadata

__all__ = [
    "_CUSTOM_SHARDING_SPEC_OPS",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_decorator_func",
    "_dispatch_custom_op",
    "_has_custom_op",
    "_infer_sharding_spec_from_shards_metadata",
    "check_tensor",
    "custom_sharding_spec_op",
    "get_chunked_dim_size",
    "get_split_size",
    "validate_non_overlapping_shards_metadata",
]
