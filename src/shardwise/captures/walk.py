"""One walk over the Python that a function may read: what it has come by, and what must be compared at each call."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.captures.outside import asked_by
from shardwise.captures.readings import SIMPLE, Reading, Tables, Values
from shardwise.protocols import Item

_MOST = 10_000  # entries of a container that are compared at each call


class Walk:
    """One walk, with the names of attributes that are known before it.

    Args:
        look: What is done with an object that the walk comes by, by its kind.
        names: The attributes that the code is known to read.
        perhaps: Attributes that may be missing from objects, but that the code may read.
        takes_all: Whether code asks for attributes by names that it makes up, so that all of them count.
    """

    def __init__(
        self, look: Callable[[Walk, Item, str], None], names: frozenset[str], perhaps: frozenset[str], takes_all: bool
    ) -> None:
        self._look, self.known, self.known_perhaps, self.takes_all = look, names, sorted(perhaps), takes_all
        self.names: set[str] = set()  # these three are found on this walk, for the next one
        self.perhaps: set[str] = set()
        self.is_wide = False  # whether code asks for attributes by names that it makes up
        self.tables = Tables()
        self.readings: list[Reading] = []
        self.empty: list[dict[Any, Any]] = []  # of hooks, parameters, ...: nobody must add any
        self.builtins: set[str] = set()  # functions of Python that code names
        self.modules: list[torch.nn.Module] = []
        self.objects: list[object] = []  # of the program's classes
        self.tensors: list[torch.Tensor] = []
        self.streams: list[Any] = []  # of random numbers, those of torch left out
        self.alive: dict[int, object] = {}
        self.refused = ""

    def visit(self, item: Item, name: str) -> None:
        """Look at an object, once."""
        if isinstance(item, frozenset):
            for each in item:
                self.visit(each, f"an entry of {name}")
        if isinstance(item, SIMPLE) or id(item) in self.alive:
            return
        self.alive[id(item)] = item
        if not isinstance(item, types.ModuleType):  # of these, the same function must name both
            self.ask(item, self.known)
        self._look(self, item, name)

    def refuse(self, reason: str) -> None:
        """Keep the call from being repeated; the first reason counts."""
        self.refused = self.refused or reason

    def watch(self, name: str, read: Callable[[], Values], labels: Iterable[str] = ()) -> None:
        """Have these values compared at each call."""
        self.readings.append(Reading(name, read, labels))

    def ask(self, item: object, names: frozenset[str]) -> None:
        """Refuse code that asks an object, by these attributes, for something which no argument shows."""
        if asked := asked_by(item, names):
            self.refuse(f"{asked} may give something else at each call: ask outside and pass what it gives")

    def fits(self, items: Values, name: str) -> bool:
        """Whether a container is small enough to be compared at each call; refused if it is not."""
        if len(items) > _MOST:
            self.refuse(
                f"{name} has {len(items)} entries, too many to compare: pass what is needed of it as an argument"
            )
        return len(items) <= _MOST

    def attributes(self, table: Item, name: str, perhaps: Iterable[str] = ()) -> None:
        """The attributes that the code names; some of them may be missing now."""
        names = sorted({*(self.known & table.keys()), *perhaps} | self._others(table))
        if names:
            self.tables.add_entries(name, table, names)
        for attribute in names:
            self.visit(table.get(attribute), f"{name}.{attribute}")

    def _others(self, table: Item) -> set[str]:
        """Attributes that code may make up the names of, beside those that it names: what is no method."""
        if not self.takes_all or "__builtins__" in table:
            return set()
        kinds = (types.FunctionType, staticmethod, classmethod, property)
        return {k for k, v in list(table.items()) if not k.startswith("__") and not isinstance(v, kinds)}
