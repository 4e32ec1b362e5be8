"""Sets of indices as sorted, disjoint, merged intervals; and how a set is cut into parts. Integers only.

A *split* deals the indices [0, n) of one dim to the coordinates of an axis. What a coordinate gets is always a set,
stored in ascending order, so chunk, explicit sizes, strided and several-pieces splits are the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]


def normalize(intervals: Iterable[Sequence[int]]) -> Intervals:
    """Sorted, merged, without empty ones.

    >>> normalize([(5, 7), (0, 2), (2, 4), (9, 9)])
    ((0, 4), (5, 7))
    """
    merged: list[Interval] = []
    for start, stop in sorted((int(a), int(b)) for a, b in intervals):
        if start >= stop:
            continue
        if merged and merged[-1][1] >= start:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def count(intervals: Intervals) -> int:
    if len(intervals) == 1:  # nearly always
        return intervals[0][1] - intervals[0][0]
    return sum(stop - start for start, stop in intervals)


def chunk_size(n: int, parts: int) -> int:
    """The size of a full part of ``torch.chunk``."""
    return -(-n // parts)


def chunk_bounds(n: int, parts: int, i: int) -> Interval:
    """What ``torch.chunk`` gives part `i`: full parts of ceil(n / parts), then a shorter one, then nothing.

    >>> [chunk_bounds(5, 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = chunk_size(n, parts)
    return min(i * size, n), min((i + 1) * size, n)


@lru_cache(maxsize=1024)
def chunk_pieces(n: int, parts: int) -> tuple[Intervals, ...]:
    return tuple(normalize([chunk_bounds(n, parts, i)]) for i in range(parts))


def sizes_to_pieces(sizes: Sequence[int]) -> tuple[Intervals, ...]:
    """
    >>> sizes_to_pieces((2, 0, 1))
    (((0, 2),), (), ((2, 3),))
    """
    out, start = [], 0
    for size in sizes:
        out.append(((start, start + size),) if size else ())
        start += size
    return tuple(out)


def compose(parent: Intervals, child: Intervals) -> Intervals:
    """The indices of `parent` at the positions `child`.

    >>> compose(((10, 13), (20, 25)), ((1, 5),))
    ((11, 13), (20, 22))
    """
    if len(parent) == 1:
        base = parent[0][0]
        return tuple((base + a, base + b) for a, b in child)
    out, position, i = [], 0, 0
    for start, stop in child:
        while i < len(parent) and position + parent[i][1] - parent[i][0] <= start:
            position += parent[i][1] - parent[i][0]
            i += 1
        j, at = i, position
        while j < len(parent) and at < stop:
            a, b = parent[j]
            out.append((a + max(start - at, 0), min(b, a + stop - at)))
            at += b - a
            j += 1
    return normalize(out)


def positions(parent: Intervals, subset: Intervals) -> Intervals:
    """Where the indices of `subset` stand in `parent`: the inverse of `compose`.

    >>> positions(((10, 13), (20, 25)), ((11, 13), (20, 22)))
    ((1, 5),)
    """
    out, at, j = [], 0, 0
    for a, b in parent:
        while j < len(subset) and subset[j][1] <= a:
            j += 1
        k = j
        while k < len(subset) and subset[k][0] < b:
            start, stop = max(a, subset[k][0]), min(b, subset[k][1])
            out.append((at + start - a, at + stop - a))
            k += 1
        at += b - a
    return normalize(out)


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """
    >>> intersect(((0, 4), (6, 9)), ((2, 7),))
    ((2, 4), (6, 7))
    """
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            out.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def shift(intervals: Intervals, by: int) -> Intervals:
    return tuple((a + by, b + by) for a, b in intervals)


def repeat(intervals: Intervals, step: int, times: int) -> Intervals:
    """The same set in each of `times` blocks of `step` indices.

    >>> repeat(((0, 2),), 5, 3)
    ((0, 2), (5, 7), (10, 12))
    """
    return normalize((a + i * step, b + i * step) for i in range(times) for a, b in intervals)


def is_contiguous(intervals: Intervals) -> bool:
    return len(intervals) <= 1
