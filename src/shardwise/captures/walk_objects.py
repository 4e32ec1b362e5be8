"""What a captured function may read of Python's objects: modules, classes, objects of classes, containers."""

from __future__ import annotations

import decimal
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.captures import values
from shardwise.captures.foreign import functions_of, is_foreign, is_foreign_name, setting
from shardwise.captures.walk import Walk
from shardwise.protocols import Item

_SETTINGS = frozenset(  # of torch, that a program may ask for
    {
        "get_num_threads",
        "get_num_interop_threads",
        "get_float32_matmul_precision",
        "get_deterministic_debug_mode",
        "get_default_device",
        "initial_seed",
        "is_warn_always_enabled",
        "is_anomaly_enabled",
    }
)
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})  # which run where a class is called
_SELDOM = _MAKING | {"__init_subclass__", "__repr__", "__str__", "__format__", "__del__"}
_PLAIN = (bool, int, float, str)
_METHODS = (types.FunctionType, classmethod, staticmethod)


def of_python_module(walk: Walk, module: types.ModuleType, name: str) -> None:
    if module is os and walk.known & {"environ", "getenv"}:
        walk.visit(os.environ, "os.environ")
    if module is decimal:
        values.of_decimals(walk)
    if module is torch:
        for name_of in sorted(walk.known & _SETTINGS):
            walk.watch(f"torch.{name_of}()", functools.partial(_asked, getattr(torch, name_of)))
    if is_foreign_name(module.__name__):
        _settings(walk, module, name)
    else:
        walk.attributes(vars(module), name)
        if walk.takes_all:
            walk.watch(name, vars(module).values, vars(module))


def _settings(walk: Walk, owner: object, name: str) -> None:
    """Numbers and flags of a module that is not the program's, such as `torch.backends.cudnn.benchmark`."""
    if owner is sys and "argv" in walk.known:
        walk.visit(sys.argv, "sys.argv")
    found = {key: setting(owner, key) for key in sorted(walk.known) if not key.startswith("__")}
    names = [key for key, value in found.items() if isinstance(value, _PLAIN)]
    if names:
        walk.watch(name, lambda: [setting(owner, key) for key in names], names)
    if isinstance(owner, types.ModuleType):
        functions_of(walk.tables, owner, walk.known)
    for key, value in found.items():
        if isinstance(value, types.ModuleType) or type(value).__module__.startswith("torch.backends"):
            walk.visit(value, f"{name}.{key}")


def of_class(walk: Walk, cls: type, name: str) -> None:
    """A class that code names, so that it may make objects of it."""
    if cls is decimal.Decimal:
        values.of_decimals(walk)
    for base in cls.__mro__:
        if not is_foreign(base):
            for key in sorted(_MAKING & vars(base).keys()):
                walk.visit(vars(base)[key], f"{base.__qualname__}.{key}")
    read_by_class(walk, cls)


def read_by_class(walk: Walk, cls: type) -> None:
    """The class of an object: what its code reads where nobody makes a new one."""
    if not is_foreign(type(cls)):
        read_by_class(walk, type(cls))
    own = [base for base in cls.__mro__ if not is_foreign(base)]
    named = {name for base in own for name in walk.known & vars(base).keys()}  # which a class below may get later
    if own:
        walk.watch(f"what {cls.__qualname__} inherits", lambda: [cls.__mro__, *(len(vars(base)) for base in own)])
    for base in cls.__mro__:
        if not is_foreign(base):
            walk.attributes(vars(base), base.__qualname__, named)
            for key, method in list(vars(base).items()):  # operators and descriptors, which no code names
                if key.startswith("__") and isinstance(method, _METHODS) and key not in _SELDOM:
                    walk.visit(method, f"{base.__qualname__}.{key}")


def of_object(walk: Walk, item: object, name: str) -> None:
    """An object of a class of the program's: the attributes that the code names. Of Python's own: all."""
    cls, table = type(item), getattr(item, "__dict__", {})
    if is_foreign(cls):
        _foreign(walk, item, table, name)
        return
    walk.objects.append(item)
    read_by_class(walk, cls)
    hidden = {key for base in cls.__mro__ if not is_foreign(base) for key in walk.known & vars(base).keys()}
    walk.attributes(table, name, {*walk.known_perhaps, *(hidden if hasattr(item, "__dict__") else ())})
    if hasattr(item, "__dict__"):
        walk.watch(f"the number of attributes of {name}", lambda: (len(table),))
    slots = [s for base in cls.__mro__ for s in _slots(base) if s in walk.known]
    if slots:
        walk.watch(name, lambda: [getattr(item, slot, None) for slot in slots], slots)
    for slot in slots:
        walk.visit(getattr(item, slot, None), f"{name}.{slot}")


def _foreign(walk: Walk, item: object, table: dict[str, Any], name: str) -> None:
    top = type(item).__module__.partition(".")[0]
    walk.visit(table.get("__wrapped__"), name)
    if item is os.environ:
        walk.watch(name, lambda: [*os.environ, *os.environ.values()])
        return
    if type(item).__module__.startswith("torch.backends"):
        _settings(walk, item, name)
    if top in sys.stdlib_module_names and table:
        of_dict(walk, table, name)
    elif top == "torch" and not isinstance(item, torch.amp.GradScaler):
        tensors = [key for key, value in table.items() if isinstance(value, torch.Tensor)]
        if tensors:
            walk.watch(f"a tensor of {name}", lambda: list(map(table.get, tensors)))
        for key in tensors:
            walk.visit(table[key], name)


def of_dict(walk: Walk, table: dict[Any, Any], name: str) -> None:
    if walk.fits(table, name):
        walk.watch(name, lambda: [*table, *table.values()])
        for key, value in list(table.items()):
            walk.visit(key, f"a key of {name}")
            walk.visit(value, f"{name}[{key!r:.30}]")


def of_sequence(walk: Walk, items: Item, name: str) -> None:
    if walk.fits(items, name):
        if not isinstance(items, tuple):
            walk.watch(name, lambda: items)
        for item in items:
            walk.visit(item, f"an entry of {name}")


def of_set(walk: Walk, items: set[Any], name: str) -> None:
    if walk.fits(items, name):
        walk.watch(name, lambda: (frozenset(items),))
        for item in items:
            walk.visit(item, f"an entry of {name}")


def _slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _asked(setting: Callable[[], object]) -> tuple[object]:
    return (setting(),)
