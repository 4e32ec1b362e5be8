"""What a function may read of the Python around it: found before it runs, by the names in its code.

From the function the walk goes on to closures, global variables, attributes of objects, containers, modules with all
their children, and to the code of functions that are named on the way. Code of torch, of the package and of Python's
own library is not read, but what is handed to it is: so what is left out are values that such code keeps to itself.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import logging
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from importlib.util import resolve_name
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.captures import torchs, values
from shardwise.captures.foreign import (
    builtins_of,
    code_of_modules,
    functions_of,
    is_foreign,
    is_foreign_name,
    methods_of_tensors,
    modules_among,
    setting,
)
from shardwise.captures.names import names_in
from shardwise.captures.outside import COUNTS, asked_by, works_elsewhere
from shardwise.captures.readings import Reading, Tables, Values, is_simple
from shardwise.protocols import Item
from shardwise.torch_private.tensors import tensor_number
from shardwise.wrapper import notes_of

_MOST = 10_000  # entries of a container that are compared at each call
_LOOKING = frozenset({"globals", "eval", "exec", "__import__"})  # ways to variables that no code names
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
_SEEDING = frozenset({"manual_seed", "manual_seed_all", "set_rng_state"})
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})  # which run where a class is called
_SELDOM = _MAKING | {"__init_subclass__", "__repr__", "__str__", "__format__", "__del__"}
_PLAIN = (bool, int, float, str)
_METHODS = (types.FunctionType, classmethod, staticmethod)
_BEGINNING = ("forward", "__call__", "__getattr__", "__getitem__", "__len__", "__iter__")


class Surroundings:
    """Everything that a function, and what it calls, takes from where it stands.

    Attributes:
        tensors: The tensors among it.
        refused: Why calls cannot be told apart by it; empty if they can.
    """

    def __init__(self, roots: Iterable[Item]) -> None:
        roots, names, perhaps, is_wide = list(roots), frozenset(_BEGINNING), frozenset[str](), False
        while True:  # code that was found late names attributes of objects that were seen before
            walk = _Walk(names, perhaps, is_wide)
            for root in roots:
                walk.visit(root, getattr(root, "__qualname__", type(root).__name__))
            if walk.names <= names and walk.perhaps <= perhaps and walk.is_wide <= is_wide:
                break
            names, perhaps = names | walk.names | walk.perhaps, perhaps | walk.perhaps
            is_wide = is_wide or walk.is_wide
        walk.finish()
        self._tables, self._readings, self._empty = walk.tables, walk.readings, walk.empty
        self._memory, self._notes = list(map(_memory_of, walk.tensors)), list(map(_notes_on, walk.tensors))
        self._alive = walk.alive
        self.tensors, self.refused = walk.tensors, walk.refused
        self._drawn = [(values.state_of(source), source) for source in (random, np.random, *walk.streams)]

    def knows(self, item: object) -> bool:
        """Whether the walk has come by an object."""
        return id(item) in self._alive

    def changed(self) -> str:
        """What is another than it was; empty if nothing is."""
        if any(self._empty):
            return "a hook, a parameter or a module was added to a module"
        return self._tables.changed() or next((reason for each in self._readings if (reason := each.changed())), "")

    def swapped(self) -> str:
        """Whether a tensor was made another without an op, or got an attribute; empty if none was. To be asked right
        after the call."""
        if list(map(_memory_of, self.tensors)) != self._memory:
            return "a tensor is swapped with another (torch.utils.swap_tensors), which no op shows"
        if list(map(_notes_on, self.tensors)) != self._notes:
            return "an attribute of a tensor is set"
        return ""

    def drawn(self) -> str:
        """Which numbers were drawn that no program draws again; empty if none were."""
        for before, source in self._drawn:
            if values.state_of(source) != before:
                return f"random numbers are drawn from {getattr(source, '__name__', type(source).__name__)}"
        return ""


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Which tensor of C++ an object stands for, and which attributes it has."""
    return tensor_number(tensor), id(vars(tensor))


def _notes_on(tensor: torch.Tensor) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in notes_of(tensor).items()]


