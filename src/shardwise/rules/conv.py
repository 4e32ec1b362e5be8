"""Convolutions: batch and channels are factors, a spatial dim that is cut gets halos. Windows as they are
(Tensor.unfold) and as columns (F.unfold), and columns added up (F.fold)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.comm.base import Coords
from shardwise.layout import Layout, Partial, Shard
from shardwise.layout.split import Interval, Intervals, count
from shardwise.rules.halo import Halo, Halos, Reach, cut_like, needs
from shardwise.rules.view import dim_of
from shardwise.strategy.program import Windowed, run_local, whole
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Operand, PerCoords, Result

Ints = tuple[int, ...]


class Scatter(Reach):
    """The transpose: input j adds to the outputs j * stride - before + dilation * t, 0 <= t < kernel."""

    def window(self, start: int, stop: int) -> Interval:
        first = -((self.span - 1 - start - self.before) // self.stride)
        return first, max((stop - 1 + self.before) // self.stride, first) + 1  # not none, even if none adds to them

    def first_at(self, row: int) -> int:
        return row * self.stride - self.before + self.span // 2


@dataclass(frozen=True)
class Conv:
    """The static arguments of a convolution, one number a spatial dim; `low` and `high` are the padding."""

    transposed: bool
    stride: Ints
    low: Ints
    high: Ints
    dilation: Ints
    extra: Ints  # output_padding
    groups: int

    def call(self, x: Any, weight: Any, bias: Any, groups: int, cut: Sequence[int] = ()) -> Any:
        """torch's own, without the padding of the spatial dims `cut`."""
        low, high, extra = ([0 if i in cut else n for i, n in enumerate(v)] for v in (self.low, self.high, self.extra))
        func = getattr(torch, f"conv{'_transpose' if self.transposed else ''}{len(low)}d")
        if self.transposed:
            return func(x, weight, bias, self.stride, low, extra, groups, self.dilation)
        if low != high:
            x, low = F.pad(x, [n for side in zip(low[::-1], high[::-1], strict=True) for n in side]), [0] * len(low)
        return func(x, weight, bias, self.stride, low, self.dilation, groups)

    def halos(self, layout: Layout, kernel: Sequence[int], out: Sequence[int]) -> Halos:
        """The cut spatial dims of which outputs read more than the input at the same place."""
        kind, found = Scatter if self.transposed else Reach, {}
        for i, k in enumerate(kernel):
            d = layout.ndim - len(kernel) + i
            if layout.is_cut(d) and (k, self.stride[i], self.low[i], self.high[i], self.extra[i]) != (1, 1, 0, 0, 0):
                reach = kind(layout.shape[d], out[d], k, self.stride[i], self.dilation[i], self.low[i])
                found[d] = Halo(layout, d, reach)
        return found

    def local(self, channels: int, halos: Halos, output: Layout) -> PerCoords:
        """What a rank computes: of its windows, and of its share of the channels."""
        spatial = len(self.stride)

        def of(coords: Coords) -> tuple[Ints, tuple[Ints, ...]]:
            return output.local_shape_at(coords), tuple((d, *_edges(h, coords)) for d, h in halos.items())

        def convolve(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
            *bias, (shape, edges) = rest
            x = _padded(x, {d: (low, high) for d, low, high, _ in edges})
            added = bias[0].view(-1, *[1] * spatial) if bias else 0
            if 0 in shape or not x.numel():  # torch takes no empty channels: the sum of nothing, connected to all
                return (x.sum() + weight.sum()).to(x.dtype).expand(shape) + added
            groups = max(self.groups * x.shape[-spatial - 1] // channels, 1)
            cut = [d - x.dim() + spatial for d, *_ in edges]
            if not self.transposed or not cut:
                return self.call(x, weight, bias[0] if bias else None, groups, cut)
            out = self.call(x, weight, None, groups, cut)
            return _padded(out, {d: (-at, at + shape[d] - out.shape[d]) for d, _, _, at in edges}) + added

        return PerCoords(convolve, of)


def _edges(halo: Halo, coords: Coords) -> Ints:
    """Rows of padding before and after what a rank gets, and where its outputs begin in those of its window."""
    made, got, reach = halo.made(coords), halo.needs(coords), halo.reach
    if not made:
        return 0, 0, 0
    first, last = reach.window(*made[0])
    start, stop = got[0] if got else (first, first)
    return start - first, last - stop, made[0][0] + reach.before - first * reach.stride


def _padded(x: torch.Tensor, sides: dict[int, Interval]) -> torch.Tensor:
    """With rows of zeros before and after; less rows where negative."""
    return F.pad(x, [n for d in reversed(range(x.dim())) for n in sides.get(d, (0, 0))]) if sides else x


def _each(value: Any, count: int) -> Ints:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * count if len(values) == 1 else values


def convolution(
    spatial: int, transposed: bool, x: Operand, weight: Operand, bias: Any,
    stride: Any, padding: Any, dilation: Any, extra: Any, groups: int,
) -> Factors | Algorithm | None:  # fmt: skip
    """Factors; where a spatial dim is to be cut, a program with halos."""
    c, kernel = x.ndim - spatial - 1, weight.shape[2:]
    same, padding = padding == "same", 0 if padding in ("same", "valid") else padding
    stride, low, dilation, extra = (_each(v, spatial) for v in (stride, padding, dilation, extra))
    refused = (
        c not in (0, 1) or weight.ndim != spatial + 2 or min(*x.shape[c:], *weight.shape, *stride, *dilation) < 1
        or any(len(v) != spatial for v in (stride, low, dilation, extra)) or isinstance(padding, str)
        or (same and set(stride) != {1}) or any(map(lambda e, s, d: e >= max(s, d), extra, stride, dilation))
    )  # fmt: skip
    if refused:
        return None  # torch says why
    high = low
    if same:
        high = tuple(-(-e * (k - 1) // 2) for e, k in zip(dilation, kernel, strict=True))
        low = tuple(e * (k - 1) - h for e, k, h in zip(dilation, kernel, high, strict=True))
    conv = Conv(transposed, stride, low, high, dilation, extra, groups)
    operands = [x, weight] if bias is None else [x, weight, bias]
    metas = [torch.empty_strided(op.shape, op.layout.stride, dtype=op.dtype, device="meta") for op in operands]
    out = conv.call(metas[0], metas[1], None if bias is None else metas[2], groups)
    spec = _factors(conv, c, operands)
    spec.result = Result(tuple(out.shape), out.dtype, out.stride())
    plan = spec.assign(operands, [out], False)
    assert plan is not None
    inputs = [op.layout.replace(placements=p) for op, p in zip(operands, plan.inputs, strict=True)]
    halos = conv.halos(inputs[0], kernel, out.shape)
    if not halos:
        shapes = [layout.local_shape(rank) for rank in x.mesh.ranks for layout in inputs]
        if groups > 1 or any(0 in shape for shape in shapes):
            spec.local = lambda inputs, outputs: conv.local(x.shape[c], {}, outputs[0])
        return spec
    same_as = {"shape": out.shape, "dtype": out.dtype, "stride": out.stride()}
    output = cut_like(inputs[0], halos, placements=plan.outputs[0], **same_as)
    local = conv.local(x.shape[c], halos, output)

    def run(x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = (x, weight) if bias is None else (x, weight, bias)
        moved = [t.redistribute(placements=p) for t, p in zip(given, plan.inputs, strict=True)]
        return run_local(local.func, [Windowed(moved[0], needs(halos)), *moved[1:]], output, local.of)

    return Algorithm(run)


def _factors(conv: Conv, c: int, operands: Sequence[Operand]) -> Factors:
    """``n c s, o c k! -> n o s``. With groups, channels in and out are cut together: between groups that ranks have
    equally many of, or anywhere if a group has one of both."""
    x, weight = operands[:2]
    names: list[Any] = ["c", "c", "o", "o"] if conv.transposed else ["c", "o", "c", "o"]
    if conv.groups > 1:
        cuts = [
            (a, p)
            for op, dim in zip(operands, (c, 0, 0), strict=False)
            for a, p in enumerate(op.layout.placements)
            if isinstance(p, Shard) and p.dim == dim
        ]
        even = conv.groups % math.prod(x.mesh.shape[a] for a in {a for a, _ in cuts}) == 0
        single = conv.groups == x.shape[c] == weight.shape[0] and weight.shape[1] == 1
        names = ["g", "g", None, "g"] if single or (even and all(p.pieces is None for _, p in cuts)) else [None] * 4
    into, first, second, out = names
    batch, spatial = ["n"] * c, [f"s{i}" for i in range(x.ndim - c - 1)]
    ins = [(*batch, into, *spatial), (first, second, *[None] * len(spatial)), (out,)]
    return Factors(
        ins[: len(operands)], [(*batch, out, *spatial)], "each", joint=frozenset({0, 1}), addends=frozenset({2})
    )


def _register(n: int) -> None:
    @rule(f"conv{n}d")
    def conv(
        x: Operand, weight: Operand, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        return convolution(n, False, x, weight, bias, stride, padding, dilation, 0, groups)

    @rule(f"conv_transpose{n}d")
    def conv_transpose(
        x: Operand, weight: Operand, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
        groups: int = 1, dilation: Any = 1,
    ) -> Any:  # fmt: skip
        return convolution(n, True, x, weight, bias, stride, padding, dilation, output_padding, groups)


for _spatial in (1, 2, 3):
    _register(_spatial)


@rule("convolution _convolution convolution_overrideable")
def aten_convolution(
    x: Operand, weight: Operand, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, *flags: Any,
) -> Any:  # fmt: skip
    extra = output_padding if transposed else 0
    return convolution(weight.ndim - 2, transposed, x, weight, bias, stride, padding, dilation, extra, groups)


# -- windows as they are -----------------------------------------------------------------------------------
@rule("aten::unfold unfold_copy")
def windows(x: Operand, dimension: int, size: int, step: int) -> Any:
    """Along a dim that is cut, ranks get halos."""
    d = dim_of(dimension, x.ndim) if x.ndim else 0
    if not x.ndim or not x.layout.is_cut(d) or not 0 <= size <= x.shape[d] or step <= 0:
        names = tuple(None if i == d else f"d{i}" for i in range(x.ndim))
        return Factors([names], [(*names, None)], "joint", any_partial=True, may_alias=True)
    shape = (*x.shape[:d], (x.shape[d] - size) // step + 1, *x.shape[d + 1 :], size)
    strides = (*(s * (step if i == d else 1) for i, s in enumerate(x.layout.stride)), x.layout.stride[d])
    halos = {d: Halo(x.layout, d, Reach(x.shape[d], shape[d], size, step))}
    output = cut_like(x.layout, halos, shape=shape, stride=strides)

    def local(x: torch.Tensor, made: Intervals) -> torch.Tensor:
        return (x if made else _padded(x, {d: (0, size)})).unfold(d, size, step).narrow(d, 0, count(made))

    of = halos[d].made
    return Algorithm(lambda x, *args, **kwargs: run_local(local, [Windowed(x, needs(halos))], output, of))


@rule("unfold_backward")
def windows_added(x: Operand, input_sizes: Any, dim: int, size: int, step: int) -> Factors:
    """The windows of a dim added up where they came from, as istft does: the other dims pass."""
    names = tuple(None if i == dim_of(dim, x.ndim - 1) else f"d{i}" for i in range(x.ndim - 1))
    add_up = lambda x, sizes: torch.ops.aten.unfold_backward(x, sizes, dim, size, step)
    local = lambda inputs, outputs: PerCoords(add_up, outputs[0].local_shape_at)
    return Factors([(*names, None)], [names], "joint", local=local)


@rule("im2col")
def columns(x: Operand, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """F.unfold: where more than the batch is cut, windows along both dims, laid side by side."""
    if x.ndim not in (3, 4) or not any(x.layout.is_cut(d) for d in range(x.ndim - 3, x.ndim)):
        return _only_batch(x, 3, x.ndim - 1)

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        (kh, kw), (eh, ew), (ph, pw), (sh, sw) = (_each(v, 2) for v in (kernel_size, dilation, padding, stride))
        rows = F.pad(x, (pw, pw, ph, ph)).unfold(-2, eh * (kh - 1) + 1, sh)[..., ::eh]
        both = rows.unfold(-2, ew * (kw - 1) + 1, sw)[..., ::ew]  # channels, rows, columns, kernel rows and columns
        return both.movedim((-2, -1), (-4, -3)).flatten(-5, -3).flatten(-2)

    return Algorithm(run)


@rule("col2im")
def fold(x: Operand, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """F.fold: a rank adds up the columns it holds, and the sum over the ranks is pending."""
    c, size, columns = x.ndim - 2, math.prod(_each(kernel_size, 2)), x.shape[-1]
    if c not in (0, 1) or x.shape[c] % size or not (x.layout.is_cut(c) or x.layout.is_cut(c + 1)):
        return _only_batch(x, 2, x.ndim + 1)

    def add_up(x: torch.Tensor, held: Intervals) -> torch.Tensor:
        at = torch.cat([torch.arange(a, b, device=x.device) for a, b in ((0, 0), *held)])
        every = x.new_zeros(*x.shape[:-1], columns).index_add(c + 2, at, x)
        every = _padded(every, {} if x.shape[c] else {c: (0, 1)})  # torch takes no empty channels
        return F.fold(every.flatten(c, c + 1), output_size, kernel_size, dilation, padding, stride)[
            ..., : x.shape[c], :, :
        ]

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        x = x.unflatten(c, (-1, size))
        if x._layout.is_cut(c + 1) or any(p.is_partial() and p != Partial() for p in x.placements):
            x = whole(x, (c + 1,))
        layout = x._layout
        places = [Partial() if p.is_shard(c + 2) else p for p in layout.placements]
        output = layout.replace(shape=(*layout.shape[: c + 1], *_each(output_size, 2)), placements=places)
        return run_local(add_up, [x], output, lambda coords: layout.held(c + 2, coords))

    return Algorithm(run)


def _only_batch(x: Operand, others: int, out: int) -> Factors:
    """A batch dim passes, the others are whole."""
    batch = ["n"] * (x.ndim - others)
    return Factors([(*batch, *[None] * others)], [(*batch, *[None] * (out - len(batch)))], "joint")
