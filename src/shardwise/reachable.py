"""Tensors that a function can reach without being given them: its module's, and those in the variables it names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

import torch

from shardwise.protocols import Item

_MANY = 100  # entries of a container that is not looked through


def tensors_behind(func: Item) -> Iterator[torch.Tensor]:
    """Tensors that a function, a method, a module or a callable object can reach."""
    for item in (func, getattr(func, "__self__", None)):
        yield from _tensors_in(item, 2)
    yield from _tensors_around(getattr(func, "__func__", func), 2)


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
