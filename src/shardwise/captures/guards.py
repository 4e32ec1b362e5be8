"""What must still hold when a program is run again: the modules, parameters and numbers that it was written with."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from operator import is_, itemgetter
from typing import Any

import torch

from shardwise.autograd.leaves import first_leaf
from shardwise.comm.capturing import settings
from shardwise.protocols import Item
from shardwise.wrapper import Wrapper

_SIMPLE = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


class Watched:
    """The modules that a program called: attributes, parameters and buffers, and which of those take gradients."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._attributes: list[tuple[Callable[[Any], Any], dict[str, Any], Any]] = []
        self._settings = [(tell, m, tell(m)) for m in modules for tell in settings if tell(m) is not None]
        self._tables: list[tuple[dict[str, Any], list[Any]]] = []
        tensors: dict[int, torch.Tensor] = {}
        for module in modules:
            self._note_attributes(vars(module))
            for table in (module._parameters, module._buffers):
                if table:
                    self._tables.append((table, list(table.values())))
                    tensors.update((id(t), t) for t in table.values() if t is not None)
        wrappers = [t for t in tensors.values() if isinstance(t, Wrapper)]
        self._wrappers = [(t.__dict__, t._local, t._layout) for t in wrappers]
        self._leaves = [first_leaf(t) if isinstance(t, Wrapper) else t for t in tensors.values()]
        self._flags = [leaf.requires_grad for leaf in self._leaves]

    def _note_attributes(self, table: dict[str, Any]) -> None:
        names = [name for name, value in table.items() if _is_simple(value)]
        if names:
            read = itemgetter(*names)
            self._attributes.append((read, table, read(table)))

    def changed(self) -> str:
        """What is another than it was; empty if nothing is."""
        for read, attributes, values in self._attributes:
            if read(attributes) != values:
                return f"an attribute of a module changed: {_first_change(values, read(attributes))}"
        for tell, module, chosen in self._settings:
            if tell(module) != chosen:
                return f"{type(module).__name__} is set to run otherwise"
        for table, known in self._tables:
            if len(table) != len(known) or not all(map(is_, table.values(), known)):
                return f"a parameter or buffer was replaced: one of {', '.join(table)}"
        for own, local, layout in self._wrappers:
            if own["_local"] is not local or own["_layout"] is not layout:
                return "a parameter or buffer has another layout or memory"
        if [leaf.requires_grad for leaf in self._leaves] != self._flags:
            return "a parameter was frozen, or is no longer"
        return ""


def _is_simple(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_simple, value))
    return isinstance(value, _SIMPLE)


def _first_change(before: Item, after: Item) -> str:
    pairs = zip(before, after, strict=True) if isinstance(before, tuple) else [(before, after)]
    return next((f"{a!r:.60} became {b!r:.60}" for a, b in pairs if a != b), "")


class Leaves:
    """Tensors that take gradients: whether they do, and whether they had one already."""

    def __init__(self, leaves: list[torch.Tensor], began: list[tuple[torch.Tensor, bool]]) -> None:
        self._leaves, self._began = leaves, began
        self._flags = [True] * len(leaves)

    def changed(self) -> str:
        """What is another than it was; empty if nothing is."""
        if [leaf.requires_grad for leaf in self._leaves] != self._flags:
            return "a tensor takes gradients no more"
        for leaf, had_none in self._began:
            if (leaf.grad is None) is not had_none:
                return "gradients were there, or not"
        return ""


class Surroundings:
    """The numbers, flags and tensors that a function takes from where it was defined: closures, globals, the attributes
    of the object whose method it is."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._read = _readers(func)
        self._known = [read() for read in self._read]

    def changed(self) -> str:
        """What is another than it was; empty if nothing is."""
        for read, known in zip(self._read, self._known, strict=True):
            now = read()
            if now is not known and not (isinstance(now, _SIMPLE) and type(now) is type(known) and now == known):
                return f"a variable around the function changed: {known!r:.60} became {now!r:.60}"
        return ""


_NOTHING = object()


def _readers(func: Callable[..., Any]) -> list[Callable[[], Any]]:
    found: list[Callable[[], Any]] = []
    target, owner = getattr(func, "__func__", func), getattr(func, "__self__", func)
    if not isinstance(owner, (torch.nn.Module, types.FunctionType)):  # of modules `Watched` knows the attributes
        table = getattr(owner, "__dict__", {})
        found += [functools.partial(table.get, name, _NOTHING) for name in list(table)]
    if not isinstance(target, types.FunctionType):
        return found
    found += [functools.partial(_content, cell) for cell in target.__closure__ or ()]
    table = target.__globals__
    return found + [functools.partial(table.get, name, _NOTHING) for name in target.__code__.co_names if name in table]


def _content(cell: types.CellType) -> Item:
    try:
        return cell.cell_contents
    except ValueError:  # empty still
        return _NOTHING
