"""Values that a captured function may read which are no code: memory, streams of random numbers, what stands behind
references and variables of a context. Each is compared at every call, or keeps the call from being repeated."""

from __future__ import annotations

import contextvars
import decimal
import functools
import gc
import logging
import os
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch

from shardwise.captures.readings import Tables, Values
from shardwise.protocols import Item

_STATES = frozenset({"getstate", "get_state", "bit_generator"})  # attributes of streams that every draw changes
_NOTHING = "nothing yet"


class Walk(Protocol):
    """What is told of a value."""

    known: frozenset[str]  # attributes that the code names
    libraries: set[str]
    streams: list[Any]
    tables: Tables
    empty: list[dict[Any, Any]]
    modules: list[torch.nn.Module]
    tensors: list[torch.Tensor]

    def entries(self, table: Item, name: str, keys: Iterable[str]) -> None: ...
    def kind(self, cls: type) -> None: ...
    def watch(self, name: str, read: Callable[[], Values], labels: Iterable[str] = ()) -> None: ...
    def visit(self, item: Item, name: str) -> None: ...
    def refuse(self, reason: str) -> None: ...
    def fits(self, items: Values, name: str) -> bool: ...


def behind_reference(walk: Walk, found: weakref.ref[Any], name: str) -> None:
    walk.watch(name, lambda: (found(),))
    walk.visit(found(), name)


def of_context(walk: Walk, variable: contextvars.ContextVar[Any], name: str) -> None:
    walk.watch(name, lambda: (_in_context(variable),))
    walk.visit(_in_context(variable), name)


def _in_context(variable: contextvars.ContextVar[Any]) -> object:
    try:
        return variable.get()  # with a default of `get`, the variable's own would not be seen
    except LookupError:
        return _NOTHING


def has_memory(item: Item) -> bool:
    """Whether Python can see the bytes of an object, and they may change: through another view, if not through this."""
    try:
        return isinstance(item, memoryview) or not memoryview(item).readonly
    except TypeError:
        return False


def of_memory(walk: Walk, item: Item, name: str) -> None:
    """Something whose bytes Python can see: a bytearray, an array, a number of C."""
    if walk.fits(memoryview(item).cast("B"), name):
        walk.watch(name, lambda: (bytes(memoryview(item)),))


def of_array(walk: Walk, items: np.ndarray[Any, Any], name: str) -> None:
    if walk.fits(items.reshape(-1), name):
        walk.watch(name, lambda: (items.shape, items.dtype.str, items.tobytes()))
        for item in items.reshape(-1).tolist() if items.dtype.hasobject else ():
            walk.visit(item, f"an entry of {name}")


def of_lock(walk: Walk, item: Item, name: str) -> None:
    if walk.known & {"locked", "acquire"}:
        walk.watch(f"whether {name} is locked", lambda: (item.locked(),))


_LIBRARIES: dict[str, Callable[[], Values]] = {  # what their functions look up: how they round, warn, print
    "decimal": lambda: (repr(decimal.getcontext()),),
    "numpy": lambda: [*np.geterr().values(), *np.get_printoptions().values()],
    "warnings": lambda: warnings.filters,
}
# functions of Python's library that look at the environment of the process
_OF_ENVIRONMENT = frozenset({"expanduser", "expandvars", "home", "gettempdir", "which", "getuser", "get_terminal_size"})


def of_library(walk: Walk, item: Item) -> None:
    """The settings of the library that an object, a function or a module is of."""
    named = item if isinstance(item, (types.FunctionType, types.BuiltinFunctionType, type)) else type(item)
    module = item.__name__ if isinstance(item, types.ModuleType) else named.__module__
    library = (module or "").partition(".")[0].lstrip("_")
    if library in walk.libraries:
        return
    walk.libraries.add(library)
    if library in _LIBRARIES:
        walk.watch(f"the settings of {library}", _LIBRARIES[library])
    if library == "logging" and "getLogger" in walk.known:
        walk.watch("the levels of all loggers", _levels)
    if walk.known & _OF_ENVIRONMENT:
        walk.visit(os.environ, "os.environ")


def _levels() -> Values:
    manager = logging.Logger.manager
    known = (logger for logger in list(manager.loggerDict.values()) if isinstance(logger, logging.Logger))
    return [manager.disable, *(value for logger in (manager.root, *known) for value in (logger.level, logger.disabled))]


def of_logger(walk: Walk, logger: logging.Logger, name: str) -> None:
    """What a logger answers. Where its lines go is nobody's matter: replays write none."""
    walk.watch(f"the level of {name}", functools.partial(_level_of, logger))


def _level_of(logger: logging.Logger) -> Values:
    found: list[object] = [logger.manager.disable]
    above: logging.Logger | None = logger
    while above is not None:
        found += [above.level, above.disabled, above.propagate, *above.filters, *above.handlers]
        above = above.parent
    return found


def of_cache(walk: Walk, cached: Item, name: str) -> None:
    """A function that keeps what it gave: somebody may have it forget. Python shows its entries to nobody else."""
    kept = next(found for found in gc.get_referents(cached) if type(found) is dict and found is not vars(cached))
    if walk.fits(kept, f"the cache of {name}"):
        walk.watch(f"the cache of {name}", kept.values)
    if "cache_info" in walk.known:
        walk.watch(f"how often {name} was asked", cached.cache_info)
    walk.visit(cached.__wrapped__, name)


# -- random numbers -------------------------------------------------------------------------------------------------
def of_stream(walk: Walk, source: Item, name: str) -> None:
    walk.streams.append(source)
    _ask(walk, name)


def of_generator(walk: Walk, source: torch.Generator, name: str) -> None:
    if "initial_seed" in walk.known:
        walk.watch(f"the seed of {name}", lambda: (source.initial_seed(),))
    _ask(walk, name)


def _ask(walk: Walk, name: str) -> None:
    if asked := walk.known & _STATES:
        walk.refuse(f"{min(asked)} of {name} is another after each draw: ask outside and pass what it gives")


def state_of(source: Item) -> str:
    """The state of a stream of random numbers that is not torch's."""
    if source is np.random or isinstance(source, np.random.RandomState):
        return repr([part.tobytes() if isinstance(part, np.ndarray) else part for part in source.get_state()])
    if isinstance(source, np.random.Generator):
        return repr(source.bit_generator.state)
    return repr(source.getstate())
