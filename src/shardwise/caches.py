"""Bounded caches with statistics, in one place so that `cache_info` and `clear_caches` see them all."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple


class CacheInfo(NamedTuple):
    """Like functools' cache_info."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class PlanCache(dict):
    """Plans by call key. A full cache drops its oldest quarter, so the warm path is one plain dict look-up."""

    def __init__(self, maxsize: int) -> None:
        super().__init__()
        self.maxsize, self.hits, self.misses = maxsize, 0, 0

    @classmethod
    def one_of(cls, caches: PlanCaches) -> PlanCache:
        """A new one of several that are seen as one."""
        made = caches.living[next(caches.count)] = cls(caches.maxsize)
        return made

    def add(self, key: Any, plan: Any) -> None:
        self.misses += 1
        if len(self) >= self.maxsize:
            for old in list(self)[: self.maxsize // 4]:
                self.pop(old, None)
        self[key] = plan

    def info(self) -> CacheInfo:
        return CacheInfo(self.hits, self.misses, self.maxsize, len(self))

    def reset(self) -> None:
        self.clear()
        self.hits = self.misses = 0


class PlanCaches:
    """The plan caches of all meshes, seen as one cache. Each lives as long as its mesh."""

    def __init__(self, maxsize: int) -> None:
        self.maxsize, self.count = maxsize, itertools.count()
        self.living: weakref.WeakValueDictionary[int, PlanCache] = weakref.WeakValueDictionary()

    def info(self) -> CacheInfo:
        found = [cache.info() for cache in list(self.living.values())]
        return CacheInfo(
            sum(i.hits for i in found), sum(i.misses for i in found), self.maxsize, sum(map(len, self.living.values()))
        )

    def reset(self) -> None:
        for cache in list(self.living.values()):
            cache.reset()


_caches: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {}


def register_cache(name: str, info: Callable[[], Any], clear: Callable[[], None]) -> None:
    _caches[name] = (info, clear)


def cache_info() -> dict[str, CacheInfo]:
    """Hits, misses and size of every cache, by name."""
    return {name: CacheInfo(*info()) for name, (info, _) in _caches.items()}


def clear_caches() -> None:
    """Forget every cached plan. Never needed for right answers."""
    for _, clear in _caches.values():
        clear()
