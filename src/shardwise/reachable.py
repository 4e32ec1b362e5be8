"""Tensors that a function can reach without being given them: its module's, and those in the variables it names."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType

import torch

from shardwise.protocols import Item

_MANY = 100  # entries of a container that is not looked through


def tensors_behind(func: Item) -> Iterator[torch.Tensor]:
    """Tensors that a function, a method, a module or a callable object can reach."""
    for item in (func, getattr(func, "__self__", None)):
        yield from _tensors_in(item, 2)
    yield from _tensors_around(getattr(func, "__func__", func), 2)


def tensors_read_by(func: Item) -> Iterator[torch.Tensor]:
    """The same, but of a module of which the function's code takes attributes only, as `self.scale`, what is behind
    those."""
    cells = getattr(func, "__closure__", None) or ()
    if not isinstance(func, FunctionType) or _has_inner(func.__code__):
        yield from tensors_behind(func)
        return
    closed = {name: c.cell_contents for name, c in zip(func.__code__.co_freevars, cells, strict=True) if _is_filled(c)}
    named = {name: func.__globals__[name] for name in func.__code__.co_names if name in func.__globals__}
    for name, value in (*closed.items(), *named.items()):
        if isinstance(value, torch.nn.Module):
            yield from _tensors_of_attributes(value, func.__code__, name, frozenset())
        else:
            yield from _tensors_in(value, 2)


def _tensors_of_attributes(
    module: torch.nn.Module, code: CodeType, name: str, seen: frozenset[CodeType]
) -> Iterator[torch.Tensor]:
    """The tensors of a module that some code may read, which has it in the variable `name`."""
    attributes = None if _has_inner(code) else _attributes_of(code, name)
    if attributes is None:
        yield from _tensors_in(module, 2)
        return
    for attribute in attributes:
        method = getattr(type(module), attribute, None)
        if isinstance(method, FunctionType) and attribute not in vars(module) and method.__code__.co_argcount:
            if method.__code__ not in seen:
                own = method.__code__.co_varnames[0]
                yield from _tensors_of_attributes(module, method.__code__, own, seen | {method.__code__})
                yield from _tensors_around(method, 2)
        elif method is not None:
            yield from _tensors_in(module, 2)  # a property, or what else a class has
        else:
            yield from _tensors_in(getattr(module, attribute, None), 2)


@functools.lru_cache(maxsize=256)
def _attributes_of(code: CodeType, name: str) -> frozenset[str] | None:
    """The attributes that code takes of a variable; None if it does anything else with it."""
    steps = list(dis.get_instructions(code))
    found = set()
    for step, after in zip(steps, [*steps[1:], None]):
        if step.argval == name and step.opname.startswith("LOAD_") and step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            if after is None or after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            found.add(after.argval)
        elif isinstance(step.argval, tuple) and name in step.argval:  # instructions that load two variables
            return None
    return frozenset(found)


def _has_inner(code: CodeType) -> bool:
    """Whether code defines functions, or calls those of a base class, which may read more."""
    return "super" in code.co_names or any(isinstance(const, CodeType) for const in code.co_consts)


def _tensors_around(func: Item, depth: int) -> Iterator[torch.Tensor]:
    """Tensors in the variables that a function names."""
    cells = [cell.cell_contents for cell in getattr(func, "__closure__", None) or () if _is_filled(cell)]
    names = getattr(getattr(func, "__code__", None), "co_names", ())
    table = getattr(func, "__globals__", {})
    for value in (*cells, *(table[name] for name in names if name in table)):
        yield from _tensors_in(value, depth)


def _tensors_in(value: Item, depth: int) -> Iterator[torch.Tensor]:
    """Tensors in a value: a module, an optimizer, a small container, a function, an object of the program's."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        yield from (p for group in value.param_groups for p in group["params"])
    elif depth and not isinstance(value, (type, ModuleType)):
        inside: Iterable[Item] = ()
        if isinstance(value, (list, tuple, dict)):
            inside = (value.values() if isinstance(value, dict) else value) if len(value) <= _MANY else ()
        elif (getattr(value, "__module__", None) or "torch").partition(".")[0] in ("torch", "shardwise", "builtins"):
            return
        elif isinstance(value, FunctionType):
            yield from _tensors_around(value, depth - 1)
        else:
            inside = list(vars(value).values()) if hasattr(value, "__dict__") else ()
        for item in inside:
            yield from _tensors_in(item, depth - 1)


def _is_filled(cell: Item) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
