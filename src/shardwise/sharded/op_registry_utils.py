"""The names of torch.distributed._shard.op_registry_utils: tables of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.sharded.common_op_utils import _basic_validation
from shardwise.sharded.registry import Op, checked

__all__ = ["_basic_validation", "_decorator_func", "_register_op"]


def _register_op(op: Any, func: Op, op_table: dict[Any, Op]) -> None:
    """Put a function (types, args, kwargs, process_group) into a table."""
    op_table[op] = checked(func, "Custom sharded op function")


def _decorator_func(wrapped_func: Op, op: Any, op_table: dict[Any, Op]) -> Callable[..., Any]:
    """Put a function into a table, and give it back."""
    _register_op(op, wrapped_func, op_table)
    return wrapped_func
