"""Forms of a call's arguments that a rule does not take as they are: by name, in another order, tensors for numbers."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_map_only

from shardwise.engine.call_shape import CallShape, op_name, tensors_in
from shardwise.engine.plan import Plan
from shardwise.strategy.registry import Rule
from shardwise.strategy.spec import Operand
from shardwise.wrapper import Wrapper

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}  # which torch takes too


def placed_for(
    rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """The arguments in the order in which the rule takes them, torch's `input` first; None if it lacks a name."""
    if not kwargs:
        return args, kwargs
    signature = inspect.signature(rule)
    kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    first = next(iter(signature.parameters.values()))
    if not args and "input" in kwargs and first.kind is first.POSITIONAL_OR_KEYWORD:
        args = (kwargs.pop("input"),)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    return bound.args, bound.kwargs


def is_out_of_order(call: CallShape, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a rule takes the tensors in another order than the call names them, or the first one by position only."""
    ordered = [op.index for _, op in tensors_in(args, kwargs, Operand)]
    return (bool(args) and not call.args) or ordered != [op.index for op in call.operands]


def reordered(func: Callable[..., Any], rule: Rule) -> Plan:
    """The plan of a call that names its tensors in another order than the rule does: call it again in that order."""

    def run(args: Any, kwargs: Any, local_args: Any, local_kwargs: Any) -> Any:
        placed = placed_for(rule, args, kwargs)
        assert placed is not None  # it was when the plan was made
        return func(*placed[0], **placed[1])

    return run


def with_item_values(func: Callable[..., Any], which: set[int]) -> Plan:
    """The plan of a call with 0-d tensors where torch takes numbers: call it again with the numbers.

    Args:
        func: The function; of an aten overload, another overload may be the one for numbers.
        which: Which of the call's tensors, in order, are to be numbers.
    """
    called = getattr(func, "overloadpacket", func)

    def number(tensor: Wrapper) -> Any:
        if tensor.requires_grad:
            raise TypeError(f"{op_name(func)}: a number is needed, not a tensor that requires grad")
        return tensor.item()

    def run(args: Any, kwargs: Any, local_args: Any, local_kwargs: Any) -> Any:
        count = itertools.count()
        args = tuple(tuple(a) if isinstance(a, list) else a for a in args)  # x[[i, j]] is x[i, j] for tensors only
        args, kwargs = tree_map_only(Wrapper, lambda t: number(t) if next(count) in which else t, (args, dict(kwargs)))
        return called(*args, **kwargs)

    return run
