"""Reductions. A cut factor that is reduced leaves a Partial result; where parts do not simply add up, two stages do:
reduce what each rank holds, gather those few values, reduce again."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise, product
from typing import Any

import torch

from shardwise.layout.layout import Layout, parent_sets, shards_from_table
from shardwise.layout.split import count, normalize
from shardwise.strategy import Algorithm, Factors, Named, Operand, Tensor, factors, line, reduced, sum_dtype, whole
from shardwise.strategy.registry import rule
from shardwise.wrapper import wrap


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """The reduced dims: all of them for None or (). Raises as torch does, since a program asks no meta kernel."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    torch.empty((1,) * ndim, device="cpu").sum(dim)
    return tuple(d % ndim for d in ((dim,) if isinstance(dim, int) else dim)) if ndim else ()


_REDUCED = "x dim=None keepdim=False"
line("sum", "*d -> *d-dim", "joint", takes=_REDUCED)
line("nansum count_nonzero", "*d -> *d-dim", takes=_REDUCED)
line("prod", "*d -> *d-dim", takes=_REDUCED, reduce="product")
line("any", "*d -> *d-dim", takes=_REDUCED, reduce="bor")
line("all", "*d -> *d-dim", takes=_REDUCED, reduce="band")


@rule("mean")
def mean(x: Operand, dim: Named = None, keepdim: bool = False, **kwargs: object) -> Factors:
    """The parts are sums over the global count, so uneven shards weigh what they should."""
    dims = dims_of(dim, x.ndim)
    n = math.prod(x.shape[d] for d in dims)

    def local(inputs: list[Layout], outputs: list[Layout]) -> Callable[..., Any]:
        dtype = outputs[0].dtype
        if not any(inputs[0].is_cut(d) for d in dims):
            return lambda v: torch.mean(v, dims, keepdim, dtype=dtype)
        return lambda v: (v.sum(dims, keepdim, dtype=sum_dtype(dtype)) / n).to(dtype)

    return factors("*d -> *d-dim", [x], "joint", dim=dims, keepdim=keepdim, local=local)


# -- two stages --------------------------------------------------------------------------------------------
def gather_parts(
    func: Callable[..., Any], x: Tensor, dims: tuple[int, ...], rows: int = 1, value_at: Any = None
) -> list[Tensor]:
    """The results of reducing what each rank holds, side by side along `dims` and gathered.

    func(value, dims, True[, value_at(coords)]) gives a tuple; it leaves `rows` rows of a reduced dim, or as many as a
    rank holds. One that holds nothing adds nothing, so no reduction needs a neutral element: there `func` reduces a new
    dim of size 1, to build the same graph as on other ranks."""
    layout, comm = x._layout, x._layout.mesh.comm
    shape, places = list(layout.shape), list(layout.placements)

    def local(v: torch.Tensor, *more: Any) -> list[torch.Tensor]:
        if all(v.shape[d] for d in dims):
            return list(func(v, dims, True, *more))
        for d in dims:
            v = v.narrow(d, 0, min(1, v.shape[d]))
        return [part.squeeze(-1) for part in func(v.unsqueeze(-1), (v.dim(),), True, *more)]

    for dim in dims:
        left = [min(rows, count(held)) for held in parent_sets(layout.mesh, layout.placements, dim, layout.shape[dim])]
        ends = list(accumulate(left, initial=0))
        sizes = [layout.mesh.shape[axis] for axis in layout.axes_of(dim)]
        table = {at: normalize([part]) for at, part in zip(product(*map(range, sizes)), pairwise(ends), strict=True)}
        shape[dim], shards = ends[-1], shards_from_table(sizes, ends[-1], table.__getitem__, dim)
        for axis, shard in zip(layout.axes_of(dim), shards, strict=True):
            places[axis] = shard
    split = tuple(axis for axis, p in enumerate(places) if not p.is_replicate())
    results = comm.bind(local, split)(x._local, *([] if value_at is None else [comm.per_rank(value_at)]))
    stage = layout.replace(shape=tuple(shape), placements=tuple(places))
    return [whole(wrap(part, stage.replace(dtype=comm.first(part).dtype)), dims) for part in results]


def staged(x: Operand, dims: tuple[int, ...], keepdim: bool, run: Callable[[Any], Any], outputs: int = 1) -> Any:
    """run(x), nothing pending in it, where there is something to reduce and it is cut; else the op as it is."""
    if any(x.layout.is_cut(d) for d in dims) and all(x.shape[d] for d in dims):
        return Algorithm(lambda x, *args, **kwargs: run(reduced(x)))
    return whole_along(x, dims, keepdim, outputs)


def whole_along(x: Operand, dims: tuple[int, ...], keepdim: bool, outputs: int = 1, **more: Any) -> Factors:
    """The reduced dims are gathered, the others pass."""
    return factors("*d!dim -> *d-dim", [x], dim=dims, keepdim=keepdim, outputs=outputs, **more)
