"""Results whose sizes depend on the data: nonzero, x[mask], unique, bincount."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, cast

import torch

from shardwise.context import relaxed
from shardwise.layout import Shard
from shardwise.layout.shapes import broadcast_shape, contiguous_stride
from shardwise.strategy import Algorithm, Answer, Named, Operand, Tensor, reduced, run_local, whole
from shardwise.strategy.counted_sizes import chosen_along, in_order, with_counted_size
from shardwise.strategy.memory import contiguous, stored
from shardwise.strategy.program import constant, without_dims
from shardwise.strategy.registry import program, rule
from shardwise.wrapper import restride


# -- where a mask is true ----------------------------------------------------------------------------------
def select_masked(x: Tensor, mask: Tensor, at: int) -> Tensor:
    """x[:, ..., mask], the mask from dim `at` on."""
    return chosen_along(lambda v, m: v[(*(slice(None),) * at, m)], x, mask, at)


@program("masked_select")
def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    shape = broadcast_shape(x.shape, mask.shape) or (1,)
    return select_masked(x.expand(shape), mask.expand(shape), 0)


@program("nonzero argwhere")
def nonzero(x: Tensor, *, as_tuple: bool = False) -> Tensor:
    x = reduced(x.detach().reshape(1) if as_tuple and not x.dim() else x.detach())
    x, lead = in_order(x, range(x.dim()))
    layout, axes = x._layout, x._layout.axes_of(lead)
    starts = lambda coords: tuple(layout.offset_at(d, coords) for d in range(layout.ndim))
    find = lambda v, starts: torch.nonzero(v) + torch.tensor(starts, dtype=torch.int64, device=v.device)
    target = layout.replicated(shape=(0, x.dim()), dtype=torch.int64).placed(dict.fromkeys(axes, Shard(0)))
    out = with_counted_size(run_local(find, [x], target, starts), 0, axes)
    _by_columns(out)
    return out.unbind(1) if as_tuple else out


def _by_columns(out: Tensor) -> None:
    """Torch finds the indices of one dim after those of another. Without any, CUDA reports the strides of one row."""
    restride(out, (1, max(out.shape[0], 1) if out.is_cuda else out.shape[0]))


@program("nonzero_static", knows_memory=True)
def nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    found = torch.nonzero(x)[:size]
    out = cast("Tensor", torch.cat([found, found.new_full((size - found.shape[0], x.dim()), fill_value)]))
    if x.is_cuda:
        _by_columns(out)
    else:
        restride(out, contiguous_stride(out.shape))
    return out


# -- how often ---------------------------------------------------------------------------------------------
@rule("repeat_interleave")
def repeat_interleave(x: Operand, repeats: object = None, dim: Named = None, *, output_size: object = None) -> Answer:
    return None if isinstance(repeats, int) else Algorithm(_repeat)  # a number of times: torch takes it apart


def _repeat(x: Any, repeats: Any = None, dim: Any = None, *, output_size: Any = None) -> Any:
    if repeats is None:  # the indices of x, each as often as x says
        x, repeats = x.new_ones(x.shape).cumsum(0, dtype=x.dtype) - 1, x
    x, d = (x.reshape(-1), 0) if dim is None else (x, dim % x.dim())
    repeats = repeats.expand(x.shape[d]) if repeats.numel() == 1 else repeats
    if repeats.shape[0] != x.shape[d]:
        raise RuntimeError(f"repeats must have the same size as input along dim {d}, but got {repeats.shape[0]}")
    out = chosen_along(lambda v, r: v.repeat_interleave(r, d), x, repeats, d)
    if output_size not in (None, out.shape[d]) and not out._layout.mesh.comm.outlined:
        raise RuntimeError(f"repeat_interleave: output_size is {output_size}, the repeats add up to {out.shape[d]}")
    return out


def _edges(x: Tensor, classes: int = -1) -> tuple[int, int]:
    """The least and the greatest value; on a mesh without values, where the program says how many classes there are,
    those of the first and the last class."""
    with relaxed():  # as in with_counted_size
        edges = x.aminmax()
        if x._layout.mesh.comm.outlined and classes != -1:
            for edge in edges:
                edge.full_tensor()  # ranks with values exchange them
            return 0, classes - 1
        lowest, highest = (int(edge) for edge in edges)
    return lowest, highest


@program("bincount")
def bincount(x: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
    """The largest value on any rank says how many bins there are; the counts of all ranks add up."""
    x = reduced(x)
    lowest, highest = _edges(x) if x.numel() else (0, -1)
    if lowest < 0:
        raise RuntimeError(f"bincount only supports 1-d non-negative integral inputs, got {lowest}")
    size = max(minlength, highest + 1)
    operands = [x] if weights is None else [x, weights.detach().redistribute(placements=x._layout.placements)]
    count: Any = torch.bincount
    few = [torch.zeros(min(x.numel(), 1), dtype=t.dtype) for t in operands]
    dtype = count(*few, minlength=min(minlength, 0)).dtype  # torch raises for a negative one
    target = without_dims(x._layout, (0,), True).replace(shape=(size,), dtype=dtype)
    return run_local(lambda *held: count(*held, minlength=size).to(dtype), operands, target)


stored("one_hot")(contiguous)


@program("one_hot")
def one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """All ranks look at the least and the greatest class of all, and raise as torch does on one device."""
    if x.dtype != torch.int64:
        raise RuntimeError(f"one_hot is only applicable to index tensor of type LongTensor, got {x.dtype}")
    x = reduced(x)
    if x.numel():
        lowest, highest = _edges(x, num_classes)
        if lowest < 0:
            raise RuntimeError("Class values must be non-negative.")
        num_classes = highest + 1 if num_classes == -1 else num_classes
        if highest >= num_classes:
            raise RuntimeError("Class values must be smaller than num_classes.")
    elif num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).long(memory_format=torch.contiguous_format)


@program("combinations")
def combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Which elements make each combination follows from how many there are; torch's own finds them with a mask."""
    if x.dim() != 1 or r < 1:
        torch.combinations(torch.empty(x.shape, device="meta"), r, with_replacement)  # raises as torch does
        return x.detach()[:0]
    n = x.shape[0]
    if x._layout.mesh.comm.outlined:
        found = torch.empty(math.comb(n + r - 1 if with_replacement else n, r), r, dtype=torch.int64, device=x.device)
    else:
        found = torch.combinations(torch.arange(n, device=x.device), r, with_replacement).view(-1, r)
    return x[found]


