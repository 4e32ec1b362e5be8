"""Views and reshapes: permuting, merging, cutting, adding and repeating dims, and slices. Nothing moves where the cut
can follow: splits are exact, so a slice of a cut dim is another split.

An op named ..._copy has the rule of its view: the engine sees that torch shares no memory there, and copies."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.errors import dim_from_front
from shardwise.layout import Layout, contiguous_stride
from shardwise.layout.split import Intervals, count, intersect, normalize, positions
from shardwise.strategy import Algorithm, Factors, Named, Operand, Relayout, Tensor, call_with, factors, line, same_call
from shardwise.strategy.lookup import adds_up, sum_of
from shardwise.strategy.memory import restrided, stored
from shardwise.strategy.registry import program, rule
from shardwise.strategy.relayout import carried, in_local_shape, local_range
from shardwise.strategy.set_maps import Carried, Range, flipped, regrouped, repeated, rolled, sliced
from shardwise.strategy.spec import LocalCall, PerCoords


def dims_of(dims: int | Sequence[int], ndim: int) -> list[int]:
    """One dim or several, counted from the front."""
    return [dim_from_front(d, ndim) for d in ((dims,) if isinstance(dims, int) else dims)]


def ints(sizes: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """view(2, 3), view((2, 3)) and view(size=(2, 3)) alike. What follows a tuple is something else, as strides."""
    sizes = sizes or tuple(named.values()) or ((),)
    return tuple(sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes)


def permutation(order: Sequence[int]) -> Relayout:
    """Output dim i is input dim order[i]. Ranks run the op that was called: a tensor class may know just that one."""
    return carried({d: i for i, d in enumerate(order)}, None)


def to_shape(x: Operand, shape: Sequence[int], may_alias: bool = True) -> Relayout:
    """The same elements in row-major order under another shape. Whether a view is legal was asked of the global
    strides; a local tensor may be stored otherwise (by a kernel, for an odd shard), and is copied then."""
    local = in_local_shape(torch.Tensor.reshape)
    return Relayout(1, lambda dim: [regrouped(x.shape, dim, shape)], local, may_alias, view=torch.Tensor.view)


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
    if sizes[0].itemsize == x.dtype.itemsize:
        return factors("*d -> *d", [x])
    as_bytes = lambda v: v.view(sizes[0])
    return factors("*d n! -> *d n", [x], call=lambda v: as_bytes(v.contiguous()), view=as_bytes)


rule("_reshape_alias")(functools.partial(reshape, may_alias=False))


@rule("_unsafe_view")
def unsafe_view(x: Operand, shape: Sequence[int]) -> Relayout:
    """To autograd this is no view, so ranks must not make one either."""
    sizes = filled_in(shape, math.prod(x.shape))
    local = in_local_shape(lambda v, here: torch.ops.aten._unsafe_view(v.reshape(here), here))
    return Relayout(1, lambda dim: [regrouped(x.shape, dim, sizes)], local, may_alias=False)


def _as_pairs(x: torch.Tensor) -> torch.Tensor:
    """Of nothing, torch's gradient of view_as_real refuses an expanded tensor."""
    return torch.view_as_real(x) if x.numel() else torch.stack([x.real, x.imag], -1)


line("view_as_real view_as_real_copy", "*b -> *b pair", linear="joint", call=_as_pairs)
_as_complex = lambda v: torch.view_as_complex(v.contiguous())
_pairs: dict[str, Any] = {"call": _as_complex, "view": torch.view_as_complex, "may_alias": True}
line("view_as_complex view_as_complex_copy", "*b pair! -> *b", linear="joint", **_pairs)


