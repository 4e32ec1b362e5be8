"""Regions of tensors: taken out, put in, put together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy
import torch

from shardwise.layout.region import Region, stacked_along
from shardwise.layout.split import Intervals, is_contiguous


@lru_cache(maxsize=256)
def _indices(intervals: Intervals) -> numpy.ndarray:
    return numpy.concatenate([numpy.arange(a, b) for a, b in intervals])


def _index(intervals: Intervals, like: torch.Tensor) -> torch.Tensor:
    """A new index tensor. It is not cached: a cached one could have been made in a fake or inference mode."""
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


# -- along all dims ----------------------------------------------------------------------------------------
def pick(x: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of `x` at these positions; a view where each side is one interval."""
    x = _narrowed(x, region)
    for dim, side in enumerate(region):
        if not is_contiguous(side):
            x = _selected(x, dim, side)
    return x


def _narrowed(x: torch.Tensor, region: Region) -> torch.Tensor:
    """`x` narrowed along the sides that are one interval."""
    for dim, side in enumerate(region):
        if is_contiguous(side):
            a, b = side[0] if side else (0, 0)
            if b - a != x.shape[dim]:
                x = x.narrow(dim, a, b - a)
    return x


def place(x: torch.Tensor, region: Region, part: torch.Tensor) -> None:
    """Write `part` to these positions of `x`."""
    broken = [dim for dim, side in enumerate(region) if not is_contiguous(side)]
    view = _narrowed(_bits(x) if broken else x, region)
    part = _bits(part) if broken else part
    if not broken:
        view.copy_(part)
    elif len(broken) == 1:
        view.index_copy_(broken[0], _index(region[broken[0]], view), part)
    else:
        at = [slice(None)] * view.ndim
        for n, dim in enumerate(broken):  # an open grid of positions
            index = _index(region[dim], view)
            at[dim] = index.view(-1, *([1] * (len(broken) - 1 - n)))  # type: ignore[call-overload]
        if broken[-1] - broken[0] == len(broken) - 1:
            view[tuple(at)] = part
        else:  # torch moves scattered index dims to the front
            rest = [dim for dim in range(view.ndim) if dim not in broken]
            view[tuple(at)] = part.permute(*broken, *rest)


def build(shape: Sequence[int], parts: Sequence[tuple[Region, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """A new tensor of this shape from parts that fill it."""
    along = stacked_along(shape, [region for region, _ in parts])
    if along is not None:
        return torch.cat([part for _, part in parts], along)
    out = like.new_empty(shape)
    for region, part in parts:
        place(out, region, part)
    return out
