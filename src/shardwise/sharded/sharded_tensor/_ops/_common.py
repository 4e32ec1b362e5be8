"""The names of torch.distributed._shard.sharded_tensor._ops._common: ops of one's own, shard by shard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardwise.sharded.common_op_utils import _basic_validation
from shardwise.sharded.registry import Op
from shardwise.sharded.registry import custom_sharded_op_impl as _sharded_op_impl
from shardwise.sharded.shard import Shard
from shardwise.sharded.tensor import ShardedTensor

__all__ = [
    "Shard",
    "ShardedTensor",
    "_basic_validation",
    "_register_sharded_op_on_local_shards",
    "_sharded_op_common",
    "_sharded_op_impl",
]


def _sharded_op_common(op: Any, early_stop_func: Any, extra_check: Any) -> Callable[[Op], Op]:
    """Decorator: before the function below runs, arguments are checked, by `extra_check(*args, **kwargs)` too; where
    `early_stop_func(*args, **kwargs)` says so, the tensor itself is the result."""

    def decorate(wrapped: Op) -> Op:
        @functools.wraps(wrapped)
        def run(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
            kwargs = kwargs or {}
            _basic_validation(op, args, kwargs)
            if extra_check is not None:
                extra_check(*args, **kwargs)
            if early_stop_func is not None and early_stop_func(*args, **kwargs):
                return args[0]
            return wrapped(types, args, kwargs, pg)

        return run

    return decorate


def _register_sharded_op_on_local_shards(
    op: Any, early_stop_func: Any = None, extra_check: Any = None, customized_func: Any = None
) -> Op:
    """Register that `op` is called on each local shard in the place of the first argument. With `customized_func(args,
    kwargs, pg)` that gives local shards and metadata instead."""

    @_sharded_op_impl(op)
    @_sharded_op_common(op, early_stop_func, extra_check)
    def on_local_shards(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        tensor = args[0]
        if customized_func is None:
            return tensor._with_parts([op(part, *args[1:], **(kwargs or {})) for part in tensor._parts])
        shards, metadata = customized_func(args, kwargs, pg)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, metadata, process_group=tensor._process_group, init_rrefs=tensor._init_rrefs
        )

    return on_local_shards
