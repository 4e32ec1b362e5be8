"""Diagonals and triangles: what is on which side follows from global indices, which every rank knows of its part.
And the ops that put a part back: a diagonal, a slice, one index."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.errors import dim_from_front
from shardwise.layout import Layout
from shardwise.layout.nesting import parent_sets
from shardwise.layout.split import Intervals, count
from shardwise.rules.view import clipped, dims_of
from shardwise.strategy import Algorithm, Factors, Operand, Tensor, factors, needs_grad, run_local, whole
from shardwise.strategy.memory import like_a_clone, stored
from shardwise.strategy.registry import program, rule
from shardwise.strategy.relayout import Relayout, call_with, carried, local_range
from shardwise.strategy.set_maps import sliced
from shardwise.strategy.spec import PerCoords
from shardwise.torch_private.autograd import is_transforming


@rule("diagonal diagonal_copy")
def diagonal(x: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Relayout:
    """An element stays with the rank that holds its row and its column: both cuts become cuts of the one dim left."""
    length = torch.empty(x.shape, device="meta").diagonal(offset, dim1, dim2).shape[-1]
    starts = dict(zip(dims_of((dim1, dim2), x.ndim), (max(-offset, 0), max(offset, 0)), strict=True))
    rest = [d for d in range(x.ndim) if d not in starts]
    where = {d: i for i, d in enumerate(rest)} | dict.fromkeys(starts, len(rest))
    on_it = lambda start: lambda held: sliced(start, start + length, 1)(held) if len(held) < 2 else None

    def corner(source: Layout, outputs: list[Layout], coords: tuple[int, ...]) -> tuple[int, ...]:
        mine = outputs[0].held(len(rest), coords)
        first = mine[0][0] if mine else 0
        return count(mine), *(first + at - source.offset_at(d, coords) if mine else 0 for d, at in starts.items())

    def pick(v: torch.Tensor, corner: tuple[int, ...]) -> torch.Tensor:
        for d, first in zip(starts, corner[1:], strict=True):
            v = v.narrow(d, first, corner[0])
        return v.diagonal(0, *starts)

    return carried(where, call_with(pick, corner), {d: on_it(start) for d, start in starts.items()})


program("trace")(lambda x: x.diagonal().sum())


@program("diag_embed")
def diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Rows stay with their elements."""
    down, right = max(-offset, 0), max(offset, 0)
    square = x.unsqueeze(-1).expand(*x.shape, x.shape[-1]).tril().triu()
    return F.pad(square, (right, down, down, right)).movedim((-2, -1), (dim1, dim2)).contiguous()


def triangle(func: Callable[..., torch.Tensor], x: Operand, diagonal: int = 0, **kwargs: object) -> Factors | Algorithm:
    """Zeros are zero under every reduction, so nothing pending is in the way. Of what a rank holds every piece has a
    diagonal of its own; so, as in torch, nothing is kept for the gradient."""
    layout, pair = x.layout, (x.ndim - 2, x.ndim - 1)
    if x.ndim < 2 or not any(map(layout.is_cut, pair)):
        return factors("*b m! n! -> *b m n", [x], "joint", any_partial=True)

    def clear(v: torch.Tensor, held: tuple[Intervals, Intervals]) -> torch.Tensor:
        if not v.numel():
            return func(v, diagonal)
        if len(held[0]) == len(held[1]) == 1:
            return func(v, diagonal + held[0][0][0] - held[1][0][0])
        down, right = ([b - a for a, b in intervals] for intervals in held)
        bands = []
        for band, (row, _) in zip(v.split(down, -2), held[0], strict=True):
            pieces = zip(band.split(right, -1), held[1], strict=True)
            bands.append(torch.cat([func(piece, diagonal + row - column) for piece, (column, _) in pieces], -1))
        return torch.cat(bands, -2)

    held = lambda coords: tuple(layout.held(d, coords) for d in pair)
    return Algorithm(lambda x, *args, **kwargs: run_local(clear, [x], layout.replace(stride=None), held))


rule("tril")(functools.partial(triangle, torch.tril))
rule("triu")(functools.partial(triangle, torch.triu))


def put_back(view: Callable[..., Any], x: Operand, src: Operand, *where: object, **named: object) -> Algorithm | None:
    """A copy, written where `view` shows it. What a rank holds in several pieces is whole: a view needs one."""
    held = [parent_sets(x.mesh, x.layout.placements, d, n) for d, n in enumerate(x.shape)]
    pieces = [d for d, sets in enumerate(held) if any(len(intervals) > 1 for intervals in sets)]

    def run(x: Tensor, src: Tensor, *where: object, **named: object) -> Tensor:
        if view is torch.ops.aten.slice and x.is_complex() and (needs_grad(x) or needs_grad(src)):
            raise RuntimeError("slice_scatter does not support automatic differentiation for complex results")
        out = whole(x, pieces).clone()
        recorded = needs_grad(x, src) and not is_transforming()
        made = put_in(view, out, src, *where, **named) if recorded else None
        if made is None:
            view(out, *where, **named).copy_(src)
        return out if made is None else made

    fits = view(torch.empty(x.shape, device="meta"), *where, **named).shape == src.shape
    return Algorithm(run) if fits else None  # torch's own error


def put_in(view: Callable[..., Any], x: Tensor, src: Tensor, *where: object, **named: object) -> Tensor | None:
    """`x` with `src` in place of a view, by a call that keeps nothing: the node of a write to a view can be used once.
    None where a cut of `x` is not one of its view."""
    layout, shown = x._layout, view(x.detach(), *where, **named)
    if any(mine.is_shard() and not its.is_shard() for mine, its in zip(x.placements, shown.placements, strict=True)):
        return None
    put: Callable[..., PerCoords] = _put_slice if view is torch.ops.aten.slice else _put_diagonal
    local = put(layout, *where, **named)
    return run_local(local.func, [x, src.redistribute(placements=shown.placements)], layout, local.value_at)


def _put_slice(layout: Layout, dim: int = 0, start: object = None, end: object = None, step: int = 1) -> PerCoords:
    d = dim_from_front(dim, layout.ndim)
    wanted = clipped(start, end, step, layout.shape[d])
    put = lambda v, src, mine: torch.ops.aten.slice_scatter(v, src.to(v.dtype), d, *mine, wanted[2])
    return PerCoords(put, lambda coords: local_range(layout, d, wanted, coords)[:2])


def _put_diagonal(layout: Layout, offset: int = 0, dim1: int = 0, dim2: int = 1) -> PerCoords:
    down, right = dims_of((dim1, dim2), layout.ndim)
    put = lambda v, src, at: torch.diagonal_scatter(v, src.to(v.dtype), at, down, right)
    return PerCoords(put, lambda coords: offset + layout.offset_at(down, coords) - layout.offset_at(right, coords))


# of a tensor whose elements are one in memory; of another the strides stay, holes included
_repeats = lambda x, *args, **kwargs: any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True))
stored("slice_scatter diagonal_scatter select_scatter", when=_repeats)(like_a_clone)
rule("slice_scatter")(functools.partial(put_back, torch.ops.aten.slice))
rule("diagonal_scatter")(functools.partial(put_back, torch.diagonal))


@rule("select_scatter")
def select_scatter(x: Operand, src: Operand, dim: int, index: int) -> Algorithm:
    """A slice of one."""
    torch.empty(x.shape, device="meta").select(dim, index)  # torch's own error
    at = index % x.shape[dim]
    return Algorithm(lambda x, src, *args, **kwargs: torch.slice_scatter(x, src.unsqueeze(dim), dim, at, at + 1))
