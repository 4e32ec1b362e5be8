"""Values inside of arguments and results: pytrees, and dataclasses, which torch's pytrees take for single values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch.utils._pytree import tree_leaves, tree_map

T = TypeVar("T")


def values_in(tree: object) -> Iterator[object]:
    """All values, those in the fields of dataclasses too."""
    for value in tree_leaves(tree):
        if _is_record(value):
            yield from values_in([getattr(value, field.name, None) for field in dataclasses.fields(value)])
        else:
            yield value


def changed_in(tree: T, change: Callable[[object], object]) -> T:
    """The same with every value changed. A dataclass in which nothing changes is the same object."""

    def of(value: object) -> object:
        return _changed_record(value, change) if _is_record(value) else change(value)

    return tree_map(of, tree)


def _changed_record(record: object, change: Callable[[object], object]) -> object:
    before = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if hasattr(record, f.name)}  # type: ignore[arg-type]
    after = {name: changed_in(value, change) for name, value in before.items()}
    if all(a is b for a, b in zip(values_in(before), values_in(after), strict=True)):
        return record
    made = copy.copy(record)
    for name, value in after.items():
        try:
            setattr(made, name, value)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(made, name, value)
    return made


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
