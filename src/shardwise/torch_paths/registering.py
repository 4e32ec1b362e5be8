"""The decorators and checks with which torch's programs register ops of their own for sharded tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.sharded import factories
from shardwise.sharded.metadata import ShardedTensorMetadata
from shardwise.sharded.ops import registry
from shardwise.sharded.ops.fills import check_not_none
from shardwise.sharded.ops.registry import Function, Op
from shardwise.sharded.shard import Shard
from shardwise.sharded.tensor import ShardedTensor, first_sharded


def _basic_validation(op: Function, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise where an op is called without a sharded tensor."""
    kwargs = kwargs or {}
    if not args and not kwargs:
        raise ValueError(f" No input for '{op.__name__}'!")
    if first_sharded((*args, *kwargs.values())) is None:
        raise TypeError(
            f"torch function '{op.__name__}', with args: {tuple(args)} and kwargs: {dict(kwargs)} are called without "
            f"any sharded tensor!"
        )


def _register_op(op: Function, func: Op, op_table: dict[Any, Op]) -> None:
    """Put a function `(types, args, kwargs, process_group)` into a table."""
    op_table[op] = registry.checked(func, "Custom sharded op function")


def _decorator_func(wrapped_func: Op, op: Function, op_table: dict[Any, Op]) -> Op:
    """Put a function into a table, and return it."""
    _register_op(op, wrapped_func, op_table)
    return wrapped_func


def _register_default_op(op: Function, decorator: Callable[[Function], Callable[[Op], Op]]) -> None:
    """Register, by a decorator such as `custom_sharded_op_impl`, that `op` does what it does without registration: it
    runs on the tiles where they allow it, and over a mesh layout where they do not."""

    @decorator(op)
    def default(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        _basic_validation(op, args, kwargs)
        return registry.default(op, args, kwargs or {})


def _sharded_op_common(
    op: Function, early_stop_func: Callable[..., bool] | None, extra_check: Callable[..., None] | None
) -> Callable[[Op], Op]:
    """Return a decorator that checks the arguments before the function runs, by `extra_check(*args, **kwargs)` too.

    Where `early_stop_func(*args, **kwargs)` is true, the function does not run and the result is its first argument.
    """

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
    op: Function,
    early_stop_func: Callable[..., bool] | None = None,
    extra_check: Callable[..., None] | None = None,
    customized_func: Callable[..., tuple[list[Shard], ShardedTensorMetadata]] | None = None,
) -> Op:
    """Register that `op` is called on each local shard of its first argument.

    With `customized_func(args, kwargs, pg)` that function is called instead; it returns local shards and metadata.
    """

    @registry.custom_sharded_op_impl(op)
    @_sharded_op_common(op, early_stop_func, extra_check)
    def on_local_shards(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> ShardedTensor:
        tensor: ShardedTensor = args[0]
        if customized_func is None:
            return tensor._with_parts([op(part, *args[1:], **(kwargs or {})) for part in tensor._parts])
        shards, metadata = customized_func(args, kwargs, pg)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, metadata, process_group=tensor._process_group, init_rrefs=tensor._init_rrefs
        )

    return on_local_shards


tensor_like_creation_op_map: dict[Function, Callable[..., ShardedTensor]] = {
    torch.full_like: factories.full,
    torch.empty_like: factories.empty,
    torch.zeros_like: factories.zeros,
    torch.ones_like: factories.ones,
    torch.rand_like: factories.rand,
    torch.randn_like: factories.randn,
}


def validate_param(param: object, param_name: str) -> None:
    """Raise ValueError where a parameter is None."""
    check_not_none(**{param_name: param})


def register_tensor_creation_op(op: Function) -> None:
    """Register that `op`, such as `torch.full_like`, makes a tensor in the tiles of its first argument, by the factory
    that `tensor_like_creation_op_map` has for it."""

    @registry.custom_sharded_op_impl(op)
    def like(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> ShardedTensor:
        tensor, *rest = args
        options = {"dtype": tensor.dtype} | (kwargs or {})
        size = [tensor.size()] if op is torch.full_like else list(tensor.size())
        return tensor_like_creation_op_map[op](
            tensor.sharding_spec(), *size, *rest, process_group=tensor._process_group, **options
        )
