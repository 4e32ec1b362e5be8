"""The names of torch.distributed._shard.sharded_tensor.api."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.registry import custom_ops as _CUSTOM_SHARDED_OPS
from shardwise.sharded.registry import dispatch_spec_op as _dispatch_custom_op
from shardwise.sharded.registry import has_spec_op as _has_custom_op
from shardwise.sharded.remote import sharded_tensor_map as _sharded_tensor_map
from shardwise.sharded.shard import Shard
from shardwise.sharded.sharded_tensor.reshard import reshard_local_shard, reshuffle_local_shard
from shardwise.sharded.sharded_tensor.utils import (
    _flatten_tensor_size,
    _parse_and_validate_remote_device,
    _validate_output_tensor_for_gather,
    build_global_metadata,
    build_metadata_from_local_shards,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from shardwise.sharded.tensor import ShardedTensor, ShardedTensorBase, new_tile

__all__ = [
    "_CUSTOM_SHARDED_OPS",
    "_dispatch_custom_op",
    "_flatten_tensor_size",
    "_has_custom_op",
    "_parse_and_validate_remote_device",
    "_validate_output_tensor_for_gather",
    "build_global_metadata",
    "build_metadata_from_local_shards",
    "check_tensor",
    "reshard_local_shard",
    "reshuffle_local_shard",
    "validate_non_overlapping_shards_metadata",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_create_tensor_from_params",
    "_sharded_tensor_map",
]


def _create_tensor_from_params(*size: int, local_device: Any, tensor_properties: TensorProperties) -> torch.Tensor:
    """A tensor with undefined values and these properties."""
    return new_tile(size, torch.device(local_device), tensor_properties)
