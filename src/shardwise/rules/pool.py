"""Pooling, and images at another size or from other places. Batch and channel dims pass. A spatial dim that is cut
stays cut: a rank calls the op itself on the rows its outputs read, beginning at a whole unit (of stride inputs and one
output, say), so that what the op makes there is what it makes on the whole, only counted from elsewhere: borders,
rounding up and divisors come out as they are. What only copies pixels fetches nothing."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.comm.base import Coords
from shardwise.layout import contiguous_stride
from shardwise.strategy import Algorithm, Answer, Factors, Operand, factors, line, rearrangement
from shardwise.strategy.copying import copied
from shardwise.strategy.empty_ranks import never_empty
from shardwise.strategy.memory import as_first_suggests, meta_like, stored
from shardwise.strategy.notation import parse
from shardwise.strategy.program import reduced, run_local
from shardwise.strategy.reading import rearranged
from shardwise.strategy.registry import rule
from shardwise.strategy.windows import Halo, Units, cut_like, each, resizing, sliding, windowed
from shardwise.wrapper import Wrapper, restride

ATEN = torch.ops.aten
Sizes = int | Sequence[int]


def spatial(x: Operand, dims: int, call: Any, reach: Callable[[int, int, int], Units], linear: str = "none") -> Answer:
    """An op on the last `dims` dims: call(x, sizes), with () for the sizes the call asks for, and reach(i, n, outputs)
    for the i-th of these dims. Of two results the second has flat positions in a plane of x."""
    planes = range(x.ndim - dims, x.ndim)
    metas = tree_leaves(call(meta_like(x.layout), ()))
    sizes = metas[0].shape
    cut = [d for d in planes if x.layout.is_cut(d)]
    if not cut or any(0 in (x.shape[d], sizes[d]) for d in planes):
        return on_planes(x, planes, lambda v: call(v, ()), linear, len(metas))
    if x.layout.is_partial:
        return Algorithm(lambda x, *args, **kwargs: call(reduced(x), ()))
    halos = {d: Halo(x.layout, d, reach(d - planes[0], x.shape[d], sizes[d])) for d in cut}
    outs = [cut_like(x.layout, halos, meta) for meta in metas]

    @cache
    def part_at(coords: Coords) -> Any:
        parts = [halos[d].reach.part(halos[d], coords) if d in cut else (0, x.shape[d], sizes[d], 0) for d in planes]  # type: ignore[attr-defined]
        return outs[0].local_shape_at(coords), *zip(*parts, strict=True)

    def local(v: torch.Tensor, mine: Any) -> Any:
        shape, rows, ends, made, skips = mine
        v = never_empty(v, dict.fromkeys(range(planes[0]), 1) | dict(zip(planes, map(operator.sub, ends, rows))))
        found = tree_leaves(call(v, made))
        for d, skip in zip(planes, skips):
            found = [out.narrow(d, skip, shape[d]) for out in found]
        if 0 in shape:
            found = [out[tuple(map(slice, shape))] for out in found]
        if len(found) == 2:
            places = zip(torch.unravel_index(found[1], v.shape[planes[0] :]), rows, x.shape[planes[0] :])
            found[1] = reduce(lambda flat, at: flat * at[2] + at[0] + at[1], places, torch.zeros_like(found[1]))
        return one_or_all(found)

    return Algorithm(lambda x, *args, **kwargs: run_local(local, [windowed(x, halos)], one_or_all(outs), part_at))


def one_or_all(results: Sequence[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def on_planes(x: Operand, planes: Sequence[int], call: Any, linear: str, outputs: int = 1) -> Factors:
    """call(x), which needs its planes whole. Averages of integers are rounded."""
    how = linear if x.dtype.is_floating_point else "none"
    return factors("*d!dim -> *d", [x], how, dim=planes, outputs=outputs, call=call, never_empty=True)


# -- which pools there are ---------------------------------------------------------------------------------
def slides(name: str, dims: int, dilated: bool, **more: Any) -> None:
    """Windows of one size."""

    @rule(name)
    def pool(x: Operand, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **named: Any) -> Answer:
        named.pop("return_indices", None)  # of torch.nn.functional, whose function of this name always returns them
        k, p = each(kernel_size, dims), each(padding, dims)
        s, e = each(stride or k, dims), each((args or (named.get("dilation", 1),))[0] if dilated else 1, dims)
        call = lambda v, sizes: getattr(ATEN, name)(v, k, s, p, *args, **named)
        return spatial(x, dims, call, lambda i, n, m: sliding(n, m, k[i], s[i], p[i], e[i]), **more)


def adapts(name: str, dims: int, **more: Any) -> None:
    """Windows for a size."""

    @rule(name)
    def pool(x: Operand, output_size: Any) -> Answer:
        call = lambda v, sizes: getattr(ATEN, name)(v, sizes or each(output_size, dims))
        return spatial(x, dims, call, lambda i, n, m: resizing(n, m), **more)


for _d, _in, _out in ((2, "h! w!", "y x"), (3, "d! h! w!", "z y x")):
    slides(f"avg_pool{_d}d", _d, dilated=False, linear="joint")
    slides(f"max_pool{_d}d_with_indices", _d, dilated=True)
    adapts(f"_adaptive_avg_pool{_d}d", _d, linear="joint")
    adapts(f"adaptive_max_pool{_d}d", _d)
    line(f"max_unpool{_d}d", f"*b {_in}, *b {_in} -> *b {_out}", "each", joint={0}, never_empty=True)
    line(f"max_pool{_d}d_with_indices_backward", f"*b {_in}, *b {_in}, *b {_in} -> *b {_out}", never_empty=True)
    line(  # without a batch, the samples have one all the same
        f"fractional_max_pool{_d}d",
        f"c {_in}, one! c k! -> c {_out}, c {_out} | n c {_in}, n c k! -> n c {_out}, n c {_out}",
        never_empty=True,
    )


@rule("max_pool1d")
def max_pool1d(x: Operand, *args: object, return_indices: bool = False, **named: object) -> Algorithm | None:
    """torch has a kernel of its own for CPUs where no gradient is wanted, which stores its result in order."""

    def run(value: Wrapper, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1,
            *flags: bool, ceil_mode: bool = False, **_: bool) -> Wrapper:  # fmt: skip
        rounding = flags[0] if flags else ceil_mode
        if value.device.type == "cpu" and not value.is_floating_point():
            raise NotImplementedError(f"max_pool1d is not implemented for {value.dtype} on CPUs")
        found: Wrapper = ATEN.max_pool1d_with_indices(value, kernel_size, stride or (), padding, dilation, rounding)[0]
        if value.device.type == "cpu" and not (value.requires_grad and torch.is_grad_enabled()):
            restride(found, contiguous_stride(tuple(found.shape)))
        return found

    wants_indices = return_indices or (len(args) > 5 and args[5])  # of torch.nn.functional
    return None if wants_indices else Algorithm(run, knows_memory=True)


# -- resampling --------------------------------------------------------------------------------------------
def nearest(name: str, dims: int) -> None:
    """An output copies one pixel; which one, torch itself says when it resizes the numbers 0, 1, 2, ..."""

    @rule(f"{name}{dims}d")
    def copy_pixels(x: Operand, output_size: Sequence[int], *scales: object) -> Answer:
        if output_size is None:
            return None  # factors instead, which torch makes sizes of
        dtype, read = torch.promote_types(x.dtype, torch.float32), getattr(ATEN, f"{name}{dims}d")
        device = "cpu" if x.layout.mesh.comm.outlined else x.layout.device  # and by their device
        along = lambda i, one, others: [one if j == i else others for j in range(dims)]  # kernels differ by their dims
        line = lambda i, n: torch.arange(n, dtype=dtype, device=device).view(1, 1, *along(i, n, 1))
        source = lambda i, n, m, by: read(line(i, n), along(i, m, 1), *along(i, by, None)).flatten().long().cpu()
        sizes = zip(x.shape[-dims:], output_size, [*scales, None, None, None][:dims], strict=True)
        return copied(x, {x.ndim - dims + i: source(i, *one) for i, one in enumerate(sizes)})


def smooth(name: str, dims: int, radius: int, antialias: bool = False) -> None:
    """Outputs are weighted sums of the inputs around them, `radius` steps away at most: of the input's grid or, with
    `antialias`, of the coarser of both grids."""

    @rule(name)
    def weigh_pixels(x: Operand, output_size: Sequence[int], align_corners: bool, *scales: Any) -> Answer:
        if output_size is None:
            return None
        sizes = zip(x.shape[-dims:], output_size, scales, strict=False)
        if align_corners or any(scale is not None and n * scale != m for n, m, scale in sizes):
            call = lambda v: getattr(ATEN, name)(v, output_size, align_corners, *scales)  # no units: nothing repeats
            return on_planes(x, range(x.ndim - dims, x.ndim), call, "joint")
        reach = lambda i, n, m: resizing(n, m, math.ceil(radius * max(n / m, 1)) + 1 if antialias else radius)
        resize = lambda v, sizes: getattr(ATEN, name)(v, sizes or output_size, align_corners)
        return spatial(x, dims, resize, reach, linear="joint")


for _dims in (1, 2, 3):
    nearest("upsample_nearest", _dims)
    nearest("_upsample_nearest_exact", _dims)
for _name, _dims, _radius in [("linear1d", 1, 1), ("bilinear2d", 2, 1), ("trilinear3d", 3, 1), ("bicubic2d", 2, 2)]:
    smooth(f"upsample_{_name}", _dims, _radius)
for _name, _radius in [("bilinear2d", 1), ("bicubic2d", 2), ("lanczos2d", 3)]:
    smooth(f"_upsample_{_name}_aa", 2, _radius, antialias=True)


# -- from anywhere -----------------------------------------------------------------------------------------
# of an empty grid torch has no second derivatives, but all ranks must have them
_sampled: dict[str, Any] = {"linear": "each", "joint": {0}, "never_empty": True}
line("grid_sampler_2d _grid_sampler_2d_cpu_fallback", "n c h! w!, n y x two! -> n c y x", **_sampled)
line("grid_sampler_3d", "n c d! h! w!, n z y x three! -> n c z y x", **_sampled)


@rule("affine_grid_generator")
def affine_grid(theta: Operand, size: Sequence[int], align_corners: bool) -> Factors:
    generate = lambda v: ATEN.affine_grid_generator(v, [len(v), *size[1:]], align_corners)
    sizes = " ".join(f"s{i}" for i in range(len(size) - 1))
    return factors(f"n a! b! -> n {sizes}", [theta], "joint", call=generate)


# -- pixels and channels -----------------------------------------------------------------------------------
stored("max_unpool2d pixel_shuffle channel_shuffle native_channel_shuffle", device="cpu")(as_first_suggests)
rearrangement("pixel_shuffle", "*b (c r r) h w -> *b c (h r) (w r)", takes="x r")

_UNSHUFFLED = parse("*b c (h r) (w r) -> *b (c r r) h w")


@rule("pixel_unshuffle")
def pixel_unshuffle(x: Operand, r: int) -> Algorithm:
    """Of an empty tensor, plain torch returns a copy, whatever its shape."""
    return Algorithm(lambda x, _: x.clone()) if 0 in x.shape else rearranged(_UNSHUFFLED, x, {"r": r})


rearrangement("channel_shuffle native_channel_shuffle", "n (g c) *s -> n (c g) *s", takes="x g")
