"""Reductions. A cut factor that is reduced leaves a Partial result; where parts do not simply add up, two stages do:
reduce what each rank holds, gather those few values, reduce again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.layout import Layout, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.rules.registry import rule
from shardwise.rules.spec import Algorithm, Factors, Operand
from shardwise.rules.view import dim_of
from shardwise.wrapper import wrap

Names = tuple[str | None, ...]


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """The reduced dims: all of them for None or ()."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    return tuple(dim_of(d, ndim) for d in ((dim,) if isinstance(dim, int) else dim)) if ndim else ()


def names_of(x: Operand, dims: tuple[int, ...], keepdim: bool) -> tuple[Names, Names]:
    names: Names = tuple(f"d{i}" for i in range(x.ndim))
    if keepdim:
        return names, tuple(None if i in dims else n for i, n in enumerate(names))
    return names, tuple(n for i, n in enumerate(names) if i not in dims)


def reduction(names: str, op: str, linear: str = "none") -> None:
    """Ops with the signature (x, dim, keepdim) whose parts reduce by `op`."""

    @rule(names)
    def reduced(x: Operand, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Factors | None:
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
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        return lambda v: (v.sum(dims, keepdim, dtype=wide) / n).to(dtype)

    return Factors([ins], [outs], linear="joint", local=local)


# -- two stages --------------------------------------------------------------------------------------------
def two_stages(func: Callable[..., Any], x: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """func(value, dims, keepdim) of the values func leaves on each rank."""
    layout = x._layout
    split = tuple(a for a, p in enumerate(layout.placements) if not p.is_replicate())
    local = layout.mesh.comm.bind(lambda v: func(v, dims, True), split)(x._local)
    shape, places = list(layout.shape), list(layout.placements)
    for dim in dims:
        shape[dim] = 1
        for axis in layout.axes_of(dim):
            shape[dim] *= layout.mesh.shape[axis]
            places[axis] = Shard(dim)  # one value a rank
    dtype = layout.mesh.comm.first(local).dtype
    stage = wrap(local, layout.replace(shape=tuple(shape), placements=tuple(places), dtype=dtype))
    whole = [REPLICATE if isinstance(p, Shard) and p.dim in dims else p for p in places]
    return func(stage.redistribute(placements=whole), dims, keepdim)


def needs_stages(x: Operand, dims: tuple[int, ...]) -> bool:
    """Whether a reduced dim is cut and no pending sum is in the way."""
    return any(x.layout.is_cut(d) for d in dims) and not x.layout.is_partial


@rule("vector_norm linalg_vector_norm")
def vector_norm(x: Operand, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = dims_of(dim, x.ndim)
    empty = any(0 in x.layout.local_shape_at(x.mesh.coords(rank)) for rank in x.mesh.ranks)
    if needs_stages(x, dims) and 0 < ord < float("inf") and not empty:  # no norm of nothing has second derivatives
        func = lambda v, dims, keepdim: torch.linalg.vector_norm(v, ord, dims, keepdim, dtype=dtype)  # noqa: E731
        return Algorithm(lambda x, *args, **kwargs: two_stages(func, x, dims, keepdim))
    return whole_along(x, dims, keepdim)


@rule("norm")
def norm(
    x: Operand, p: Any = "fro", dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any
) -> Any:
    """torch.norm of a vector-like kind is linalg.vector_norm; a nuclear norm goes by its parts."""
    order = 2 if p is None or p == "fro" else p
    if isinstance(order, (str, Operand)) or kwargs:
        return None
    return Algorithm(lambda x, *args, **named: torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype))


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
