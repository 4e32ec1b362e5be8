"""Caches that belong to a mesh: what was worked out for its layouts goes when nobody uses the mesh any more."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from shardwise.caches import CacheInfo, register_cache
from shardwise.layout.layout import Layout

T = TypeVar("T")
_count = itertools.count()


class cached_on_mesh(Generic[T]):
    """A function of a layout and other hashable arguments, with a bounded cache on the layout's mesh.

    A table for all meshes would keep them, and everything made for them, for good.
    """

    def __init__(self, name: str, maxsize: int, func: Callable[..., T]) -> None:
        self.func, self.maxsize = func, maxsize
        self._key = f"_cache_{next(_count)}"
        self._tables: weakref.WeakSet[Any] = weakref.WeakSet()
        functools.update_wrapper(self, func)
        register_cache(name, self.cache_info, self.cache_clear)

    def __call__(self, layout: Layout, *args: Hashable, **kwargs: Hashable) -> T:
        table = layout.mesh.__dict__.get(self._key)
        if table is None:
            table = layout.mesh.__dict__.setdefault(self._key, functools.lru_cache(self.maxsize)(self.func))
            self._tables.add(table)
        return table(layout, *args, **kwargs)

    def _infos(self) -> Iterator[CacheInfo]:
        return (table.cache_info() for table in list(self._tables))

    def cache_info(self) -> CacheInfo:
        """The figures of all meshes together."""
        hits, misses, _, size = map(
            sum, zip((0, 0, 0, 0), *((i[0], i[1], 0, i[3]) for i in self._infos()), strict=True)
        )
        return CacheInfo(hits, misses, self.maxsize, size)

    def cache_clear(self) -> None:
        for table in list(self._tables):
            table.cache_clear()