class _Walk:
    """One walk, with the names of attributes that are known before it."""

    def __init__(self, names: frozenset[str], perhaps: frozenset[str], is_wide: bool) -> None:
        self.known, self._perhaps, self._takes_all = names, sorted(perhaps), is_wide
        self.names: set[str] = set()
        self.perhaps: set[str] = set()
        self.tables = Tables()
        self.readings: list[Reading] = []
        self.empty: list[dict[Any, Any]] = []  # of hooks, parameters, ...: nobody must add any
        self.builtins: set[str] = set()  # functions of Python that code names
        self.modules: list[torch.nn.Module] = []
        self.objects: list[object] = []  # of the program's classes
        self.tensors: list[torch.Tensor] = []
        self.streams: list[Any] = []
        self.libraries: set[str] = set()  # whose settings are watched
        self.alive: dict[int, object] = {}
        self.refused = ""
        self.is_wide = False  # whether code asks for attributes by names that it makes up

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or reason

    def finish(self) -> None:
        """Watch what all that was found has in common: classes, and functions that a program may replace."""
        together = [*self.modules, *self.objects]
        if together:
            self.watch("the class of an object", lambda: list(map(type, together)))
        builtins_of(self.tables, self.builtins)
        methods_of_tensors(self.tables, self.known)
        code_of_modules(self.tables, set(map(type, self.modules)))
        self.tables.note()

    def watch(self, name: str, read: Callable[[], Values], labels: Iterable[str] = ()) -> None:
        self.readings.append(Reading(name, read, labels))

    def visit(self, item: Item, name: str) -> None:
        """Look at an object, once."""
        if isinstance(item, frozenset):
            for each in item:
                self.visit(each, f"an entry of {name}")
        if is_simple(item) or id(item) in self.alive:
            return
        self.alive[id(item)] = item
        values.of_library(self, item)
        if not isinstance(item, types.ModuleType):  # of these, the same function must name both
            self._ask(item, self.known)
        for kind, look in _KINDS:
            if isinstance(item, kind):
                look(self, item, name)
                if not isinstance(item, _LOOKED_AT) and not is_foreign(type(item)):
                    self._object(item, name)
                return
        if hasattr(type(item), "__next__"):
            self.refuse(f"{name} is an iterator, {item!r:.60}: take from it outside and pass what it gives")
            return
        for kind, look in _CONTAINERS:
            if isinstance(item, kind):
                look(self, item, name)
        if values.has_memory(item):
            values.of_memory(self, item, name)
        self._object(item, name)

    def _ask(self, item: object, names: frozenset[str]) -> None:
        if asked := asked_by(item, names):
            self.refuse(f"{asked} may give something else at each call: ask outside and pass what it gives")
        if works_elsewhere(item, names):
            self.refuse("other threads may work for the call, whose ops nobody sees here")

    # -- code -------------------------------------------------------------------------------------------------------
    def _function(self, func: types.FunctionType, name: str) -> None:
        if func is os.getenv:
            self.visit(os.environ, "os.environ")
        cells = func.__closure__ or ()
        is_own = not is_foreign(func)
        if is_own:
            found = names_in(func.__code__)
            self.names |= found.attributes
            self.perhaps |= found.perhaps
            self.is_wide = self.is_wide or found.is_wide
            named = [
                *map(func.__globals__.get, found.variables),
                *map(_content, cells),
                *map(sys.modules.get, found.imports),
            ]
            for module in modules_among(named, found.attributes):
                self._ask(module, found.attributes)
            if counts := found.attributes & COUNTS:
                self.refuse(f"{func.__qualname__} reads {min(counts)}, which says how often a tensor was written")
            if seeds := _SEEDING & (found.attributes | found.variables):
                self.refuse(f"{func.__qualname__} names {min(seeds)}, and a replay draws on from where the stream is")
            if "swap_tensors" in found.attributes | found.variables:
                self.refuse(f"{func.__qualname__} names swap_tensors, which makes a tensor another without an op")
            self._variables(func, sorted(found.variables))
            self._imports(func, found.imports)
            self.watch(f"defaults of {func.__qualname__}", functools.partial(_defaults_of, func))
            self.attributes(vars(func), name, self.known & vars(func).keys())
            if cells:
                self.watch("around", lambda: [_content(cell) for cell in cells], func.__code__.co_freevars)
        for at, cell in enumerate(cells):
            self.visit(_content(cell), func.__code__.co_freevars[at])
        for default in (func.__defaults__, func.__kwdefaults__, getattr(func, "__wrapped__", None)):
            self.visit(default, f"a default of {name}")

    def _variables(self, func: types.FunctionType, names: list[str]) -> None:
        table = func.__globals__
        self.builtins.update(name for name in names if name not in table)
        if names:
            self.tables.add_entries(func.__module__, table, names)
        for name in names:
            self.visit(table.get(name, vars(builtins).get(name)), name)
        for name in _LOOKING & set(names) - table.keys():
            self.refuse(f"{func.__qualname__} calls {name}, so that nobody can tell which variables it reads")

    def _imports(self, func: types.FunctionType, names: Iterable[str]) -> None:
        """Modules that a function imports itself, at each call: they are read like others."""
        package = func.__globals__.get("__package__")
        for relative in sorted(names):
            name = resolve_name(relative, package) if package or not relative.startswith(".") else relative
            self.watch(f"import of {name}", functools.partial(_module_of, name))
            self.visit(sys.modules.get(name), name)
            self.visit(sys.modules.get(name.partition(".")[0]), name)

    def _method(self, method: types.MethodType, name: str) -> None:
        self.visit(method.__self__, name)
        self.visit(method.__func__, name)

    def _partial(self, part: functools.partial[Any], name: str) -> None:
        for inner in (part.func, part.args, part.keywords):
            self.visit(inner, name)

    def _getter(self, getter: Item, name: str) -> None:
        """`operator.attrgetter` and the like, which have names that no code shows."""
        texts = [text for text in getter.__reduce__()[1] if isinstance(text, str)]
        self.names |= {part for text in texts for part in text.split(".")}

    def _property(self, found: property, name: str) -> None:
        self.visit(found.fget, name)

    def _wrapped(self, found: Item, name: str) -> None:
        self.visit(found.__func__, name)

    def _builtin(self, func: types.BuiltinFunctionType, name: str) -> None:
        if not isinstance(func.__self__, types.ModuleType):
            self.visit(func.__self__, name)

    # -- things -----------------------------------------------------------------------------------------------------
    def _file(self, module: types.ModuleType, name: str) -> None:
        if module is os and self.known & {"environ", "environb", "getenv"}:
            self.visit(os.environ, "os.environ")
        if module is torch:
            for name_of in sorted(self.known & _SETTINGS):
                self.watch(f"torch.{name_of}()", functools.partial(_asked, getattr(torch, name_of)))
        if is_foreign_name(module.__name__):
            self._settings(module, name)
        else:
            self.attributes(vars(module), name)
            if self._takes_all:
                self.watch(name, vars(module).values, vars(module))

    def _settings(self, owner: object, name: str) -> None:
        """Numbers and flags of a module that is not the program's, such as `torch.backends.cudnn.benchmark`."""
        found = {key: setting(owner, key) for key in sorted(self.known) if not key.startswith("__")}
        names = [key for key, value in found.items() if isinstance(value, _PLAIN)]
        if names:
            self.watch(name, lambda: [setting(owner, key) for key in names], names)
        if isinstance(owner, types.ModuleType):
            functions_of(self.tables, owner, self.known)
        for key, value in found.items():
            if isinstance(value, types.ModuleType) or type(value).__module__.startswith("torch.backends"):
                self.visit(value, f"{name}.{key}")
            elif isinstance(value, (list, dict, set)) and self.fits(value, f"{name}.{key}"):
                self.watch(f"{name}.{key}", functools.partial(_held, owner, key))

    def attributes(self, table: Item, name: str, perhaps: Iterable[str] = ()) -> None:
        """The attributes that the code names; some of them may be missing now."""
        self.entries(table, name, {*(self.known & table.keys()), *perhaps} | self._others(table))

    def entries(self, table: Item, name: str, keys: Iterable[str]) -> None:
        """Some attributes, and what they hold."""
        names = sorted(keys)
        if names:
            self.tables.add_entries(name, table, names)
        for attribute in names:
            self.visit(table.get(attribute), f"{name}.{attribute}")

    def _others(self, table: Item) -> set[str]:
        """Attributes that code may make up the names of, beside those that it names: what is no method."""
        if not self._takes_all or "__builtins__" in table:
            return set()
        kinds = (types.FunctionType, staticmethod, classmethod, property)
        return {k for k, v in list(table.items()) if not k.startswith("__") and not isinstance(v, kinds)}

    def _class(self, cls: type, name: str) -> None:
        """A class that code names, so that it may make objects of it."""
        for base in cls.__mro__:
            if not is_foreign(base):
                for key in sorted(_MAKING & vars(base).keys()):
                    self.visit(vars(base)[key], f"{base.__qualname__}.{key}")
        self.kind(cls)

    def kind(self, cls: type) -> None:
        """The class of an object: what its code reads where nobody makes a new one."""
        if not is_foreign(type(cls)):
            self.kind(type(cls))
        own = [base for base in cls.__mro__ if not is_foreign(base)]
        theirs = {name for base in cls.__mro__ if is_foreign(base) for name in vars(base)}
        named = {name for base in own for name in self.known & vars(base).keys()}  # which a class below may get later
        if own:
            self.watch(f"what {cls.__qualname__} inherits", lambda: [cls.__mro__, *(len(vars(base)) for base in own)])
        for base in cls.__mro__:
            if not is_foreign(base):
                self.attributes(vars(base), base.__qualname__, named)
                # operators, descriptors, and what a library's class calls of its own: no code names them
                for key, method in list(vars(base).items()):
                    hidden = (key.startswith("__") or key in theirs) and key not in _SELDOM
                    if hidden and isinstance(method, _METHODS):
                        self.visit(method, f"{base.__qualname__}.{key}")

    def _object(self, item: object, name: str) -> None:
        """An object of a class of the program's: the attributes that the code names. Of Python's own: all."""
        cls, table = type(item), getattr(item, "__dict__", {})
        if is_foreign(cls):
            self._foreign(item, table, name)
            return
        self.objects.append(item)
        self.kind(cls)
        hidden = {key for base in cls.__mro__ if not is_foreign(base) for key in self.known & vars(base).keys()}
        self.attributes(table, name, {*self._perhaps, *(hidden if hasattr(item, "__dict__") else ())})
        if hasattr(item, "__dict__"):
            self.watch(f"the number of attributes of {name}", lambda: (len(table),))
        slots = [s for base in cls.__mro__ for s in _slots(base) if s in self.known]
        if slots:
            self.watch(name, lambda: [getattr(item, slot, None) for slot in slots], slots)
        for slot in slots:
            self.visit(getattr(item, slot, None), f"{name}.{slot}")

    def _foreign(self, item: object, table: dict[str, Any], name: str) -> None:
        top = type(item).__module__.partition(".")[0]
        self.visit(table.get("__wrapped__"), name)
        if isinstance(item, type(os.environ)):
            self.watch(name, lambda: [*item, *item.values()])
            return
        if type(item).__module__.startswith("torch.backends"):
            self._settings(item, name)
        if top in sys.stdlib_module_names and table:
            self._dict(table, name)
        elif top == "torch":
            torchs.of_object(self, item, name)

    def _dict(self, table: dict[Any, Any], name: str) -> None:
        if self.fits(table, name):
            self.watch(name, lambda: [*table, *table.values()])
            for key, value in list(table.items()):
                self.visit(key, f"a key of {name}")
                self.visit(value, f"{name}[{key!r:.30}]")

    def _sequence(self, items: Item, name: str) -> None:
        if self.fits(items, name):
            if not isinstance(items, tuple):
                self.watch(name, lambda: items)
            for item in items:
                self.visit(item, f"an entry of {name}")

    def _set(self, items: set[Any], name: str) -> None:
        if self.fits(items, name):
            self.watch(name, lambda: (frozenset(items),))
            for item in items:
                self.visit(item, f"an entry of {name}")

    def fits(self, items: Values, name: str) -> bool:
        if len(items) > _MOST:
            self.refuse(
                f"{name} has {len(items)} entries, too many to compare: pass what is needed of it as an argument"
            )
        return len(items) <= _MOST


