"""The names of torch.distributed._shard.sharded_tensor.api."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.remote import sharded_tensor_map as _sharded_tensor_map
from shardwise.sharded.shard import Shard
from shardwise.sharded.tensor import ShardedTensor, ShardedTensorBase, new_tile

__all__ = [
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
