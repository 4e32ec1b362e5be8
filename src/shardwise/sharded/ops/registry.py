"""Which function computes a torch function on sharded tensors: the user's own, then ours, then the general one, which
calls it tile by tile or over a mesh layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.errors import check_type

if TYPE_CHECKING:
    from shardwise.sharded.groups import Group
    from shardwise.sharded.spec import ShardingSpec

Function = Callable[..., Any]  # a function of torch
Op = Callable[..., Any]  # a user's: (types, args, kwargs, process_group) -> result

custom_ops: dict[Function, Op] = {}
spec_ops: dict[type, dict[Function, Op]] = {}
own_ops: dict[Function, Callable[..., Any]] = {}  # takes the arguments of torch's function
_general: list[Callable[[Function, Sequence[Any], Mapping[str, Any]], Any]] = []  # one, set by `general`


def put(table: dict[Function, Op], func: Function, what: str) -> Callable[[Op], Op]:
    """Return a decorator that puts a user's function into a table; it raises where that takes not four arguments."""

    def register(wrapped: Op) -> Op:
        signature = inspect.signature(wrapped)
        if len(signature.parameters) != 4:
            expected = "(types, args, kwargs, process_group)"
            raise TypeError(f"{what} expects signature: {expected}, but received signature: {signature}")
        table[func] = wrapped
        return wrapped

    return register


def custom_sharded_op_impl(func: Function) -> Callable[[Op], Op]:
    """Register a function of your own that computes `func` whenever a ShardedTensor is among its arguments.

    Args:
        func: The function of torch.

    Returns:
        A decorator for a function `(types, args, kwargs, process_group)`, which it returns as it is. It raises a
        TypeError if the function does not take four arguments.
    """
    return put(custom_ops, func, "Custom sharded op function")


def custom_sharding_spec_op(sharding_spec_class: type, func: Function) -> Callable[[Op], Op]:
    """Register a function of your own that computes `func` on tensors whose spec is of exactly this class.

    Args:
        sharding_spec_class: The class of the specs, without its subclasses.
        func: The function of torch.

    Returns:
        A decorator, like that of `custom_sharded_op_impl`.
    """
    check_type(sharding_spec_class, type, "custom_sharding_spec_op: sharding_spec_class", "give a class of specs")
    return put(spec_ops.setdefault(sharding_spec_class, {}), func, "Custom sharding spec op")


def has_spec_op(sharding_spec: ShardingSpec, op: Function) -> bool:
    """Whether a user's function is registered for the class of the spec."""
    return op in spec_ops.get(type(sharding_spec), {})


def dispatch_spec_op(
    sharding_spec: ShardingSpec,
    op: Function,
    types: tuple[type, ...],
    args: object,
    kwargs: object,
    process_group: Group,
) -> Any:
    """Run the user's function that is registered for the class of the spec."""
    if not has_spec_op(sharding_spec, op):
        raise RuntimeError(f"Custom op: {op} not registered for {type(sharding_spec).__name__}")
    return spec_ops[type(sharding_spec)][op](types, args, kwargs, process_group)


def default(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a function for which the user has registered nothing."""
    ours = own_ops.get(func)
    return _general[0](func, args, kwargs) if ours is None else ours(*args, **kwargs)


def call_generally(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a function tile by tile or over a mesh layout, whatever is registered."""
    return _general[0](func, args, kwargs)


def general(function: Callable[[Function, Sequence[Any], Any], Any]) -> Callable[..., Any]:
    """Decorator: this is the function that computes what nothing is registered for."""
    _general[:] = [function]
    return function


def own(*funcs: Function) -> Callable[[Op], Op]:
    """Decorator: this computes these functions of torch, with their own arguments."""

    def register(wrapped: Op) -> Op:
        for func in funcs:
            own_ops[func] = wrapped
        return wrapped

    return register