# -- distinct values ---------------------------------------------------------------------------------------
@program("unique")
def unique(
    x: Tensor, sorted: Any = True, return_inverse: Any = False, return_counts: Any = False, dim: Any = None
) -> Any:
    find = functools.partial(torch.unique, sorted=sorted)
    found = distinct(find, reduced(x.detach()), dim, return_inverse, return_counts)
    return _without_derivative(found, x, "_unique2" if dim is None else "unique_dim")


@program("unique_consecutive")
def unique_consecutive(x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: Any = None) -> Tensor:
    if dim is not None and not x.dim():
        raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
    ordered = in_order(reduced(x.detach()), range(x.dim()) if dim is None else [dim % x.dim()])[0]
    found = distinct(torch.unique_consecutive, ordered, dim, return_inverse, return_counts)
    return _without_derivative(found, x, "unique_consecutive")


def _without_derivative(found: Tensor, x: Tensor, name: str) -> Tensor:
    """The values found (alone, or before others) of an op that torch has no derivative for."""
    return (constant(found[0], [x], name), *found[1:]) if isinstance(found, tuple) else constant(found, [x], name)


def distinct(func: Callable[..., Any], x: Tensor, dim: int | None, where: bool = True, how_many: bool = True) -> Tensor:
    """The distinct values of what `func` finds on each rank; if asked, also where each element's is, and counts."""
    x = x if dim is None else whole(x.movedim(dim, 0), range(1, x.dim()))
    find = functools.partial(func, return_inverse=True, return_counts=True, dim=None if dim is None else 0)
    layout, axes = x._layout, [a for a, p in enumerate(x._layout.placements) if p.is_shard()]
    rows = layout.replicated(shape=(0, *(x.shape[1:] if dim is not None else ())))
    values = rows.placed(dict.fromkeys(axes, Shard(0)))
    places = layout.replace(shape=x.shape[: None if dim is None else 1], dtype=torch.int64)
    counts = values.replace(shape=(0,), dtype=torch.int64)
    found = run_local(find, [x], [values, places, counts])
    merged, inverse, many = with_counted_size(found[0], 0, axes), found[1], with_counted_size(found[2], 0, axes)
    if axes:  # once more, of the values that all ranks found
        start = functools.partial(merged._layout.offset_at, 0)
        candidates = run_local(torch.add, [inverse], inverse._layout, start)
        merged, again, _ = distinct(func, whole(merged), None if dim is None else 0)
        inverse, many = again[candidates], many.new_zeros(merged.shape[0]).index_add(0, again, many)
    merged = merged if not dim else merged.movedim(0, dim)
    if (dim and merged.is_cuda) or not merged.numel():  # so torch stores it
        merged = merged.clone(memory_format=torch.contiguous_format)
    results = merged, inverse, many
    asked = tuple(itertools.compress(results, (True, where, how_many)))
    return asked if len(asked) > 1 else asked[0]
