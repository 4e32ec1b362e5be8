"""Slices along any dim, cut or not: because splits are exact, a slice of a cut dim is another split, and stays put."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.layout import Layout
from shardwise.layout.split import count, intersect, normalize, positions
from shardwise.rules.view import dim_of, ints
from shardwise.strategy.registry import rule
from shardwise.strategy.relayout import Carried, Relayout, call_with, flipped, rolled, same_call, sliced, unchanged
from shardwise.strategy.spec import Algorithm, Factors, Operand, PerCoords

Range = tuple[int, int, int]  # start, stop, step


def slices(x: Operand, dim: int, ranges: Sequence[Range], func: Callable[..., Any]) -> Relayout:
    """One output a range of `dim`. func(x, [(start, length, step), ...]) makes a rank's parts from local positions."""

    def carry(d: int) -> list[list[Carried]]:
        return [[Carried(d, sliced(*r) if d == dim else unchanged)] for r in ranges]

    def local_ranges(source: Layout, outputs: list[Layout], coords: tuple[int, ...]) -> tuple[Range, ...]:
        return tuple(_local_range(source, dim, r, coords) for r in ranges)

    return Relayout(len(ranges), carry, call_with(func, local_ranges))


def _local_range(source: Layout, dim: int, wanted: Range, coords: tuple[int, ...]) -> Range:
    """Where the wanted indices stand in what a rank holds."""
    start, stop, step = wanted
    held = source.held(dim, coords)
    if step == 1:
        before = count(intersect(held, ((0, start),)))
        inside = count(intersect(held, normalize([(start, stop)])))
        return before, before + inside, 1
    if not held:
        return 0, 0, 1
    a, b = held[0]  # a single interval: `sliced` saw to it
    first = max(start, start + -(-(a - start) // step) * step)
    last = min(stop, b)
    return (first - a, last - a, step) if first < last else (0, 0, 1)


def _slice_one(dim: int) -> Callable[..., Any]:
    def cut(x: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
        return _cut(x, dim, *ranges[0])

    return cut


def _slice_many(dim: int, container: type) -> Callable[..., Any]:
    def cut(x: torch.Tensor, ranges: Sequence[Range]) -> Any:
        return container(_cut(x, dim, *r) for r in ranges)

    return cut


def _cut(x: torch.Tensor, dim: int, start: int, stop: int, step: int) -> torch.Tensor:
    if step == 1:
        return x.narrow(dim, start, stop - start)
    return torch.ops.aten.slice(x, dim, start, stop, step)


@rule("narrow narrow_copy")
def narrow(x: Operand, dim: int, start: Any, length: int) -> Relayout | Algorithm:
    if isinstance(start, Operand):
        return Algorithm(lambda x, dim, start, length: x.narrow(dim, int(start.item()), length))
    d = dim_of(dim, x.ndim)
    first = start + x.shape[d] if start < 0 else start
    return slices(x, d, [(first, first + length, 1)], _slice_one(d))


@rule("slice slice_copy")
def slice_(x: Operand, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Relayout:
    d = dim_of(dim, x.ndim)
    return slices(x, d, [clipped(start, end, step, x.shape[d])], _slice_one(d))


def clipped(start: Any, end: Any, step: Any, n: int) -> Range:
    """The range a Python slice of positive step means on n indices."""
    a, b, s = slice(start, end, step).indices(n)
    return a, max(a, b), s


def parts_of(sizes: Sequence[int]) -> list[Range]:
    out, at = [], 0
    for size in sizes:
        out.append((at, at + size, 1))
        at += size
    return out


@rule("unsafe_split unsafe_split_with_sizes")
def unsafe_split(x: Operand, *args: Any, **named: Any) -> Relayout:
    return dataclasses.replace(split(x, *args, func=_split_apart, **named), may_alias=False)


@rule("unsafe_chunk")
def unsafe_chunk(x: Operand, chunks: int, dim: int = 0) -> Relayout:
    return dataclasses.replace(chunk(x, chunks, dim, func=_split_apart), may_alias=False)


def _split_apart(dim: int, container: type) -> Callable[..., Any]:
    """Parts that are no views to autograd: each may be written without the others counting as changed."""

    def cut(x: torch.Tensor, ranges: Sequence[Range]) -> Any:
        return container(torch.unsafe_split_with_sizes(x, [stop - start for start, stop, _ in ranges], dim))

    return cut


@rule("split split_with_sizes split_copy split_with_sizes_copy")
def split(
    x: Operand, split_size_or_sections: Any = None, dim: int = 0, func: Any = _slice_many, **named: Any
) -> Relayout:
    wanted = split_size_or_sections if split_size_or_sections is not None else next(iter(named.values()))
    d = dim_of(dim, x.ndim)
    n = x.shape[d]
    if isinstance(wanted, int):
        wanted = [min(wanted, n - i) for i in range(0, n, wanted)] if wanted and n else [n]
    return slices(x, d, parts_of(wanted), func(d, tuple))


@rule("chunk")
def chunk(x: Operand, chunks: int, dim: int = 0, func: Any = _slice_many) -> Relayout:
    d = dim_of(dim, x.ndim)
    n = x.shape[d]
    size = -(-n // chunks) if n and chunks > 0 else 0  # torch's own error for chunks <= 0 comes from the meta call
    sizes = [min(size, n - i) for i in range(0, n, size)] if size else [0] * chunks
    return slices(x, d, parts_of(sizes), func(d, tuple))


@rule("tensor_split")
def tensor_split(x: Operand, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Relayout | Algorithm:
    wanted = indices_or_sections if indices_or_sections is not None else next(iter(named.values()))
    if isinstance(wanted, Operand):
        return Algorithm(lambda x, where, dim=0: x.tensor_split(where.tolist(), dim))
    d = dim_of(dim, x.ndim)
    n = x.shape[d]
    if isinstance(wanted, int):
        small, extra = divmod(n, wanted)
        ranges = parts_of([small + (i < extra) for i in range(wanted)])
    else:
        edges = [0, *(clipped(None, i, 1, n)[1] for i in wanted), n]
        ranges = [(a, max(a, b), 1) for a, b in zip(edges, edges[1:], strict=False)]
    return slices(x, d, ranges, _slice_many(d, tuple))


@rule("fliplr")
def fliplr(x: Operand) -> Relayout:
    return flip(x, 1)


@rule("flipud")
def flipud(x: Operand) -> Relayout:
    return flip(x, 0)


@rule("flip")
def flip(x: Operand, *dims: Any, **named: Any) -> Relayout:
    turned = {dim_of(d, x.ndim) for d in ints(dims or tuple(named.values()))}

    def carry(d: int) -> list[list[Carried]]:
        return [[Carried(d, flipped(x.shape[d]) if d in turned else unchanged)]]

    return Relayout(1, carry, same_call(torch.flip, tuple(turned)))


@rule("roll")
def roll(x: Operand, shifts: Any, dims: Any = ()) -> Relayout | Algorithm:
    """A rank rolls what it holds by as many indices as wrap around."""
    by = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    along = (dims,) if isinstance(dims, int) else tuple(dims)
    if not along and len(by) == 1:
        # what crosses from one rank's part to another's moves, so that the shape comes back
        flat = lambda x: x.flatten().roll(by, (0,)).redistribute(placements=x.flatten().placements)  # noqa: E731
        return Algorithm(lambda x, *args, **kwargs: flat(x).view(x.shape))
    turns: dict[int, int] = {}
    for d, n in zip((dim_of(d, x.ndim) for d in along), by, strict=False):
        turns[d] = (turns.get(d, 0) + n) % max(x.shape[d] if x.ndim else 1, 1)

    def carry(d: int) -> list[list[Carried]]:
        return [[Carried(d, rolled(x.shape[d], turns[d]) if d in turns else unchanged)]]

    def wrapped(source: Layout, outputs: list[Layout], coords: tuple[int, ...]) -> tuple[int, ...]:
        size = source.shape
        return tuple(count(intersect(source.held(d, coords), ((size[d] - n, size[d]),))) for d, n in turns.items())

    return Relayout(1, carry, call_with(lambda v, by: torch.roll(v, by, tuple(turns)), wrapped))


@rule("select select_copy")
def select(x: Operand, dim: int, index: Any) -> Factors | None:
    """Of a cut dim, the holder of the index keeps it and the others add zeros: a Partial sum, and nothing moves."""
    if isinstance(index, Operand):
        return None
    d = dim_of(dim, x.ndim)
    at = index + x.shape[d] if index < 0 else index
    names = tuple(f"d{i}" for i in range(x.ndim))

    def local(inputs: list[Layout], outputs: list[Layout]) -> Any:
        layout = inputs[0]
        if not layout.is_cut(d):
            return lambda v: v.select(d, at)
        return _picker(layout, d, at)

    reduce = "sum" if x.dtype is not torch.bool else "bor"
    outs = (*names[:d], *names[d + 1 :])
    stays = lambda inputs: not inputs[0].is_cut(d)  # noqa: E731
    return Factors(
        [names], [outs], linear="joint", reduce={names[d]: reduce}, local=local, aliases=stays, may_alias=True
    )


def _picker(layout: Layout, dim: int, index: int) -> Any:
    position = lambda coords: positions(layout.held(dim, coords), ((index, index + 1),))  # noqa: E731

    def pick(x: torch.Tensor, found: Any) -> torch.Tensor:
        start = found[0][0] if found else 0
        mine = x.narrow(dim, start, 1 if found else 0)
        return mine.any(dim) if x.dtype is torch.bool else mine.sum(dim, dtype=x.dtype)  # of nothing: zeros

    return PerCoords(pick, position)


@rule("unbind unbind_copy")
def unbind(x: Operand, dim: int = 0) -> Factors:
    """The dim that is taken apart must be whole."""
    d = dim_of(dim, x.ndim)
    names = tuple(None if i == d else f"d{i}" for i in range(x.ndim))
    return Factors([names], [(*names[:d], *names[d + 1 :])] * x.shape[d], linear="joint")
