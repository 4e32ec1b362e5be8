"""What torch's functions are, read off their schemas and names."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch

from shardwise.torch_private.tensors import schema_of

COMPILED_ON_RANKS: set[str] = set()
"""Modules of torch whose functions compile something themselves: it is compiled for what each rank holds."""

_MADE_FOR_A_CALL = (functools.partial, MethodType)
_NOT_IN_PLACE = {"__invert__", "__index__", "__int__", "__init__", "__iter__"}


def writes_first(func: Any) -> bool:
    """Whether a function writes into its first argument: by its schema, or by torch's naming."""
    kind = type(func)
    if kind in _MADE_FOR_A_CALL or (kind is FunctionType and func.__closure__ is not None):  # no cache may keep it
        return _name_says_so(func)
    return _writes_first(func)


@functools.lru_cache(maxsize=4096)
def _writes_first(func: object) -> bool:
    schema = schema_of(func)
    if schema is not None:
        return bool(schema.is_mutable)
    return _name_says_so(func)


def _name_says_so(func: object) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return (name.startswith("__i") and name not in _NOT_IN_PLACE) or name in ("__setitem__", "__set__")
    return name.endswith("_")


class Alias(Protocol):
    """What a schema says of an argument or a result that shares memory."""

    is_write: bool
    before_set: set[str]


def is_written_argument(result: Alias | None, argument: Alias | None) -> bool:
    """Whether a result is this argument, which the function writes into."""
    if argument is None or result is None or not argument.is_write:
        return False
    return bool(argument.before_set & result.before_set)


Argument = tuple[int, str]  # its position and its name
_ALSO: dict[object, tuple[tuple[Argument, ...], Argument, object]] = {}


def also_writes(func: object, *arguments: Argument, when: Argument, default: object) -> None:
    """Say that `func` writes into arguments that neither its schema nor its name tells, where the argument `when` (by
    default `default`) is true or a number."""
    _ALSO[func] = arguments, when, default


def may_write(func: object, kwargs: Mapping[str, object]) -> bool:
    """Whether a call may write into one of its arguments."""
    return "out" in kwargs or func in _ALSO or writes_first(func)


def is_pointwise(func: object) -> bool:
    """Whether torch's tags say that each element of the result is made of the elements in its own place."""
    return _is_tagged(func, "pointwise")


def is_random(func: object) -> bool:
    """Whether torch's tags say that the result is drawn at random."""
    return _is_tagged(func, "nondeterministic_seeded")


def _is_tagged(func: object, tag: str) -> bool:
    schema = schema_of(func)
    name = getattr(func, "__name__", "") if schema is None else schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(found.name == tag for form in packet.overloads() for found in getattr(packet, form).tags)


def written(func: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a call writes into, with a name for each that messages can use; tensors in lists one by one."""
    schema, found = schema_of(func), []
    if schema is not None:
        where = enumerate(schema.arguments)
        places = [(i, a.name) for i, a in where if a.alias_info is not None and a.alias_info.is_write]
    else:
        places = [(0, "self" if "self" in kwargs else "input")] if writes_first(func) else []
    given = lambda i, name, default=None: kwargs[name] if name in kwargs else args[i] if i < len(args) else default  # noqa: E731
    if func in _ALSO:
        also, when, default = _ALSO[func]
        flag = given(*when, default)
        places += also if flag is not None and flag is not False else ()
    for i, name in places:
        value = given(i, name)
        found += [(f"argument {i} ({name})" if func in _ALSO else f"argument {i}", v) for v in _tensors(value)]
    if schema is None and "out" in kwargs:
        found += [("out", v) for v in _tensors(kwargs["out"])]
    return found


def _tensors(value: object) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, torch.Tensor)]


def without_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a `new_...` method less the size, which comes by name, as one sequence or as ints."""
    if "size" in kwargs:
        return args, {name: value for name, value in kwargs.items() if name != "size"}
    return (args[1:] if args and not isinstance(args[0], int) else ()), kwargs