_KINDS: list[tuple[Any, Callable[[_Walk, Any, str], None]]] = [
    (torch.Tensor, torchs.of_tensor),
    (torch.nn.Module, torchs.of_module),
    (types.FunctionType, _Walk._function),
    (types.MethodType, _Walk._method),
    (types.BuiltinFunctionType, _Walk._builtin),
    (types.ModuleType, _Walk._file),
    (functools.partial, _Walk._partial),
    ((operator.attrgetter, operator.methodcaller), _Walk._getter),
    (property, _Walk._property),
    ((staticmethod, classmethod), _Walk._wrapped),
    (torch.optim.Optimizer, torchs.of_optimizer),
    (LRScheduler, torchs.of_scheduler),
    (np.ndarray, values.of_array),
    ((random.Random, np.random.Generator, np.random.RandomState), values.of_stream),
    (torch.Generator, values.of_generator),
    (type(threading.Lock()), values.of_lock),
    (type, _Walk._class),
    (weakref.ref, values.behind_reference),
    (contextvars.ContextVar, values.of_context),
    (type(functools.cache(len)), values.of_cache),
    (logging.Logger, values.of_logger),
]
# kinds of which the program's own classes are looked at with the rest
_LOOKED_AT = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, type)
_CONTAINERS: list[tuple[Any, Callable[[_Walk, Any, str], None]]] = [
    ((dict, types.MappingProxyType), _Walk._dict),
    ((list, tuple, deque), _Walk._sequence),
    (set, _Walk._set),
]


def _slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _defaults_of(func: types.FunctionType) -> Values:
    """The code of a function and its defaults; those by keyword one by one, so that an equal dict is the same."""
    named = func.__kwdefaults__ or {}
    return [func.__code__, func.__defaults__, *named, *named.values()]


_NOTHING = "nothing yet"


def _content(cell: types.CellType) -> Item:
    try:
        return cell.cell_contents
    except ValueError:  # empty still
        return _NOTHING


def _module_of(name: str) -> tuple[object]:
    return (sys.modules.get(name),)


def _held(owner: object, key: str) -> Values:
    """What is in a list or a dict of a library's module."""
    found: Item = setting(owner, key)
    return [*found, *found.values()] if isinstance(found, dict) else [*found] if found else ()


def _asked(setting: Callable[[], object]) -> tuple[object]:
    return (setting(),)
