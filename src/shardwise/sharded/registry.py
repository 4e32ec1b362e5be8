"""What a function does on sharded tensors: the user's own ops first, then ours, then the way over a mesh layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Op = Callable[..., Any]  # (types, args, kwargs, process_group) -> result

custom_ops: dict[Any, Op] = {}
spec_ops: dict[type, dict[Any, Op]] = {}
own_ops: dict[Any, Op] = {}  # (args, kwargs) -> result
fallback: list[Callable[[Any, Any, Any], Any]] = []  # one: (func, args, kwargs) -> result

_SIGNATURE = "(types, args, kwargs, process_group)"


def checked(wrapped: Op, what: str) -> Op:
    if len(inspect.signature(wrapped).parameters) != 4:
        raise TypeError(f"{what} expects signature: {_SIGNATURE}, but received signature: {inspect.signature(wrapped)}")
    return wrapped


def custom_sharded_op_impl(func: Any) -> Callable[[Op], Op]:
    """Decorator: the function below computes `func` whenever a ShardedTensor is among its arguments."""

    def register(wrapped: Op) -> Op:
        custom_ops[func] = checked(wrapped, "Custom sharded op function")
        return wrapped

    return register


def custom_sharding_spec_op(sharding_spec_class: type, func: Any) -> Callable[[Op], Op]:
    """Decorator: the function below computes `func` on tensors whose spec is of exactly this class."""

    def register(wrapped: Op) -> Op:
        spec_ops.setdefault(sharding_spec_class, {})[func] = checked(wrapped, "Custom sharding spec op")
        return wrapped

    return register


def has_spec_op(sharding_spec: Any, op: Any) -> bool:
    return op in spec_ops.get(type(sharding_spec), {})


def dispatch_spec_op(sharding_spec: Any, op: Any, types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """Run the op registered for the class of the spec."""
    if not has_spec_op(sharding_spec, op):
        raise RuntimeError(f"Custom op: {op} not registered for {type(sharding_spec).__name__}")
    return spec_ops[type(sharding_spec)][op](types, args, kwargs, process_group)


def default(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function does where the user has registered nothing."""
    ours = own_ops.get(func)
    return fallback[0](func, args, kwargs) if ours is None else ours(*args, **kwargs)


def own(*funcs: Any) -> Callable[[Op], Op]:
    """Decorator: ours for these functions."""

    def register(wrapped: Op) -> Op:
        for func in funcs:
            own_ops[func] = wrapped
        return wrapped

    return register
