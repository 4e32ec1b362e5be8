"""Convolutions: batch and channels are factors, a spatial dim that is cut gets halos. Windows as they are
(Tensor.unfold) and as columns (F.unfold), and columns added up (F.fold)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.comm.bridge import zeros_of
from shardwise.errors import dim_from_front
from shardwise.layout import Layout, Partial
from shardwise.layout.split import Intervals, count
from shardwise.strategy import Algorithm, Answer, Factors, Operand, PerCoords, Result, Tensor, factors, run_local, whole
from shardwise.strategy.lookup import pointable
from shardwise.strategy.memory import correct_thin, meta_like, restrided, suggested
from shardwise.strategy.program import indices, leaves_empty, padded, without_dims
from shardwise.strategy.registry import rule
from shardwise.strategy.windows import Halo, Halos, Reach, Scatter, cut_like, each, windowed


@dataclass(frozen=True)
class Conv:
    """The static arguments of a convolution, one number per spatial dim."""

    transposed: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    extra: tuple[int, ...]  # output_padding
    groups: int

    def call(self, operands: Sequence[Any], groups: int, cut: Sequence[int] = ()) -> Any:
        """torch's own, without the padding of the spatial dims `cut`."""
        x, weight, bias = (*operands, None)[:3]
        padding, extra = ([0 if i in cut else n for i, n in enumerate(v)] for v in (self.padding, self.extra))
        func = getattr(torch, f"conv{'_transpose' if self.transposed else ''}{len(padding)}d")
        if self.transposed:
            return func(x, weight, bias, self.stride, padding, extra, groups, self.dilation)
        return func(x, weight, bias, self.stride, padding, self.dilation, groups)

    def set_strides(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, device: str) -> None:
        """Give the result on meta tensors the strides it has on this device: with channels innermost where one of the
        operands has them there, and the kernel keeps that."""
        x = x if x.dim() == weight.dim() else x[None]
        flat = weight.dim() == 3  # which torch computes as an image of one row
        if flat:
            x, weight = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
        last = [f for f in map(suggested, (x, weight)) if f != torch.contiguous_format]
        if not last or (last[0] == torch.channels_last_3d and device == "cpu" and not self._by_onednn(x, weight)):
            return
        whole = out.unsqueeze(-2) if flat else out
        whole = whole if whole.dim() == x.dim() else whole[None]
        stride = torch.empty(whole.shape, device="meta", memory_format=last[0]).stride()
        stride = (*stride[:2], stride[3]) if flat else stride
        restrided(out, stride[-out.dim() :])

    def _by_onednn(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether torch calls oneDNN on a CPU (its own condition, `use_mkldnn` in C++): for small work it does not."""
        if x.dtype in (torch.bfloat16, torch.float16):
            return True
        spread = {*self.stride, *self.dilation} != {1} or x.shape[0] >= 16 or torch.get_num_threads() > 1
        large = self.groups > 1 or min(weight.shape[-2:]) > 3 or x.shape[0] > 1 or math.prod(x.shape[:4]) > 20480
        return x.dtype == torch.float32 and large and (spread or tuple(weight.shape[-2:]) != (1, 1))

    def halos(self, layout: Layout, kernel: Sequence[int], out: Sequence[int]) -> Halos:
        """The cut spatial dims of which outputs read more than the input at the same place."""
        kind, found = Scatter if self.transposed else Reach, {}
        for i, k in enumerate(kernel):
            d = layout.ndim - len(kernel) + i
            if layout.is_cut(d) and (k, self.stride[i], self.padding[i], self.extra[i]) != (1, 1, 0, 0):
                reach = kind(layout.shape[d], out[d], k, self.stride[i], self.dilation[i], self.padding[i])
                found[d] = Halo(layout, d, reach)
        return found

    def local(self, channels: int, halos: Halos, output: Layout) -> PerCoords:
        """What a rank computes: of its windows, and of its share of the channels."""
        spatial = len(self.stride)
        edges_of = lambda coords: tuple((d, *halo.edges(coords)) for d, halo in halos.items())

        def convolve(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
            *bias, (shape, edges) = rest
            x = padded(x, {d: (low, high) for d, low, high, _ in edges})
            added = bias[0].view(-1, *[1] * spatial) if bias else 0
            cut = [d - x.dim() + spatial for d, *_ in edges]
            at_once = not self.transposed or not cut  # else the bias is added later
            if 0 in shape or not x.numel():  # torch takes no empty channels: a sum of no products
                operands = [x, weight, *bias] if at_once else [x, weight]
                nothing = zeros_of([(shape, x.dtype)], operands, seen=2, bilinear=True)[0]
                return nothing if 0 in shape and at_once else nothing + added
            groups = max(self.groups * x.shape[-spatial - 1] // channels, 1)
            if at_once:
                return self.call([x, weight, *bias], groups, cut)
            out = self.call([x, weight], groups, cut)
            return padded(out, {d: (-at, at + shape[d] - out.shape[d]) for d, _, _, at in edges}) + added

        return PerCoords(convolve, lambda coords: (output.local_shape_at(coords), edges_of(coords)))


@rule("convolution _convolution convolution_overrideable")
def convolution(
    x: Operand, weight: Operand, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    transposed: bool = False, output_padding: Any = 0, groups: int = 1, *flags: object, spatial: int = 0,
) -> Factors | Algorithm | None:  # fmt: skip
    """Factors; where a spatial dim is to be cut, a program with halos."""
    spatial, extra = spatial or weight.ndim - 2, output_padding if transposed else 0
    c, kernel = x.ndim - spatial - 1, weight.shape[2:]
    stride, dilation, extra = (each(v, spatial) for v in (stride, dilation, extra))
    around = [e * (k - 1) for e, k in zip(dilation, kernel)]
    if not transposed and set(stride) == {1} and padding == "same" and not any(n % 2 for n in around):
        padding = [n // 2 for n in around]  # else torch pads one side first
    padding = each(0 if padding == "valid" and not transposed else padding, spatial)
    refused = (
        c not in (0, 1) or weight.ndim != spatial + 2 or min(*x.shape[c:], *weight.shape, *stride, *dilation) < 1
        or any(len(v) != spatial for v in (stride, padding, dilation, extra)) or isinstance(padding[0], str)
        or (bias is not None and tuple(bias.shape) != (weight.shape[1] * groups if transposed else weight.shape[0],))
        or x.shape[c] != (weight.shape[0] if transposed else weight.shape[1] * groups)  # else a rank without channels
        or any(map(lambda e, s, d: e >= max(s, d), extra, stride, dilation))  # would not notice
        or (not transposed and any(map(lambda n, p, e: n + 2 * p <= e, x.shape[c + 1 :], padding, around)))
    )  # fmt: skip
    if refused:
        return None  # torch goes on, or says why
    conv = Conv(transposed, stride, padding, dilation, extra, groups)
    operands = [x, weight] if bias is None else [x, weight, bias]
    metas = [meta_like(op.layout) for op in operands]
    out = conv.call(metas, groups)
    conv.set_strides(out, metas[0], metas[1], x.layout.device.type)
    if not out.numel():
        correct_thin(lambda *given: conv.call(list(given), groups), x.layout.device.type, out, metas, {})
    # with groups, channels in and out are cut together, between groups; the dim before the channels is the batch
    n, (ins, outs) = "n " * c, ("(g c)", "(g o)") if groups > 1 else ("c", "o")
    text = f"{n}{ins} *s, {f'{ins} o' if transposed else f'{outs} c'} *k!, +{outs}? -> {n}{outs} *s"
    result = Result(tuple(out.shape), out.dtype, out.stride())
    spec = factors(text, operands, "each", sizes={"g": groups}, result=result)
    plan: Any = spec.assign(operands, [out], False)
    inputs = [op.layout.replace(placements=p) for op, p in zip(operands, plan.inputs)]
    halos = conv.halos(inputs[0], kernel, out.shape)
    if not halos:
        if groups > 1 or any(map(leaves_empty, inputs)):
            spec.local = lambda inputs, outputs: conv.local(x.shape[c], {}, outputs[0])
        return spec
    output = cut_like(inputs[0], halos, out, plan.outputs[0])
    local = conv.local(x.shape[c], halos, output)

    def run(x: Tensor, weight: Tensor, bias: Tensor = None, *args: object, **kwargs: object) -> Tensor:
        x, *others = (t.redistribute(placements=p) for t, p in zip((x, weight, bias), plan.inputs))
        return run_local(local.func, [windowed(x, halos), *others], output, local.value_at)

    return Algorithm(run, knows_memory=True)


def _register(name: str, order: str, **form: int) -> None:
    """torch's own function, with its settings in this order."""
    given = lambda args: form | dict(zip(order.split(), args))
    rule(name)(lambda x, weight, bias=None, *args, **settings: convolution(x, weight, bias, **given(args), **settings))


for _n in (1, 2, 3):
    _register(f"conv{_n}d", "stride padding dilation groups", spatial=_n, transposed=False)
    _register(f"conv_transpose{_n}d", "stride padding output_padding groups dilation", spatial=_n, transposed=True)


# -- windows as they are -----------------------------------------------------------------------------------
@rule("aten::unfold")
def windows(x: Operand, dimension: int, size: int, step: int, copies: bool = False) -> Answer:
    """Along a dim that is cut, ranks get halos. Windows overlap in memory where torch does not copy them."""
    d = dim_from_front(dimension, x.ndim)
    if not x.layout.is_cut(d) or not 0 <= size <= x.shape[d] or step <= 0:
        return factors("*d!dim -> *d size", [x], "joint", dim=d, any_partial=True, may_alias=True)
    shape = (*x.shape[:d], (x.shape[d] - size) // step + 1, *x.shape[d + 1 :], size)
    strides = (*(s * (step if i == d else 1) for i, s in enumerate(x.layout.stride)), x.layout.stride[d])
    halos = {d: Halo(x.layout, d, Reach(x.shape[d], shape[d], size, step))}
    output = cut_like(x.layout, halos, Result(shape, x.dtype, strides))

    def local(x: torch.Tensor, made: Intervals) -> torch.Tensor:
        found = (x if made else padded(x, {d: (0, size)})).unfold(d, size, step).narrow(d, 0, count(made))
        return found.contiguous() if copies else found

    return Algorithm(lambda x, *args, **kwargs: run_local(local, [windowed(x, halos)], output, halos[d].made))


rule("unfold_copy")(functools.partial(windows, copies=True))


@rule("unfold_backward")
def windows_added(x: Operand, input_sizes: object, dim: int, size: int, step: int) -> Factors:
    """The windows of a dim added up where they came from, as istft does: the other dims pass."""
    add_up = lambda x, sizes: torch.ops.aten.unfold_backward(x, sizes, dim, size, step)
    local = lambda inputs, outputs: PerCoords(add_up, outputs[0].local_shape_at)
    return factors("*d!dim size! -> *d", [x], "joint", dim=dim, local=local)


@rule("im2col")
def columns(x: Operand, kernel_size: object, dilation: object, padding: object, stride: object) -> Answer:
    """F.unfold: where more than the batch is cut, windows along both dims, laid side by side."""
    if x.ndim not in (3, 4) or not any(x.layout.is_cut(d) for d in range(x.ndim - 3, x.ndim)):
        return factors("*n c! h! w! -> *n k s", [x], "joint")

    def run(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        (kh, kw), (eh, ew), (ph, pw), (sh, sw) = (each(v, 2) for v in (kernel_size, dilation, padding, stride))
        rows = F.pad(x, (pw, pw, ph, ph)).unfold(-2, eh * (kh - 1) + 1, sh)[..., ::eh]
        both = rows.unfold(-2, ew * (kw - 1) + 1, sw)[..., ::ew]  # channels, rows, columns, kernel rows and columns
        return both.movedim((-2, -1), (-4, -3)).flatten(-5, -3).flatten(-2)

    return Algorithm(run)


@rule("col2im")
def fold(x: Operand, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Answer:
    """F.fold: a rank adds up the columns it holds, and the sum over the ranks is pending."""
    c, size, columns = x.ndim - 2, math.prod(each(kernel_size, 2)), x.shape[-1]
    if c not in (0, 1) or x.shape[c] % size or not (x.layout.is_cut(c) or x.layout.is_cut(c + 1)):
        return factors("*n k! s! -> *n c h w", [x], "joint")

    def add_up(x: torch.Tensor, held: Intervals) -> torch.Tensor:
        every = x.new_zeros(*x.shape[:-1], columns).index_add(c + 2, indices(held, x.device), x)
        every = pointable(every, c)  # torch takes no empty channels
        summed = F.fold(every.flatten(c, c + 1), output_size, kernel_size, dilation, padding, stride)
        return summed.narrow(c, 0, x.shape[c])

    def run(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        x = x.unflatten(c, (-1, size))
        if x._layout.is_cut(c + 1) or any(p.is_partial() and p != Partial() for p in x.placements):
            x = whole(x, (c + 1,))
        layout = x._layout
        output = without_dims(layout, (c + 2,), True).replace(shape=(*layout.shape[: c + 1], *each(output_size, 2)))
        return run_local(add_up, [x], output, lambda coords: layout.held(c + 2, coords))

    return Algorithm(run)
