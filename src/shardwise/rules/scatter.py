"""Writes at indices. A tensor that is cut keeps its layout: every rank writes what falls into what it holds. Where the
writes are sums, the source may be cut instead, and the result is a sum of parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import dim_from_front
from shardwise.layout.shapes import broadcast_shape, contiguous_stride
from shardwise.rules.index import Indexed, clamped, unravelled, without_masks
from shardwise.strategy import Algorithm, Answer, Factors, Operand, Tensor, factors, needs_grad
from shardwise.strategy.indices import is_mask
from shardwise.strategy.lookup import Written, located, located_all, places_of_mine
from shardwise.strategy.memory import copied_stride, like_a_clone, stored
from shardwise.strategy.registry import program, rule
from shardwise.wrapper import restride


def linear_in(source: int, adds: bool) -> dict[str, Any]:
    """For an op linear in its first operand and its source together; if it `adds`, the source may be cut in parts."""
    return {"linear": "joint", "joint": frozenset({0, source}), "addends": frozenset({0} if adds else ())}


# -- one index for each row --------------------------------------------------------------------------------
def write_rows(op: str, x: Operand, dim: int, index: Operand, source: Any, *rest: Any, **named: Any) -> Factors:
    """x.op(dim, index, source, *rest): row index[j] of x meets row j of the source (index_fill: a value for all)."""
    d, adds, fills = dim_from_front(dim, x.ndim), op == "index_add", op == "index_fill"
    rows = "i" if adds and index.ndim and x.ndim else None
    # of rows of one element, torch's kernel for products of 16 bits on CPU raises: there rows stay whole
    fragile = op == "index_reduce" and x.dtype.itemsize == 2 and x.layout.device.type == "cpu"
    names = tuple(None if fragile and e != d else f"x{e}" for e in range(x.ndim))
    inputs: list[Any] = [names, (rows,) * index.ndim]
    if isinstance(source, Operand):
        alike = source.ndim == x.ndim and all(e == d or source.shape[e] == n for e, n in enumerate(x.shape))
        theirs = tuple(rows if e == d else n for e, n in enumerate(names))
        inputs.append(theirs if alike else (None,) * source.ndim)
    size = x.shape[d] if x.ndim else 1

    def write(suffix: str, x: torch.Tensor, index: torch.Tensor, *others: Any) -> torch.Tensor:
        *sources, (held,) = others
        at, mine = located(index.reshape(-1), held, size, RuntimeError if adds else IndexError, from_end=fills)
        picked = places_of_mine(mine, (held,), (size,))
        values = [s if fills else (s if s.ndim else s.reshape(1)).index_select(d, picked) for s in sources] or [source]
        return getattr(x, op + suffix)(d, at[picked], *values, *rest, **named)

    more = linear_in(2, adds) if op in ("index_add", "index_copy") else {}
    return Written(inputs, [names], **more, dims=(d,) if x.ndim else (), write=write)


stored("index_fill")(like_a_clone)
for _op in ("index_add", "index_copy", "index_fill", "index_reduce"):
    rule(_op)(functools.partial(write_rows, _op))


# -- one index for each element ----------------------------------------------------------------------------
def write_elements(op: str, x: Operand, dim: int, index: Operand, src: Any, *rest: Any, **named: Any) -> Factors:
    """x.op(dim, index, src, *rest). Dims of equal size pass, position by position; of the others a rank that holds part
    of x looks at the whole index."""
    d, sources, shape = dim_from_front(dim, x.ndim), [src] if isinstance(src, Operand) else [], x.shape
    reduce = named.get("reduce", rest[0] if rest else None)
    adds = op == "scatter_add" or reduce == "add" or (reduce == "sum" and named.get("include_self", True))
    if x.ndim != index.ndim or not x.ndim:
        return factors("*x!, *i!, .. -> *x", [x, index, *sources])
    passes = [e != d and all(t.shape[e] == n for t in (index, *sources)) for e, n in enumerate(shape)]
    dims = [e for e, ok in enumerate(passes) if not ok]
    names = tuple(f"x{e}" for e in range(x.ndim))
    rows = "i" if adds and sources and src.shape[d] == index.shape[d] else None
    theirs = tuple(names[e] if ok else rows if e == d else None for e, ok in enumerate(passes))

    def write(suffix: str, x: torch.Tensor, index: torch.Tensor, *others: Any) -> torch.Tensor:
        if suffix and not x.is_contiguous():
            return x.copy_(write("", x.clone(), index, *others))
        *sources, held = others
        flat, mine = torch.zeros_like(index), torch.ones_like(index, dtype=torch.bool)
        for e, step in enumerate(contiguous_stride(x.shape)):
            line = torch.arange(index.shape[e], device=index.device)
            at = index if e == d else line.reshape([-1 if i == e else 1 for i in range(index.ndim)])
            if e in dims:
                part = held[dims.index(e)]
                at, here = located(at, ((0, shape[e]),) if part is None else part, shape[e], RuntimeError)
                mine = mine & here
            flat = flat + at * step
        picked = places_of_mine(mine, held, [shape[e] for e in dims])
        values = [s[tuple(map(slice, index.shape))].reshape(-1)[picked] for s in sources] or [src]
        at = flat.reshape(-1)[picked]
        return getattr(x.reshape(-1), op + suffix)(0, at, *values, *rest, **named).view(x.shape)

    more = linear_in(2, adds) if sources and (adds or reduce in (None, "sum")) else {}
    return Written([names, *[theirs] * (1 + len(sources))], [names], **more, dims=dims, write=write)


for _op in ("scatter", "scatter_add", "scatter_reduce"):
    rule(_op)(functools.partial(write_elements, _op))


# -- x[indices] = values -----------------------------------------------------------------------------------
@rule("index_put _unsafe_index_put _index_put_impl")
def index_put(x: Operand, indices: Any, values: Operand, accumulate: bool = False, unsafe: Any = False) -> Answer:
    if len(indices) > x.ndim:  # also of masks without dims, of which x[...] takes any number
        raise IndexError(f"too many indices for tensor of dimension {x.ndim} (got {len(indices)})")
    starts = [sum(i.ndim if is_mask(i) else 1 for i in indices[:n]) for n in range(len(indices))]
    if any(is_mask(i) and i.shape != x.shape[d : d + i.ndim] for d, i in zip(starts, indices, strict=True)):
        raise IndexError(f"index_put: a mask among the indices has not the shape of its dims of x, {tuple(x.shape)}")
    if any(map(is_mask, indices)):
        return Algorithm(_put_by_masks, knows_memory=True)
    at = Indexed(x, indices)
    wholly = () if accumulate else at.looked  # the order of writes to one place matters, that of sums does not
    into = ((None,) * values.ndim + at.result)[-values.ndim :] if values.ndim else ()
    theirs = tuple(n if n and at.size[n] == k else None for n, k in zip(into, values.shape, strict=True))
    inputs = [tuple(None if n in wholly else n for n in names) for names in (at.names, *at.index_names, theirs)]

    def write(suffix: str, x: torch.Tensor, *others: Any) -> torch.Tensor:
        *found, values, held = others
        places, mine = located_all([i.to(x.device) for i in found], held, at.sizes)
        looked = broadcast_shape(*(i.shape for i in found))
        picked = places_of_mine(mine.expand(looked), held, at.sizes)
        places = [p.expand(looked).reshape(-1)[picked] for p in places]
        if values.numel() == 1:
            values = values.reshape(())
        else:
            kept = [n for d, n in enumerate(x.shape) if d not in at.dims]
            before, after = kept[: at.at], kept[at.at :]
            values = values.expand(*before, *looked, *after).reshape(*before, math.prod(looked), *after)
            values = values.index_select(at.at, picked)
        return getattr(torch.ops.aten, "index_put" + suffix)(x, at.placed(places), values, accumulate)

    return Written(inputs, [at.names], **linear_in(len(inputs) - 1, accumulate), dims=at.dims, write=write)


def _put_by_masks(
    x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    """One value goes wherever the mask is true; of many, each to its place. The result is stored as a clone of x is."""
    made = _put_places(x, indices, values, accumulate)
    restride(made, copied_stride(x.shape, x._layout.stride))
    return made


def _put_places(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool) -> Tensor:
    at = [d for d, i in enumerate(indices) if i is not None]
    if len(at) == 1 and values.numel() == 1 and not accumulate:
        mask = indices[at[0]].bool()
        mask = mask.reshape((*mask.shape, *(1,) * (x.dim() - at[0] - mask.dim())))
        return torch.where(mask, values.reshape(()).to(x.dtype), x)
    return torch.ops.aten.index_put(x, without_masks(indices), values, accumulate)


@program("put")
def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    if index.dtype is not torch.int64:
        raise RuntimeError(f"put: index has the dtype {index.dtype}; torch takes torch.int64 here, as index.long() is")
    if source.numel() != index.numel():
        raise IndexError(
            f"put: source has {source.numel()} elements and index {index.numel()}; give one element for each index"
        )
    line, source = x if x.dim() else x.reshape(1), source.reshape(index.shape)
    return torch.ops.aten.index_put(line, unravelled(index, line.shape), source, accumulate).reshape(x.shape)


_put = torch.ops.aten.index_put
program("_unsafe_masked_index_put_accumulate")(
    lambda x, mask, indices, values: _put(x, clamped(x, indices), values.masked_fill(~mask, 0), True)
)


@program("masked_scatter")
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The k-th place where the mask is true takes element k of the source."""
    shape = broadcast_shape(x.shape, mask.shape)
    x, mask = x.expand(shape), mask.expand(shape)
    if not source.numel() and not mask.any():
        return x + source.sum() * 0 if needs_grad(source) else x.clone()
    if source.numel() < mask.numel() and source.device.type == "cpu" and (ones := int(mask.sum())) > source.numel():
        raise RuntimeError(f"masked_scatter: source has {source.numel()} elements, fewer than the {ones} ones in mask")
    order = (mask.reshape(-1).cumsum(0) - 1).reshape(shape)
    line = source if source.dim() else source.reshape(1)
    taken = torch.ops.aten.index(line, unravelled(order.masked_fill(~mask, 0), line.shape))  # keeps no values
    return torch.where(mask, taken, x)
