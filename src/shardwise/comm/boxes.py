"""Sets of indices on tensors: taking parts out of a tensor and putting parts together."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy
import torch

from shardwise.layout.layout import contiguous_stride
from shardwise.layout.split import Intervals, compose, count, is_contiguous

Box = tuple[Intervals, ...]  # positions in a tensor, dim by dim


@lru_cache(maxsize=256)
def _indices(intervals: Intervals) -> numpy.ndarray:
    return numpy.concatenate([numpy.arange(a, b) for a, b in intervals])


def _index(intervals: Intervals, like: torch.Tensor) -> torch.Tensor:
    """An index tensor, made anew: one kept could come from a fake or inference mode."""
    return torch.as_tensor(_indices(intervals), device=like.device)


_BY_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BITS = {  # dtypes that torch can copy but neither index nor add, and those they travel as
    dtype: _BY_WIDTH[dtype.itemsize]
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and name.startswith(("uint16", "uint32", "uint64", "float8", "complex32"))
}


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory, of a dtype that has index kernels."""
    return x.view(BITS[x.dtype]) if x.dtype in BITS else x


def _selected(x: torch.Tensor, dim: int, intervals: Intervals) -> torch.Tensor:
    found = _bits(x).index_select(dim, _index(intervals, x))
    return found.view(x.dtype) if x.dtype in BITS else found


# -- along one dim -----------------------------------------------------------------------------------------
def take(x: torch.Tensor, dim: int, intervals: Intervals) -> torch.Tensor:
    """A contiguous copy of the indices of `dim` in `intervals`."""
    if is_contiguous(intervals):
        a, b = intervals[0] if intervals else (0, 0)
        return x.narrow(dim, a, b - a).clone(memory_format=torch.contiguous_format)
    return _selected(x, dim, intervals)


def put_together(parts: Sequence[torch.Tensor], dim: int, row: Sequence[Intervals]) -> torch.Tensor:
    """The whole of `dim` from the part each coordinate holds."""
    whole = torch.cat(list(parts), dim)
    order = tuple(interval for part in row for interval in part)
    if all(a[1] <= b[0] for a, b in itertools.pairwise(order)):
        return whole
    out = torch.empty_like(whole)
    _bits(out).index_copy_(dim, _index(order, whole), _bits(whole))
    return out


def add_at(x: torch.Tensor, dim: int, intervals: Intervals, part: torch.Tensor) -> None:
    """Add `part` to the indices of `dim` in `intervals`, in place."""
    if is_contiguous(intervals):
        a, b = intervals[0] if intervals else (0, 0)
        x.narrow(dim, a, b - a).add_(part)
    else:
        x.index_add_(dim, _index(intervals, x), part)


# -- along all dims ----------------------------------------------------------------------------------------
def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(count(side) for side in box)


def cut_box(box: Box, parts: int, i: int) -> Box:
    """Part `i` of a box cut along its first side that is long enough (else its longest): the same part for everyone who
    counts the same indices, and of a whole tensor one run of memory."""
    if parts == 1 or not box:
        return box if i == 0 else tuple(() for _ in box)
    sizes = box_shape(box)
    dim = next((d for d, n in enumerate(sizes) if n >= parts), sizes.index(max(sizes)))
    start, stop = sizes[dim] * i // parts, sizes[dim] * (i + 1) // parts
    part = compose(box[dim], ((start, stop),)) if start < stop else ()
    return (*box[:dim], part, *box[dim + 1 :])


def pick(x: torch.Tensor, box: Box) -> torch.Tensor:
    """What `x` has at these positions: a view where each side is one interval."""
    for dim, side in enumerate(box):
        if is_contiguous(side):
            a, b = side[0] if side else (0, 0)
            if b - a != x.shape[dim]:
                x = x.narrow(dim, a, b - a)
    for dim, side in enumerate(box):
        if not is_contiguous(side):
            x = _selected(x, dim, side)
    return x


class View(NamedTuple):
    """Elements of a contiguous tensor, as torch.as_strided takes them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The view of `x`, which begins where its memory does."""
        return x.as_strided(self.shape, self.stride, self.start)


def view_of(box: Box, shape: Sequence[int]) -> View | None:
    """How to see this box of a contiguous tensor of this shape; None where a side is not one interval."""
    if not all(map(is_contiguous, box)):
        return None
    stride, starts = contiguous_stride(shape), [side[0][0] if side else 0 for side in box]
    return View(box_shape(box), stride, sum(map(operator.mul, starts, stride)))


def place(x: torch.Tensor, box: Box, part: torch.Tensor) -> None:
    """Write `part` to these positions of `x`."""
    broken = [dim for dim, side in enumerate(box) if not is_contiguous(side)]
    view = _bits(x) if broken else x
    part = _bits(part) if broken else part
    for dim, side in enumerate(box):
        if is_contiguous(side):
            a, b = side[0] if side else (0, 0)
            if b - a != view.shape[dim]:
                view = view.narrow(dim, a, b - a)
    if not broken:
        view.copy_(part)
    elif len(broken) == 1:
        view.index_copy_(broken[0], _index(box[broken[0]], view), part)
    else:
        at = [slice(None)] * view.ndim
        for n, dim in enumerate(broken):  # an open grid of positions
            index = _index(box[dim], view)
            at[dim] = index.view(-1, *([1] * (len(broken) - 1 - n)))  # type: ignore[call-overload]
        if broken[-1] - broken[0] == len(broken) - 1:
            view[tuple(at)] = part
        else:  # torch moves scattered index dims to the front
            rest = [dim for dim in range(view.ndim) if dim not in broken]
            view[tuple(at)] = part.permute(*broken, *rest)


def build(shape: Sequence[int], parts: Sequence[tuple[Box, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """A new tensor of this shape from parts that fill it."""
    along = _stacked_along(shape, [box for box, _ in parts])
    if along is not None:
        return torch.cat([part for _, part in parts], along)
    out = like.new_empty(shape)
    for box, part in parts:
        place(out, box, part)
    return out


def _stacked_along(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """The one dim along which the boxes follow each other, if they do."""
    if len(boxes) < 2:
        return None
    cut = {dim for box in boxes for dim, side in enumerate(box) if side != ((0, shape[dim]),)}
    if len(cut) != 1:
        return None
    dim = cut.pop()
    sides = [box[dim] for box in boxes]
    one_after_another = all(is_contiguous(s) for s in sides) and all(
        a[-1][1] == b[0][0] for a, b in itertools.pairwise(sides)
    )
    return dim if one_after_another else None
