"""Reductions. A cut factor that is reduced leaves a Partial result; where parts do not simply add up, two stages do:
reduce what each rank holds, gather those few values, reduce again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.layout import Layout
from shardwise.layout.layout import shards_from_table
from shardwise.layout.split import count, normalize
from shardwise.rules.view import dim_of
from shardwise.strategy.program import reduced, whole
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Operand
from shardwise.wrapper import wrap

Names = tuple[str | None, ...]


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """The reduced dims: all of them for None or (). Raises as torch does, since a program asks no meta kernel."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    n, given = max(ndim, 1), (dim,) if isinstance(dim, int) else tuple(dim)
    for d in given:
        if not -n <= d < n:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {d})")
        if [other % n for other in given].count(d % n) > 1:
            raise RuntimeError(f"dim {d % n} appears multiple times in the list of dims")
    return tuple(d % n for d in given) if ndim else ()


def wide(dtype: Any) -> Any:
    """The dtype to add up in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def names_of(x: Operand, dims: tuple[int, ...], keepdim: bool) -> tuple[Names, Names]:
    names: Names = tuple(f"d{i}" for i in range(x.ndim))
    if keepdim:
        return names, tuple(None if i in dims else n for i, n in enumerate(names))
    return names, tuple(n for i, n in enumerate(names) if i not in dims)


def reduction(names: str, op: str, linear: str = "none") -> None:
    """Ops with the signature (x, dim, keepdim) whose parts reduce by `op`."""

    @rule(names)
    def reduces(x: Operand, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Factors | None:
        if isinstance(dim, (torch.dtype, str)):
            return None
        ins, outs = names_of(x, dims_of(dim, x.ndim), keepdim)
        return Factors([ins], [outs], linear=linear, reduce={n: op for n in ins if n})


reduction("sum", "sum", linear="joint")
reduction("nansum count_nonzero", "sum")
reduction("prod", "product")
reduction("any", "bor")
reduction("all", "band")


@rule("mean")
def mean(x: Operand, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Factors:
    """The parts are sums over the global count, so uneven shards weigh what they should."""
    dims = dims_of(dim, x.ndim)
    ins, outs = names_of(x, dims, keepdim)
    n = 1
    for d in dims:
        n *= x.shape[d]

    def local(inputs: list[Layout], outputs: list[Layout]) -> Callable[..., Any]:
        dtype = outputs[0].dtype
        if not any(inputs[0].is_cut(d) for d in dims):
            return lambda v: torch.mean(v, dims, keepdim, dtype=dtype) if dims else v.mean(dtype=dtype)
        return lambda v: (v.sum(dims, keepdim, dtype=wide(dtype)) / n).to(dtype)

    return Factors([ins], [outs], linear="joint", local=local)


# -- two stages --------------------------------------------------------------------------------------------
def gather_parts(
    func: Callable[..., Any], x: Any, dims: tuple[int, ...], rows: int = 1, of: Callable[[Coords], Any] | None = None
) -> list[Any]:
    """What func(value, dims, True[, of(coords)]) leaves on each rank, side by side along `dims`, and those gathered.

    Func gives a tuple; of a reduced dim it leaves `rows` rows, or as many as a rank holds. One that holds none leaves
    none, so no reduction needs a neutral element: there func reduces a new dim of size 1, to stay in the same graph.
    """
    layout, comm = x._layout, x._layout.mesh.comm
    shape, places = list(layout.shape), list(layout.placements)

    def local(v: torch.Tensor, *more: Any) -> list[torch.Tensor]:
        if all(v.shape[d] for d in dims):
            return list(func(v, dims, True, *more))
        for d in dims:
            v = v.narrow(d, 0, min(1, v.shape[d]))
        return [part.squeeze(-1) for part in func(v.unsqueeze(-1), (v.dim(),), True, *more)]

    for dim in dims:
        axes, table, shape[dim] = layout.axes_of(dim), {}, 0
        sizes = [layout.mesh.shape[axis] for axis in axes]
        for at in itertools.product(*map(range, sizes)):
            coords = dict(zip(axes, at, strict=True))
            left = min(rows, count(layout.held(dim, [coords.get(axis, 0) for axis in range(len(places))])))
            table[at] = normalize([(shape[dim], shape[dim] + left)])
            shape[dim] += left
        for axis, shard in zip(axes, shards_from_table(sizes, shape[dim], table.__getitem__, dim), strict=True):
            places[axis] = shard
    split = tuple(axis for axis, p in enumerate(places) if not p.is_replicate())
    parts = comm.bind(local, split)(x._local, *([] if of is None else [comm.per_rank(of)]))
    stage = layout.replace(shape=tuple(shape), placements=tuple(places))
    return [whole(wrap(part, stage.replace(dtype=comm.first(part).dtype)), dims) for part in parts]


def two_stages(func: Callable[..., Any], x: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """func(value, dims, keepdim) of the values func leaves on each rank."""
    return func(*gather_parts(lambda *args: (func(*args),), x, dims), dims, keepdim)


def staged(x: Operand, dims: tuple[int, ...], keepdim: bool, run: Callable[[Any], Any], outputs: int = 1) -> Any:
    """run(x), nothing pending in it, where there is something to reduce and it is cut; else the op as it is."""
    if any(x.layout.is_cut(d) for d in dims) and all(x.shape[d] for d in dims):
        return Algorithm(lambda x, *args, **kwargs: run(reduced(x)))
    return whole_along(x, dims, keepdim, outputs)


# -- dims that must be whole -------------------------------------------------------------------------------
def whole_along(x: Operand, dims: tuple[int, ...], keepdim: bool, outputs: int = 1) -> Factors:
    """The reduced dims are gathered, the others pass."""
    ins: Names = tuple(None if i in dims else f"d{i}" for i in range(x.ndim))
    outs = ins if keepdim else tuple(n for i, n in enumerate(ins) if i not in dims)
    return Factors([ins], [outs] * outputs)


def along(names: str, outputs: int = 1, default: int = -1) -> None:
    """Ops (x, dim) that keep the shape and need `dim` whole."""

    @rule(names)
    def whole_dim(x: Operand, dim: Any = default, *args: Any, **kwargs: Any) -> Factors | None:
        if not isinstance(dim, int) or isinstance(dim, bool):
            return None
        return whole_along(x, (dim_of(dim, x.ndim),), True, outputs)
