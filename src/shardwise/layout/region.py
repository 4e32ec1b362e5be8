"""A region of a tensor: for each dim a set of positions. What it measures, how it is cut, and where it lies in memory.

A rank's part of a layout is one region of global indices; what one rank sends to another is one region of positions in
the sender's tensor and one of positions in the receiver's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwise.layout.shapes import contiguous_stride
from shardwise.layout.split import Intervals, compose, count, is_contiguous, normalize, positions

Region = tuple[Intervals, ...]


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(map(count, region))


def region_size(region: Region) -> int:
    """How many elements it has."""
    return math.prod(map(count, region))


def whole_region(shape: Sequence[int]) -> Region:
    """All of a tensor of this shape."""
    return tuple(((0, n),) if n else () for n in shape)


def within(outer: Region, inner: Region) -> Region:
    """Where the indices of `inner` stand in a tensor that holds the indices of `outer`.

    >>> within((((4, 8),),), (((5, 7),),))
    (((1, 3),),)
    """
    return tuple(map(positions, outer, inner))


def smallest_around(regions: Iterable[Region]) -> Region:
    """The smallest region that contains all of these."""
    return tuple(normalize(itertools.chain.from_iterable(sides)) for sides in zip(*regions, strict=True))


def cut_region(region: Region, parts: int, i: int) -> Region:
    """Part `i` of `parts` equal parts of a region. It is cut along its first side that is long enough, else along its
    longest. The parts depend on the lengths of the sides only, so sender and receiver get the same ones; the parts of a
    whole tensor are contiguous in memory.
    """
    if parts == 1 or not region:
        return region if i == 0 else tuple(() for _ in region)
    sizes = region_shape(region)
    dim = next((d for d, n in enumerate(sizes) if n >= parts), sizes.index(max(sizes)))
    start, stop = sizes[dim] * i // parts, sizes[dim] * (i + 1) // parts
    part = compose(region[dim], ((start, stop),)) if start < stop else ()
    return (*region[:dim], part, *region[dim + 1 :])


def stacked_along(shape: Sequence[int], regions: Sequence[Region]) -> int | None:
    """The one dim along which these regions of a tensor follow each other, if they do."""
    if len(regions) < 2:
        return None
    cut = {dim for region in regions for dim, side in enumerate(region) if side != ((0, shape[dim]),)}
    if len(cut) != 1:
        return None
    dim = cut.pop()
    sides = [region[dim] for region in regions]
    follow = all(map(is_contiguous, sides)) and all(a[-1][1] == b[0][0] for a, b in itertools.pairwise(sides))
    return dim if follow else None


# -- in memory ---------------------------------------------------------------------------------------------
class View(NamedTuple):
    """Elements of a contiguous tensor, as torch.as_strided takes them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


def view_of(region: Region, shape: Sequence[int]) -> View | None:
    """How to see this region of a contiguous tensor of this shape; None where a side is not one interval."""
    stride, start = contiguous_stride(shape), 0
    for side, step in zip(region, stride, strict=True):
        if len(side) > 1:
            return None
        start += side[0][0] * step if side else 0
    return View(region_shape(region), stride, start)


def box_at(start: int, sizes: Sequence[int], shape: Sequence[int]) -> Region:
    """The region of these sizes whose first element is number `start` of a contiguous tensor of this shape.

    >>> box_at(5, (1, 2), (3, 4))
    (((1, 2),), ((1, 3),))
    """
    sides = []
    for step, n in zip(contiguous_stride(shape), sizes, strict=True):
        low, start = divmod(start, step)
        sides.append(((low, low + n),))
    return tuple(sides)


def run_start(region: Region, shape: Sequence[int]) -> int | None:
    """Where a region of a contiguous tensor of this shape begins in memory; None unless it is contiguous there."""
    start, stride, whole = 0, 1, True
    for side, n in zip(reversed(region), reversed(shape), strict=True):
        if len(side) != 1:
            return None if side else 0
        a, b = side[0]
        if not whole and b - a != 1:
            return None
        start, stride, whole = start + a * stride, stride * n, whole and b - a == n
    return start
