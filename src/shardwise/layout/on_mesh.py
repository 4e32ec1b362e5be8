"""Caches that belong to a mesh, so that they are freed together with it."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from shardwise.caches import CacheInfo, register_cache
from shardwise.layout.layout import Layout

T = TypeVar("T")
_count = itertools.count()


def cached_on_mesh(name: str, maxsize: int, func: Callable[..., T]) -> Callable[..., T]:
    """A function of a layout and other hashable arguments, with a bounded cache on the layout's mesh.

    One cache for all meshes would keep every mesh alive, and all that was computed for it.
    """
    key = f"_cache_{next(_count)}"  # of the table among the attributes of a mesh
    tables: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(func)
    def cached(layout: Layout, *args: Hashable, **kwargs: Hashable) -> T:
        table = layout.mesh.__dict__.get(key)
        if table is None:
            table = layout.mesh.__dict__.setdefault(key, functools.lru_cache(maxsize)(func))
            tables.add(table)
        return table(layout, *args, **kwargs)

    def info() -> CacheInfo:
        """The figures of all meshes together."""
        found = [table.cache_info() for table in list(tables)]
        return CacheInfo(sum(i.hits for i in found), sum(i.misses for i in found), maxsize, sum(i[3] for i in found))

    def clear() -> None:
        for table in list(tables):
            table.cache_clear()

    register_cache(name, info, clear)
    return cached
