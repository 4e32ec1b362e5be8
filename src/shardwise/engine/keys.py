"""The keys of cached plans: a hashable stand-in for each argument of a call.

A distributed tensor stands in by its layout, everything else by its value. An argument without a hash is returned as it
is: the key that holds it has no hash either, and the call is planned anew each time.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from shardwise.wrapper import Wrapper

# functions whose plans do not depend on float arguments, so that a changing learning rate does not fill the cache
ANY_FLOAT: set[Any] = set()
# floats that matter all the same: a Partial sum divided by zero is no sum
ODD_FLOATS = frozenset({0.0, math.inf, -math.inf})
_TRUE, _FALSE = object(), object()  # True == 1 with the same hash, but their plans differ
_THEMSELVES = frozenset({int, str, type(None), type(Ellipsis), torch.dtype, torch.device})
_BOUNDS = frozenset({int, type(None)})
_OTHER = object()

Frozen = tuple[Any, Any]  # the stand-in, and the argument with local values in place of distributed tensors


class PlainTensorError(Exception):
    """A plain tensor is among the arguments: it must be wrapped first."""


class NumpyNumberError(Exception):
    """A numpy integer is among the arguments; rules know only Python's."""


_TAKE_INDICES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


def as_number(value: object) -> object:
    """A numpy integer, or a 0-d numpy array of integers (not of bytes, which would be a mask), as a Python integer."""
    if isinstance(value, numpy.ndarray):
        return int(value) if not value.ndim and value.dtype.kind in "iu" and value.dtype != numpy.uint8 else value
    return int(value) if isinstance(value, numpy.integer) else value


_LONGEST = 2000
_A_DEVICE = re.compile(r"(cpu|cuda|meta|xpu|mps)(:\d+)?")  # each rank has its own


def said_by_key(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A text of the arguments of a call that are no tensors and decide on its plan. It is equal on all ranks that make
    the same call; ranks that differ in it would mix each other's values."""
    words = [said for arg in args if (said := _said(arg, func))]
    words += [f"{name}={said}" for name, arg in kwargs.items() if (said := _said(arg, func))]
    return ", ".join(words)[:_LONGEST]


def _said(arg: object, func: Callable[..., Any]) -> str:
    kind = type(arg)
    if kind is float:
        return "" if func in ANY_FLOAT else repr(arg)
    if isinstance(arg, str):
        return "" if _A_DEVICE.fullmatch(arg) else repr(arg)
    if isinstance(arg, (tuple, list)):
        inside = [_said(x, func) for x in arg[:64]]
        return f"({', '.join(said or '_' for said in inside)})" if any(inside) else ""
    if isinstance(arg, slice):  # a bound may be a tensor, of which each rank has its own part
        bounds = (arg.start, arg.stop, arg.step)
        return f"slice({', '.join(repr(bound) if type(bound) in _BOUNDS else '_' for bound in bounds)})"
    return repr(arg) if kind in (int, bool, torch.dtype) else ""


def freeze(arg: Any, func: Callable[..., Any] | None = None) -> Frozen:
    """The stand-in for an argument of `func`, and the argument with local values in place of distributed tensors."""
    kind = type(arg)
    if kind in _THEMSELVES:
        return arg, arg
    if kind is list or kind is tuple:
        return _freeze_sequence(arg, func)
    if kind is float:
        return (kind if func in ANY_FLOAT and arg not in ODD_FLOATS else (kind, arg)), arg
    if kind is slice:
        arg = with_numbers(arg)
        return (slice, arg.start, arg.stop, arg.step), arg
    if kind is bool:
        return (_TRUE if arg else _FALSE), arg
    if isinstance(arg, Wrapper):
        return arg._layout, arg._local
    if isinstance(arg, torch.Tensor):
        raise PlainTensorError
    if isinstance(arg, (list, tuple)):
        return _freeze_sequence(arg, func)
    if isinstance(arg, dict):
        pairs = {name: freeze(value, func) for name, value in arg.items()}
        return (dict, *((name, key) for name, (key, _) in pairs.items())), {n: local for n, (_, local) in pairs.items()}
    if isinstance(arg, numpy.integer) or (func in _TAKE_INDICES and as_number(arg) is not arg):
        raise NumpyNumberError
    if kind is numpy.ndarray and not arg.dtype.hasobject:
        return (kind, arg.dtype.str, arg.shape, arg.tobytes()), arg
    return (kind, arg), arg  # numpy's 1.0 equals 1 and has the same hash


def _freeze_sequence(arg: Any, func: Callable[..., Any] | None) -> Frozen:
    kind = type(arg)
    if arg and type(arg[0]) is Wrapper.concrete and set(map(type, arg)) == {Wrapper.concrete}:  # thousands, perhaps
        local = [item._local for item in arg]
        return (kind, *[item._layout for item in arg]), local if kind is list else tuple(local)
    plain = [item if type(item) in _THEMSELVES else _slice_key(item) for item in arg]
    if _OTHER not in plain:
        return (kind, *plain), arg
    pairs = [freeze(item, func) for item in arg]
    local = [value for _, value in pairs]
    return (kind, *(key for key, _ in pairs)), local if isinstance(arg, list) else tuple(local)


def _slice_key(item: Any) -> Any:
    if type(item) is slice:
        start, stop, step = item.start, item.stop, item.step
        if type(start) in _BOUNDS and type(stop) in _BOUNDS and type(step) in _BOUNDS:
            return (slice, start, stop, step)
    return _OTHER


def freeze_kwargs(kwargs: Mapping[str, Any], func: Callable[..., Any], key: list[Any]) -> dict[str, Any]:
    """The keyword arguments with local values in place of distributed tensors; their stand-ins are added to `key`."""
    local_kwargs = {}
    for name, arg in kwargs.items():
        kind = type(arg)
        key.append(name)
        if arg is None or kind is int or kind is str:
            key.append(arg)
            local_kwargs[name] = arg
        elif kind is bool:
            key.append(_TRUE if arg else _FALSE)
            local_kwargs[name] = arg
        else:
            frozen, local_kwargs[name] = freeze(arg, func)
            key.append(frozen)
    return local_kwargs


def with_numbers(bounds: slice) -> slice:
    """The slice with numbers in place of tensors among its bounds, whose values may change."""
    start, stop, step = bounds.start, bounds.stop, bounds.step
    if type(start) in _BOUNDS and type(stop) in _BOUNDS and type(step) in _BOUNDS:
        return bounds
    return slice(*(None if bound is None else operator.index(bound) for bound in (start, stop, step)))
