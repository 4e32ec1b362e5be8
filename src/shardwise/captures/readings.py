"""Values in one place of a Python program, and what they were when a call was written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, frozenset)


_SIMPLE = frozenset(SIMPLE)


def is_simple(value: object) -> bool:
    """Whether a value is all that can be read of it: an object of a class that a program has made of `float` or `str`
    may have attributes."""
    kind = type(value)
    return kind in _SIMPLE or (isinstance(value, SIMPLE) and kind.__module__.partition(".")[0] in ("numpy", "torch"))


class Values(Sized, Iterable[object], Protocol):
    """What a reading reads."""


class Reading:
    """Values that are read anew whenever it is asked whether they are still the same.

    Numbers and strings are the same if they are equal, anything else if it is the same object.
    """

    __slots__ = ("_known", "_labels", "_name", "_read")

    def __init__(self, name: str, read: Callable[[], Values], labels: Iterable[str] = ()) -> None:
        self._name, self._read, self._labels = name, read, labels
        self._known: Sequence[object] = tuple(read())

    def changed(self) -> str:
        """What is another than it was; empty if nothing is."""
        now, known = self._read(), self._known
        if len(now) == len(known) and all(map(is_, now, known)):
            return ""
        return self._difference(tuple(now))

    def _difference(self, now: Sequence[object]) -> str:
        if len(now) != len(self._known):
            return f"{self._name}: {len(self._known)} entries became {len(now)}"
        for at, (before, after) in enumerate(zip(self._known, now, strict=True)):
            if before is not after and not are_equal(before, after):
                label = next(iter([*self._labels][at:]), "")
                return f"{self._name}{'.' * bool(label)}{label}: {_in_words(before)} became {_in_words(after)}"
        self._known = now  # equal numbers that are new objects: the quick way from now on
        return ""


class Tables:
    """Dicts that are compared all at once, without a step of Python's per dict: whole ones, and some entries of others.

    Every replay asks, of some hundred dicts. Only where something is another object is each of them asked by itself.
    """

    def __init__(self) -> None:
        self._readings: list[Reading] = []
        self._whole: list[Values] = []  # views, which show what a dict has now
        self._lengths: list[int] = []
        self._gets: list[Callable[[str], object]] = []
        self._names: list[Sequence[str]] = []
        self._known: tuple[object, ...] = ()

    def add(self, name: str, table: Mapping[Any, object]) -> None:
        """All values of a dict must stay."""
        self._readings.append(Reading(name, table.values, table.keys()))
        self._whole.append(table.values())

    def add_entries(self, name: str, table: Mapping[Any, object], names: Sequence[str]) -> None:
        """Some entries of a dict, which may be missing, must stay."""
        get = table.get
        self._readings.append(Reading(name, lambda: list(map(get, names)), names))
        self._gets.append(get)
        self._names.append(names)

    def _values(self) -> Iterable[object]:
        return chain(chain.from_iterable(self._whole), chain.from_iterable(map(map, self._gets, self._names)))

    def note(self) -> None:
        """Take what there is now as what must stay."""
        self._lengths, self._known = list(map(len, self._whole)), tuple(self._values())

    def changed(self) -> str:
        """What is another than it was; empty if nothing is."""
        if list(map(len, self._whole)) == self._lengths and all(map(is_, self._values(), self._known)):
            return ""
        for reading in self._readings:
            reason = reading.changed()
            if reason:
                return reason
        self.note()  # equal numbers that are new objects: the quick way from now on
        return ""


def _in_words(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60}" if isinstance(value, (*SIMPLE, tuple)) else f"an object of {type(value).__name__}"


def are_equal(one: object, other: object) -> bool:
    """Whether two values are the same number, string or tuple of such: 1, 1.0 and True differ, so do 0.0 and -0.0."""
    if type(one) is not type(other):
        return False
    if type(one) is tuple and isinstance(other, tuple):
        return len(one) == len(other) and all(a is b or are_equal(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float) and is_simple(one):
        return one.hex() == other.hex()
    if isinstance(one, complex) and is_simple(one):
        return repr(one) == repr(other)
    return is_simple(one) and one == other
