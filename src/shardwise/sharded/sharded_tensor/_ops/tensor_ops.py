"""The names of torch.distributed._shard.sharded_tensor._ops.tensor_ops: copies, casts, questions."""

from __future__ import annotations

import copy
from typing import Any

import torch

from shardwise.sharded.common_op_utils import _register_default_op
from shardwise.sharded.metadata import ShardedTensorMetadata
from shardwise.sharded.shard import Shard
from shardwise.sharded.sharded_tensor._ops._common import _register_sharded_op_on_local_shards, _sharded_op_impl
from shardwise.sharded.tensor import ShardedTensor

__all__ = [
    "Shard",
    "ShardedTensor",
    "_register_default_op",
    "_register_sharded_op_on_local_shards",
    "_sharded_op_impl",
    "same_dtype",
    "sharded_clone",
    "sharded_deepcopy",
    "sharded_detach",
    "sharded_inplace_copy",
    "sharded_type_as",
    "sharded_type_as_check",
    "st_is_meta",
    "tensor_device",
    "tensor_requires_grad_set",
]

_Parts = tuple[list[Shard], ShardedTensorMetadata]


def tensor_device(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> torch.device:
    return args[0].device


def st_is_meta(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> bool:
    return args[0].is_meta


def sharded_type_as_check(*args: Any, **kwargs: Any) -> None:
    """Raise where type_as is called without a tensor to take the type of."""
    if len(args) < 2:
        raise ValueError("Needs to give a tensor to cast type as!")
    if not isinstance(args[1], torch.Tensor):
        raise ValueError(f"Needs to give a Tensor or ShardedTensor to cast type as, got {type(args[1]).__name__}")


def same_dtype(*args: Any, **kwargs: Any) -> bool:
    """Whether two tensors are of one dtype."""
    return args[0].dtype == args[1].dtype


def sharded_type_as(args: Any, kwargs: Any, pg: Any) -> _Parts:
    return _parts(args[0].to(args[1].dtype))


def sharded_deepcopy(args: Any, kwargs: Any, pg: Any) -> _Parts:
    return _parts(copy.deepcopy(args[0]))


def sharded_clone(args: Any, kwargs: Any, pg: Any) -> _Parts:
    return _parts(args[0].clone(**(kwargs or {})))


def sharded_detach(args: Any, kwargs: Any, pg: Any) -> _Parts:
    return _parts(args[0].detach())


def sharded_inplace_copy(types: Any, args: Any, kwargs: Any, pg: Any) -> Any:
    return args[0].copy_(*args[1:], **(kwargs or {}))


def tensor_requires_grad_set(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
    return args[0].requires_grad_(*args[1:], **(kwargs or {}))


def _parts(tensor: ShardedTensor) -> _Parts:
    return tensor.local_shards(), tensor.metadata()
