"""The names of torch.distributed._shard.sharded_tensor._ops.init: initialisers, and tensors like others."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.sharded import factories, registry
from shardwise.sharded.ops import init as fills

__all__ = [
    "constant_",
    "kaiming_uniform_",
    "normal_",
    "register_tensor_creation_op",
    "tensor_like_creation_op_map",
    "uniform_",
    "validate_param",
]

tensor_like_creation_op_map: dict[Any, Any] = {
    torch.full_like: factories.full,
    torch.empty_like: factories.empty,
    torch.zeros_like: factories.zeros,
    torch.ones_like: factories.ones,
    torch.rand_like: factories.rand,
    torch.randn_like: factories.randn,
}


def validate_param(param: Any, param_name: str) -> None:
    """Raise ValueError where a parameter is None."""
    fills.check_given(**{param_name: param})


def uniform_(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
    return fills.uniform_(*args, **(kwargs or {}))


def normal_(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
    return fills.normal_(*args, **(kwargs or {}))


def kaiming_uniform_(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
    return fills.kaiming_uniform_(*args, **(kwargs or {}))


def constant_(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
    return fills.constant_(*args, **(kwargs or {}))


def register_tensor_creation_op(op: Any) -> None:
    """Register that `op`, such as torch.full_like, makes a tensor in the tiles of its first argument by the factory of
    the table."""

    @registry.custom_sharded_op_impl(op)
    def like(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        tensor, *rest = args
        options = {"dtype": tensor.dtype} | (kwargs or {})
        size = [tensor.size()] if op is torch.full_like else list(tensor.size())
        return tensor_like_creation_op_map[op](
            tensor.sharding_spec(), *size, *rest, process_group=tensor._process_group, **options
        )
