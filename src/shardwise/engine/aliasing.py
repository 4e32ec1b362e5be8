"""Views that had to be copied. In torch a view shares memory with its base; where a view op had to move data, it
cannot. Reading such a copy is right until its base is written: from then on using it raises. So does writing to it.

Nothing is kept, and nothing costs, until the first such copy is made.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.errors import RuleError


class _Copy(NamedTuple):
    tensor: weakref.ref[Any]
    name: str
    base: int  # the storage of what it is a copy of
    kept: Any  # a weak reference to that storage: its address must not be given to another


_of_base: dict[int, list[_Copy]] = {}  # by the storage the view would have shared
COPIES: dict[int, list[_Copy]] = {}  # by the storage the copy has; empty in nearly every program


def _storage(tensor: Any) -> int:
    return tensor._layout.mesh.comm.first(tensor._local).untyped_storage()._cdata


def shares_memory(one: Any, other: Any) -> bool:
    return _storage(one) == _storage(other)


def note_copy(base: Any, copy: Any, name: str) -> None:
    """`copy` is what `name` made of `base`; torch would have made it a view."""
    origin = _storage(base)
    kept = StorageWeakRef(base._layout.mesh.comm.first(base._local).untyped_storage())
    _note(copy, name, *next(((c.base, c.kept) for c in COPIES.get(origin, ())), (origin, kept)))


def note_view(base: Any, view: Any) -> None:
    """`view` shares memory with `base`: a view of a copy is one more copy."""
    for copy in COPIES.get(_storage(base), ())[:1]:
        _note(view, copy.name, copy.base, copy.kept)


def _note(copy: Any, name: str, base: int, kept: Any) -> None:
    for table, key in ((_of_base, base), (COPIES, _storage(copy))):
        ref = weakref.ref(copy, functools.partial(_forget, table, key))
        table.setdefault(key, []).append(_Copy(ref, name, base, kept))


def _forget(table: dict[int, list[_Copy]], key: int, _: Any) -> None:
    alive = [copy for copy in table.get(key, ()) if copy.tensor() is not None]
    if alive:
        table[key] = alive
    else:
        table.pop(key, None)


def before_write(target: Any, op: str) -> None:
    """Raise if `target` is such a copy: its base would not see the write."""
    if COPIES:
        for copy in COPIES.get(_storage(target), ()):
            if copy.tensor() is not None:
                raise RuleError(
                    f"{op} would write to the result of {copy.name} of shape {tuple(target.shape)}. In torch it is a "
                    f"view; on this layout it had to be a copy, so its base would not see the write. Write to its "
                    f".clone(), or redistribute the base so that {copy.name} moves nothing"
                )


def after_write(target: Any) -> None:
    """Copies of views of `target` no longer show what it holds: make their next use raise."""
    if _of_base:
        for copy in _of_base.pop(_storage(target), ()):
            tensor = copy.tensor()
            if tensor is not None:
                tensor._layout = _Stale(copy.name)


class _Stale:
    """Stands in for the layout of a copied view whose base was written: no plan knows it, and asking it raises."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, attribute: str) -> Any:
        name = self.__dict__["name"]
        raise RuleError(
            f"the result of {name} is used after its base was written in place. In torch it is a view and would show "
            f"the write; on this layout it had to be a copy. Take it again after the write, or .clone() it before"
        )
