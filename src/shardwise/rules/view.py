"""Views and reshapes: permuting, merging, cutting, adding and repeating dims. Nothing moves where the cut can follow.

An op named ..._copy has the rule of its view: the engine sees that torch shares no memory there, and copies."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.strategy import Factors, Named, Operand, Tensor, factors, line
from shardwise.strategy.registry import program, rule
from shardwise.strategy.relayout import Carried, Relayout, SetMap, call_with, regrouped, repeated, same_call, unchanged


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the front. One out of range raises, and the engine shows torch's own error instead."""
    return range(ndim or 1)[dim]


def dims_of(dims: int | Sequence[int], ndim: int) -> list[int]:
    """One dim or several, counted from the front."""
    return [dim_of(d, ndim) for d in ((dims,) if isinstance(dims, int) else dims)]


def ints(sizes: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """view(2, 3), view((2, 3)) and view(size=(2, 3)) alike. What follows a tuple is something else, as strides."""
    sizes = sizes or tuple(named.values()) or ((),)
    return tuple(sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes)


def carried(where: Mapping[int, int] | range, local: Any, changes: Mapping[int, SetMap] | None = None) -> Relayout:
    """Dim d becomes dim where[d], the sets held of it changed by changes[d]; a dim that is not there must be whole."""
    change = changes or {}
    return Relayout(1, lambda d: [[Carried(where[d], change.get(d, unchanged))] if d in where else []], local)


def permutation(order: Sequence[int]) -> Relayout:
    """Output dim i is input dim order[i]."""
    return carried({d: i for i, d in enumerate(order)}, same_call(torch.Tensor.permute, tuple(order)))


def to_shape(x: Operand, shape: Sequence[int], may_alias: bool = True) -> Relayout:
    """The same elements in row-major order under another shape. Whether a view is legal was asked of the global
    strides; here it is a reshape, since a local tensor may be stored otherwise (by a kernel, for an odd shard)."""
    return Relayout(1, lambda dim: [regrouped(x.shape, dim, shape)], in_local_shape(torch.Tensor.reshape), may_alias)


def in_local_shape(func: Any) -> Any:
    """func(x, the shape of the result that a rank holds)."""
    return call_with(func, lambda source, outputs, coords: outputs[0].local_shape_at(coords))


def filled_in(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """The shape with -1 worked out."""
    known = math.prod(size for size in shape if size != -1)
    return tuple(numel // known if size == -1 and known else size for size in shape)


@rule("view view_copy reshape _reshape_copy _reshape_alias_copy")
def reshape(x: Operand, *shape: Any, may_alias: bool = True, **named: Any) -> Relayout | Factors:
    sizes = ints(shape, named)
    if not sizes or not isinstance(sizes[0], torch.dtype):
        return to_shape(x, filled_in(sizes, math.prod(x.shape)), may_alias)
    # the same bytes as another dtype: one of another size needs the last dim whole, and no part of a sum may stay
    return factors("*d -> *d" if sizes[0].itemsize == x.dtype.itemsize else "*d n! -> *d n", [x])


rule("_unsafe_view _reshape_alias")(functools.partial(reshape, may_alias=False))
line("view_as_real view_as_real_copy", "*b -> *b pair", linear="joint")
line("view_as_complex view_as_complex_copy", "*b pair! -> *b", linear="joint")


@rule("flatten ravel")
def flatten(x: Operand, start_dim: int = 0, end_dim: int = -1) -> Relayout:
    first, last = dims_of((start_dim, end_dim), x.ndim)
    return to_shape(x, (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@rule("unflatten")
def unflatten(x: Operand, dim: int, sizes: Sequence[int]) -> Relayout:
    d = dim_of(dim, x.ndim)
    return to_shape(x, (*x.shape[:d], *filled_in(sizes, x.shape[d]), *x.shape[d + 1 :]))


@rule("permute permute_copy")
def permute(x: Operand, *dims: Any, **named: Any) -> Relayout:
    return permutation(dims_of(ints(dims, named), x.ndim))


@rule("transpose transpose_copy swapaxes swapdims mT")
def transpose(x: Operand, dim0: int = -2, dim1: int = -1) -> Relayout:
    a, b = dims_of((dim0, dim1), x.ndim)
    return permutation([{a: b, b: a}.get(d, d) for d in range(x.ndim)])


@rule("t t_copy T")
def t(x: Operand) -> Relayout:
    return permutation(range(x.ndim)[::-1])


@rule("movedim moveaxis")
def movedim(x: Operand, source: Any, destination: Any) -> Relayout:
    sources = dims_of(source, x.ndim)
    comes = dict(zip(dims_of(destination, x.ndim), sources, strict=True))
    rest = iter(d for d in range(x.ndim) if d not in sources)
    return permutation([comes[d] if d in comes else next(rest) for d in range(x.ndim)])


@program("rot90")
def rot90(x: Tensor, k: int = 1, dims: Any = (0, 1)) -> Tensor:
    """A quarter turn flips one of the two dims and swaps them."""
    flips, swapped = ((), dims[1:], dims, dims[:1])[k % 4], dims if k % 2 else dims[:1] * 2
    return x.flip(flips).transpose(*swapped)


@rule("unsqueeze unsqueeze_copy")
def unsqueeze(x: Operand, dim: int) -> Relayout:
    at = dim_of(dim, x.ndim + 1)
    return carried({d: d + (d >= at) for d in range(x.ndim)}, same_call(torch.unsqueeze, at))


@rule("squeeze squeeze_copy")
def squeeze(x: Operand, dim: Named = None) -> Relayout:
    asked = range(x.ndim) if dim is None else dims_of(dim, x.ndim)
    gone = tuple(d for d, size in enumerate(x.shape) if size == 1 and d in asked)
    kept = [d for d in range(x.ndim) if d not in gone]
    return carried({d: i for i, d in enumerate(kept)}, same_call(torch.squeeze, gone))


@rule("expand expand_copy broadcast_to")
def expand(x: Operand, *size: Any, implicit: bool = False, **named: Any) -> Relayout:
    target = ints(size, named)
    new = len(target) - x.ndim
    stays = [d for d, n in enumerate(x.shape) if n != 1 or target[d + new] in (1, -1)]
    return carried({d: d + new for d in stays}, in_local_shape(torch.Tensor.expand))


@rule("repeat")
def repeat(x: Operand, *repeats: Any, **named: Any) -> Relayout:
    """A cut dim is held block by block: the same set in each."""
    times = ints(repeats, named)
    new = len(times) - x.ndim
    blocks = {d: repeated(n, times[d + new]) for d, n in enumerate(x.shape)}
    return carried({d: d + new for d in blocks}, same_call(torch.Tensor.repeat, times), blocks)