@rule("flatten ravel")
def flatten(x: Operand, start_dim: int = 0, end_dim: int = -1) -> Relayout:
    first, last = dims_of((start_dim, end_dim), x.ndim)
    return to_shape(x, (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@rule("unflatten")
def unflatten(x: Operand, dim: int, sizes: Sequence[int]) -> Relayout:
    d = dim_from_front(dim, x.ndim)
    return to_shape(x, (*x.shape[:d], *filled_in(sizes, x.shape[d]), *x.shape[d + 1 :]))


rule("t t_copy T")(lambda x: permutation(range(x.ndim)[::-1]))
rule("permute permute_copy")(lambda x, *dims, **named: permutation(dims_of(ints(dims, named), x.ndim)))


@rule("mT mH")
def swapped(x: Operand) -> Relayout | None:
    """The last two dims change places. Of a number, both are the number itself (which torch still takes)."""
    return transpose(x, -2, -1) if x.ndim and not x.dtype.is_complex else permutation([]) if not x.ndim else None


@rule("transpose transpose_copy swapaxes swapdims")
def transpose(x: Operand, dim0: int, dim1: int) -> Relayout:
    a, b = dims_of((dim0, dim1), x.ndim)
    return permutation([{a: b, b: a}.get(d, d) for d in range(x.ndim)])


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
    at = dim_from_front(dim, x.ndim + 1)
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
def repeat(x: Operand, *repeats: object, **named: object) -> Relayout:
    """A cut dim is held block by block: the same set in each."""
    times = ints(repeats, named)
    new = len(times) - x.ndim
    blocks = {d: repeated(n, times[d + new]) for d, n in enumerate(x.shape)}
    return carried({d: d + new for d in blocks}, same_call(torch.Tensor.repeat, times), blocks)


# -- slices ------------------------------------------------------------------------------------------------
def slices(dim: int, ranges: Sequence[Range], split: Callable[..., Sequence[torch.Tensor]] | None = None) -> Relayout:
    """One output for each range of `dim`. Ranges that follow each other may be made by `split`, a function of torch
    that takes their sizes: autograd then knows that they are views of one call, or no views at all."""
    carry = lambda d: [[Carried(d, sliced(*r)) if d == dim else Carried(d)] for r in ranges]
    local_ranges = lambda source, outputs, coords: tuple(local_range(source, dim, r, coords) for r in ranges)

    def cut(v: torch.Tensor, ranges: Sequence[Range]) -> Sequence[torch.Tensor]:
        if split is not None:
            return split(v, [stop - start for start, stop, _ in ranges], dim)
        return tuple(_slice(v, dim, *r) for r in ranges)

    may_alias = split is not torch.unsafe_split_with_sizes
    return Relayout(len(ranges), carry, call_with(cut, local_ranges), may_alias=may_alias)


def _slice(x: torch.Tensor, dim: int, start: int, stop: int, step: int) -> torch.Tensor:
    return x.narrow(dim, start, stop - start) if step == 1 else torch.ops.aten.slice(x, dim, start, stop, step)


def clipped(start: object, end: object, step: object, n: int) -> Range:
    """The range a Python slice of positive step means on n indices."""
    a, b, s = slice(start, end, step).indices(n)
    return a, max(a, b), s


@rule("slice slice_copy")
def slice_(x: Operand, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Relayout:
    d = dim_from_front(dim, x.ndim)
    wanted = clipped(start, end, step, x.shape[d] if x.ndim else 0)
    my_range = lambda source, outputs, coords: local_range(source, d, wanted, coords)
    cut = (lambda v, r: v.narrow(d, r[0], r[1] - r[0])) if wanted[2] == 1 else lambda v, r: _slice(v, d, *r)
    return carried(range(x.ndim), call_with(cut, my_range), {d: sliced(*wanted)})


@rule("narrow narrow_copy")
def narrow(x: Operand, dim: int, start: Any, length: int) -> Relayout | Algorithm:
    if isinstance(start, Operand):
        return Algorithm(lambda x, dim, start, length: x.narrow(dim, int(start.item()), length))
    first = start + x.shape[dim_from_front(dim, x.ndim)] if start < 0 else start
    return slice_(x, dim, first, first + length)


@rule("split split_with_sizes split_copy split_with_sizes_copy")
def split(x: Operand, sizes: Any = None, dim: int = 0, separate: bool = False, **named: Any) -> Relayout:
    d, wanted = dim_from_front(dim, x.ndim), next(iter(named.values()), sizes)
    if isinstance(wanted, int):
        n = x.shape[d]
        wanted = [min(wanted, n - start) for start in range(0, n, wanted)] if wanted and n else [n]
    ranges = [(end - size, end, 1) for size, end in zip(wanted, itertools.accumulate(wanted))]
    return slices(d, ranges, torch.unsafe_split_with_sizes if separate else torch.split_with_sizes)


@rule("chunk")
def chunk(x: Operand, chunks: int, dim: int = 0, separate: bool = False) -> Relayout:
    n = x.shape[dim_from_front(dim, x.ndim)]
    size = -(-n // chunks) if chunks > 0 else 0  # torch's own error for chunks <= 0 comes from the meta call
    return split(x, size or [0] * chunks, dim, separate)


rule("unsafe_split unsafe_split_with_sizes")(functools.partial(split, separate=True))
rule("unsafe_chunk")(functools.partial(chunk, separate=True))


@rule("tensor_split")
def tensor_split(x: Operand, where: Any = None, dim: int = 0, **named: Any) -> Relayout | Algorithm:
    d, wanted = dim_from_front(dim, x.ndim), next(iter(named.values()), where)
    n = x.shape[d]
    if isinstance(wanted, Operand):
        return Algorithm(lambda x, where, dim=0: x.tensor_split(where.tolist(), dim))
    if isinstance(wanted, int):
        small, extra = divmod(n, wanted)
        wanted = [i * small + min(i, extra) for i in range(1, wanted)]
    edges = [0, *(clipped(None, i, 1, n)[1] for i in wanted), n]
    return slices(d, [(a, max(a, b), 1) for a, b in itertools.pairwise(edges)])


@rule("unbind unbind_copy")
def unbind(x: Operand, dim: int = 0) -> Factors:
    """The dim that is unbound must be whole."""
    return factors("*d!dim -> *d-dim", [x], "joint", dim=dim, outputs=x.shape[dim_from_front(dim, x.ndim)])


@rule("flip")
def flip(x: Operand, *dims: Any, **named: Any) -> Relayout:
    turned = {d: flipped(x.shape[d]) for d in dims_of(ints(dims, named), x.ndim) if x.ndim}
    return carried(range(x.ndim), same_call(torch.flip, tuple(turned)), turned)


rule("fliplr")(functools.partial(flip, dims=1))
rule("flipud")(functools.partial(flip, dims=0))


@stored("roll", device="cpu")
def _roll_memory(
    out: torch.Tensor, x: torch.Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()
) -> None:
    """As that of what torch puts together for each dim; without dims, of a line."""
    along = dims_of(dims, x.dim())
    if not x.numel() or not x.dim():
        return
    for d, n in zip(along, (shifts,) if isinstance(shifts, int) else shifts, strict=False):
        start = -n % x.shape[d]
        x = torch.cat([x.narrow(d, start, x.shape[d] - start), x.narrow(d, 0, start)], d)
    restrided(out, x.stride() if along else contiguous_stride(x.shape))


@rule("roll")
def roll(x: Operand, shifts: Any, dims: int | Sequence[int] = ()) -> Relayout | Algorithm:
    """A rank rolls what it holds by as many indices as wrap around."""
    by, along = ((shifts,) if isinstance(shifts, int) else tuple(shifts)), dims_of(dims, x.ndim)
    if not along and len(by) == 1:
        # what crosses from one rank's part to another's moves, so that the shape comes back
        flat = lambda x: x.flatten().roll(by, (0,)).redistribute(placements=x.flatten().placements)
        return Algorithm(lambda x, *args, **kwargs: flat(x).view(x.shape))
    turns = {d: sum(n for e, n in zip(along, by) if e == d) % max(x.shape[d], 1) for d in along if x.ndim}
    ends = {d: normalize([(x.shape[d] - n, x.shape[d])]) for d, n in turns.items()}
    wrapped = lambda source, outputs, coords: tuple(count(intersect(source.held(d, coords), ends[d])) for d in ends)
    local = call_with(lambda v, by: torch.roll(v, by, tuple(turns)), wrapped)
    return carried(range(x.ndim), local, {d: rolled(x.shape[d], n) for d, n in turns.items()})


@rule("select select_copy")
def select(x: Operand, dim: int, index: Any) -> Factors | None:
    """Of a cut dim, the holder of the index keeps it and the others add zeros: a Partial sum, and nothing moves."""
    if isinstance(index, Operand):
        return None
    d = dim_from_front(dim, x.ndim)
    at = index + x.shape[d] if index < 0 else index

    def pick(v: torch.Tensor, found: Intervals) -> torch.Tensor:
        mine = v.narrow(d, found[0][0] if found else 0, len(found))
        return mine.any(d) if v.dtype is torch.bool else mine.sum(d, dtype=v.dtype)  # of nothing: zeros

    def local(inputs: list[Layout], outputs: list[Layout]) -> LocalCall:
        if not inputs[0].is_cut(d):
            return lambda v: v.select(d, at)
        return PerCoords(pick, lambda coords: positions(inputs[0].held(d, coords), ((at, at + 1),)))

    text = "*d -> *d-dim" if adds_up(x) else "*d!dim -> *d-dim"
    aliases = lambda inputs: not inputs[0].is_cut(d)
    more: dict[str, Any] = {"dim": d, "reduce": sum_of(x), "local": local, "aliases": aliases, "may_alias": True}
    return factors(text, [x], "joint", **more)
