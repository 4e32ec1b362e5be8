"""What a function may read of the Python around it: found before it runs, by the names in its code.

From the function the walk goes on to closures, global variables, attributes of objects, containers, modules with all
their children, and to the code of functions that are named on the way. Code of torch, of the package and of Python's
own library is not read, but what is handed to it is: so what is left out are values that such code keeps to itself.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.captures import values, walk_code, walk_objects, walk_torch
from shardwise.captures.foreign import builtins_of, code_of_modules, methods_of_tensors
from shardwise.captures.walk import Walk
from shardwise.protocols import Item
from shardwise.torch_private.tensors import tensor_number

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
            walk = Walk(_look, names, perhaps, is_wide)
            for root in roots:
                walk.visit(root, getattr(root, "__qualname__", type(root).__name__))
            if walk.names <= names and walk.perhaps <= perhaps and walk.is_wide <= is_wide:
                break
            names, perhaps = names | walk.names | walk.perhaps, perhaps | walk.perhaps
            is_wide = is_wide or walk.is_wide
        _watch_together(walk)
        self._tables, self._readings, self._empty = walk.tables, walk.readings, walk.empty
        self._memory = list(map(_memory_of, walk.tensors))
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
        """Whether a tensor was made another without an op; empty if none was. To be asked right after the call."""
        if list(map(_memory_of, self.tensors)) != self._memory:
            return "a tensor is swapped with another (torch.utils.swap_tensors), which no op shows"
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


_KINDS: list[tuple[Any, Callable[[Walk, Any, str], None]]] = [
    (torch.Tensor, walk_torch.of_tensor),
    (torch.nn.Module, walk_torch.of_module),
    (types.FunctionType, walk_code.of_function),
    (types.MethodType, walk_code.of_method),
    (types.BuiltinFunctionType, walk_code.of_builtin),
    (types.ModuleType, walk_objects.of_python_module),
    (functools.partial, walk_code.of_partial),
    ((operator.attrgetter, operator.methodcaller), walk_code.of_getter),
    (property, walk_code.of_property),
    ((staticmethod, classmethod), walk_code.of_wrapped),
    (torch.optim.Optimizer, walk_torch.of_optimizer),
    (LRScheduler, walk_torch.of_scheduler),
    (np.ndarray, values.of_array),
    ((random.Random, np.random.Generator, np.random.RandomState), values.of_stream),
    (torch.Generator, values.of_generator),
    (type(threading.Lock()), values.of_lock),
    (type, walk_objects.of_class),
    (weakref.ref, values.behind_reference),
    (contextvars.ContextVar, values.of_context),
]
_CONTAINERS: list[tuple[Any, Callable[[Walk, Any, str], None]]] = [
    ((dict, types.MappingProxyType), walk_objects.of_dict),
    ((list, tuple, deque), walk_objects.of_sequence),
    (set, walk_objects.of_set),
]


def _look(walk: Walk, item: Item, name: str) -> None:
    """What a walk does with an object that it comes by."""
    for kind, look in _KINDS:
        if isinstance(item, kind):
            look(walk, item, name)
            return
    if hasattr(type(item), "__next__"):
        walk.refuse(f"{name} is an iterator, {item!r:.60}: take from it outside and pass what it gives")
        return
    for kind, look in _CONTAINERS:
        if isinstance(item, kind):
            look(walk, item, name)
    if values.has_memory(item):
        values.of_memory(walk, item, name)
    walk_objects.of_object(walk, item, name)


def _watch_together(walk: Walk) -> None:
    """At the end of a walk, watch what all that it found has in common: classes, and functions that a program may
    replace."""
    together = [*walk.modules, *walk.objects]
    if together:
        walk.watch("the class of an object", lambda: list(map(type, together)))
    builtins_of(walk.tables, walk.builtins)
    methods_of_tensors(walk.tables, walk.known)
    code_of_modules(walk.tables, set(map(type, walk.modules)))
    walk.tables.note()
