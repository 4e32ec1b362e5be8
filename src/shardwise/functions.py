"""What torch's functions are, read off their schemas and names."""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any

from shardwise.torch_private import schema_of

_MADE_FOR_A_CALL = (functools.partial, MethodType)
_NOT_IN_PLACE = {"__invert__", "__index__", "__int__", "__init__", "__iter__"}


def writes_first(func: Any) -> bool:
    """Whether a function writes into its first argument: by its schema, or by torch's naming."""
    kind = type(func)
    if kind in _MADE_FOR_A_CALL or (kind is FunctionType and func.__closure__ is not None):  # no cache may keep it
        return _name_says_so(func)
    return _writes_first(func)


@functools.lru_cache(maxsize=4096)
def _writes_first(func: Any) -> bool:
    schema = schema_of(func)
    if schema is not None:
        return bool(schema.is_mutable)
    return _name_says_so(func)


def _name_says_so(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return (name.startswith("__i") and name not in _NOT_IN_PLACE) or name in ("__setitem__", "__set__")
    return name.endswith("_")


def without_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a `new_...` method less the size, which comes by name, as one sequence or as ints."""
    if "size" in kwargs:
        return args, {name: value for name, value in kwargs.items() if name != "size"}
    return (args[1:] if args and not isinstance(args[0], int) else ()), kwargs
