"""What a captured function may read through the code of functions: variables, imports, closures, defaults."""

from __future__ import annotations

import builtins
import functools
import os
import sys
import types
from collections.abc import Iterable
from importlib.util import resolve_name
from typing import Any

from shardwise.captures.foreign import is_foreign
from shardwise.captures.names import names_in
from shardwise.captures.outside import COUNTS
from shardwise.captures.readings import Values
from shardwise.captures.walk import Walk
from shardwise.protocols import Item

_LOOKING = frozenset({"globals", "eval", "exec", "__import__"})  # ways to variables that no code names
_NOTHING = "nothing yet"


def of_function(walk: Walk, func: types.FunctionType, name: str) -> None:
    """What the code of a function names, unless the function is foreign; and its closure and defaults, always."""
    if func is os.getenv:
        walk.visit(os.environ, "os.environ")
    cells = func.__closure__ or ()
    if not is_foreign(func):
        found = names_in(func.__code__)
        walk.names |= found.attributes
        walk.perhaps |= found.perhaps
        walk.is_wide = walk.is_wide or found.is_wide
        named = [
            *map(func.__globals__.get, found.variables),
            *map(_content, cells),
            *map(sys.modules.get, found.imports),
        ]
        for module in (item for item in named if isinstance(item, types.ModuleType)):
            walk.ask(module, found.attributes)
        if counts := found.attributes & COUNTS:
            walk.refuse(f"{func.__qualname__} reads {min(counts)}, which says how often a tensor was written")
        if "swap_tensors" in found.attributes | found.variables:
            walk.refuse(f"{func.__qualname__} names swap_tensors, which makes a tensor another without an op")
        _variables(walk, func, sorted(found.variables))
        _imports(walk, func, found.imports)
        walk.watch(f"defaults of {func.__qualname__}", functools.partial(_defaults_of, func))
        walk.attributes(vars(func), name, walk.known & vars(func).keys())
        if cells:
            walk.watch("around", lambda: [_content(cell) for cell in cells], func.__code__.co_freevars)
    for at, cell in enumerate(cells):
        walk.visit(_content(cell), func.__code__.co_freevars[at])
    for default in (func.__defaults__, func.__kwdefaults__, getattr(func, "__wrapped__", None)):
        walk.visit(default, f"a default of {name}")


def _variables(walk: Walk, func: types.FunctionType, names: list[str]) -> None:
    table = func.__globals__
    walk.builtins.update(name for name in names if name not in table)
    if names:
        walk.tables.add_entries(func.__module__, table, names)
    for name in names:
        walk.visit(table.get(name, vars(builtins).get(name)), name)
    for name in _LOOKING & set(names) - table.keys():
        walk.refuse(f"{func.__qualname__} calls {name}, so that nobody can tell which variables it reads")


def _imports(walk: Walk, func: types.FunctionType, names: Iterable[str]) -> None:
    """Modules that a function imports itself, at each call: they are read like others."""
    package = func.__globals__.get("__package__")
    for relative in sorted(names):
        name = resolve_name(relative, package) if package or not relative.startswith(".") else relative
        walk.watch(f"import of {name}", functools.partial(_module_of, name))
        walk.visit(sys.modules.get(name), name)
        walk.visit(sys.modules.get(name.partition(".")[0]), name)


def of_method(walk: Walk, method: types.MethodType, name: str) -> None:
    walk.visit(method.__self__, name)
    walk.visit(method.__func__, name)


def of_partial(walk: Walk, part: functools.partial[Any], name: str) -> None:
    for inner in (part.func, part.args, part.keywords):
        walk.visit(inner, name)


def of_getter(walk: Walk, getter: Item, name: str) -> None:
    """`operator.attrgetter` and the like, which have names that no code shows."""
    texts = [text for text in getter.__reduce__()[1] if isinstance(text, str)]
    walk.names |= {part for text in texts for part in text.split(".")}


def of_property(walk: Walk, found: property, name: str) -> None:
    walk.visit(found.fget, name)


def of_wrapped(walk: Walk, found: Item, name: str) -> None:
    walk.visit(found.__func__, name)


def of_builtin(walk: Walk, func: types.BuiltinFunctionType, name: str) -> None:
    if not isinstance(func.__self__, types.ModuleType):
        walk.visit(func.__self__, name)


def _defaults_of(func: types.FunctionType) -> Values:
    """The code of a function and its defaults; those by keyword one by one, so that an equal dict is the same."""
    named = func.__kwdefaults__ or {}
    return [func.__code__, func.__defaults__, *named, *named.values()]


def _content(cell: types.CellType) -> Item:
    try:
        return cell.cell_contents
    except ValueError:  # empty still
        return _NOTHING


def _module_of(name: str) -> tuple[object]:
    return (sys.modules.get(name),)
