"""Views and reshapes: permuting, merging, cutting, adding and repeating dims. Nothing moves where the cut can follow.

An op named ..._copy has the rule of its view: the engine sees that torch shares no memory there, and copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.strategy.notation import line
from shardwise.strategy.registry import rule
from shardwise.strategy.relayout import Carried, Relayout, call_with, regrouped, repeated, same_call, unchanged
from shardwise.strategy.spec import Algorithm, Factors, Operand


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the front; torch's own error for one out of range comes from the meta call."""
    return dim % ndim if ndim else 0


def ints(shape: Sequence[Any]) -> tuple[Any, ...]:
    """view(2, 3) and view((2, 3)) alike."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else tuple(shape)


def filled_in(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """The shape with -1 worked out."""
    if -1 not in shape:
        return tuple(shape)
    known = 1
    for size in shape:
        if size != -1:
            known *= size
    return tuple(numel // known if size == -1 and known else size for size in shape)


def _numel(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def permutation(order: Sequence[int], func: Any, *statics: Any) -> Relayout:
    """Output dim i is input dim order[i]."""
    where = {d: i for i, d in enumerate(order)}
    return Relayout(1, lambda dim: [[Carried(where[dim], unchanged)]], same_call(func, *statics))


def to_shape(x: Operand, shape: Sequence[int], func: Any) -> Relayout:
    """The same elements in row-major order under another shape: each rank views its part as its part of the result.

    Whether a view is legal was asked of the global strides; `func` is a reshape, since a local tensor may be stored
    otherwise (what a kernel returned for an odd shard)."""
    local = call_with(func, lambda source, outputs, coords: outputs[0].local_shape_at(coords))
    return Relayout(1, lambda dim: [regrouped(x.shape, dim, shape)], local)


@rule("view view_copy")
def view(x: Operand, *shape: Any, **named: Any) -> Relayout | Factors:
    sizes = ints(shape or tuple(named.values()))
    if not sizes and x.ndim == 0:
        return permutation((), torch.Tensor.view, ())
    if sizes and isinstance(sizes[0], torch.dtype):
        return reread(x, sizes[0])
    return to_shape(x, filled_in(sizes, _numel(x.shape)), torch.Tensor.reshape)


def reread(x: Operand, dtype: torch.dtype) -> Factors:
    """The same bytes as another dtype: one of another size needs the last dim whole, and no part of a sum may stay."""
    whole = x.ndim - 1 if dtype.itemsize != x.dtype.itemsize else None
    names = [None if i == whole else f"d{i}" for i in range(x.ndim)]
    return Factors([names], [names])


line("view_as_real view_as_real_copy", "*b -> *b pair", linear="joint")
line("view_as_complex view_as_complex_copy", "*b pair! -> *b", linear="joint")


@rule("_unsafe_view _reshape_alias")
def unsafe_view(x: Operand, *shape: Any, **named: Any) -> Relayout:
    return dataclasses.replace(reshape(x, *shape, **named), may_alias=False)


@rule("reshape _reshape_copy _reshape_alias_copy")
def reshape(x: Operand, *shape: Any, **named: Any) -> Relayout:
    sizes = shape or tuple(named.values())
    if isinstance(sizes[0], (tuple, list)):
        sizes = sizes[:1]  # _reshape_alias gives strides too
    return to_shape(x, filled_in(ints(sizes), _numel(x.shape)), torch.Tensor.reshape)


@rule("flatten")
def flatten(x: Operand, start_dim: int = 0, end_dim: int = -1) -> Relayout:
    if x.ndim == 0:
        return to_shape(x, (1,), torch.Tensor.reshape)
    a, b = dim_of(start_dim, x.ndim), dim_of(end_dim, x.ndim)
    return to_shape(x, (*x.shape[:a], _numel(x.shape[a : b + 1]), *x.shape[b + 1 :]), torch.Tensor.reshape)


@rule("ravel")
def ravel(x: Operand) -> Relayout:
    return to_shape(x, (_numel(x.shape),), torch.Tensor.reshape)


@rule("unflatten")
def unflatten(x: Operand, dim: int, sizes: Sequence[int]) -> Relayout:
    d = dim_of(dim, x.ndim)
    inner = filled_in(tuple(sizes), x.shape[d])
    return to_shape(x, (*x.shape[:d], *inner, *x.shape[d + 1 :]), torch.Tensor.reshape)


@rule("permute permute_copy")
def permute(x: Operand, *dims: Any, **named: Any) -> Relayout:
    order = [dim_of(d, x.ndim) for d in ints(dims or tuple(named.values()))]
    return permutation(order, torch.Tensor.permute, order)


@rule("transpose transpose_copy swapaxes swapdims")
def transpose(x: Operand, dim0: int, dim1: int) -> Relayout:
    order = list(range(x.ndim))
    if order:
        a, b = dim_of(dim0, x.ndim), dim_of(dim1, x.ndim)
        order[a], order[b] = order[b], order[a]
    return permutation(order, torch.Tensor.permute, order)


@rule("t t_copy T mT")
def t(x: Operand) -> Relayout:
    order = list(range(x.ndim))
    if len(order) >= 2:
        order[-2:] = order[-1], order[-2]
    return permutation(order, torch.Tensor.permute, order)


@rule("movedim moveaxis")
def movedim(x: Operand, source: Any, destination: Any) -> Relayout:
    sources = [dim_of(d, x.ndim) for d in ((source,) if isinstance(source, int) else source)]
    targets = [dim_of(d, x.ndim) for d in ((destination,) if isinstance(destination, int) else destination)]
    order: list[Any] = [None] * x.ndim
    for s, d in zip(sources, targets, strict=True):
        order[d] = s
    rest = iter(d for d in range(x.ndim) if d not in sources)
    order = [next(rest) if d is None else d for d in order]
    return permutation(order, torch.Tensor.permute, order)


@rule("unsqueeze unsqueeze_copy")
def unsqueeze(x: Operand, dim: int) -> Relayout:
    at = dim_of(dim, x.ndim + 1)
    return Relayout(1, lambda d: [[Carried(d + (d >= at), unchanged)]], same_call(torch.unsqueeze, at))


@rule("squeeze squeeze_copy")
def squeeze(x: Operand, dim: Any = None) -> Relayout:
    if dim is None:
        gone = [d for d, size in enumerate(x.shape) if size == 1]
    else:
        gone = [dim_of(d, x.ndim) for d in ((dim,) if isinstance(dim, int) else dim)]
        gone = [d for d in gone if x.ndim and x.shape[d] == 1]
    kept = [d for d in range(x.ndim) if d not in gone]

    def carry(d: int) -> list[list[Carried]]:
        return [[Carried(kept.index(d), unchanged)]] if d in kept else [[]]

    return Relayout(1, carry, same_call(torch.squeeze, tuple(gone)))


@rule("expand expand_copy broadcast_to")
def expand(x: Operand, *size: Any, **named: Any) -> Relayout:
    target = ints(size or tuple(v for k, v in named.items() if k != "implicit"))
    new = len(target) - x.ndim

    def carry(d: int) -> list[list[Carried]]:
        grows = x.shape[d] == 1 and target[d + new] not in (1, -1)
        return [[]] if grows else [[Carried(d + new, unchanged)]]

    return Relayout(1, carry, call_with(torch.Tensor.expand, lambda source, outputs, c: outputs[0].local_shape_at(c)))


@rule("repeat")
def repeat(x: Operand, *repeats: Any, **named: Any) -> Relayout:
    """A cut dim is held block by block: the same set in each."""
    times = ints(repeats or tuple(named.values()))
    new = len(times) - x.ndim

    def carry(d: int) -> list[list[Carried]]:
        return [[Carried(d + new, repeated(x.shape[d], times[d + new]))]]

    return Relayout(1, carry, same_call(torch.Tensor.repeat, times))


@rule("rot90")
def rot90(x: Operand, k: int = 1, dims: Any = (0, 1)) -> Algorithm | None:
    """A quarter turn flips one of the two dims and swaps them."""
    if len({dim_of(d, x.ndim) for d in dims}) != 2 or len(dims) != 2:
        return None  # torch's own error
    flips, swapped = ((), dims[1:], dims, dims[:1])[k % 4], dims if k % 2 else dims[:1] * 2
    return Algorithm(lambda x, *args, **kwargs: x.flip(flips).transpose(*swapped))
