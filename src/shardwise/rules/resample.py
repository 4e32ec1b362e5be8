"""Images at another size or from other places. Batch and channel dims pass; along a cut dim, resizing fetches the few
rows it reads around a rank's own, and what only copies pixels fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.rules.pad import copied
from shardwise.rules.pool import ATEN, leading, resizing, spatial
from shardwise.strategy.lines import line, rearrangement
from shardwise.strategy.reading import factors
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Answer, Factors, Operand


def nearest(name: str, dims: int) -> None:
    """An output copies one pixel; which one, torch itself says when it resizes the numbers 0, 1, 2, ..."""

    @rule(f"{name}{dims}d")
    def copy_pixels(x: Operand, output_size: Sequence[int], *scales: Any) -> Answer:
        if output_size is None:
            return None  # factors instead, which torch makes sizes of
        dtype, read = torch.promote_types(x.dtype, torch.float32), getattr(ATEN, f"{name}1d")
        source = lambda n, m, scale: read(torch.arange(n, dtype=dtype).view(1, 1, n), [m], scale).flatten().long()
        sizes = zip(x.shape[-dims:], output_size, [*scales, None, None, None][:dims], strict=True)
        return copied(x, {x.ndim - dims + i: source(*along) for i, along in enumerate(sizes)})


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
            return leading(call, [x], [dims], linear="joint")
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
line("grid_sampler_2d _grid_sampler_2d_cpu_fallback", "n c h! w!, n y x two! -> n c y x", "each", joint={0})
line("grid_sampler_3d", "n c d! h! w!, n z y x three! -> n c z y x", "each", joint={0})


@rule("affine_grid_generator")
def affine_grid(theta: Operand, size: Sequence[int], align_corners: bool) -> Factors:
    generate = lambda v: ATEN.affine_grid_generator(v, [len(v), *size[1:]], align_corners)
    sizes = " ".join(f"s{i}" for i in range(len(size) - 1))
    return factors(f"n a! b! -> n {sizes}", [theta], "joint", call=generate)


# -- pixels and channels -----------------------------------------------------------------------------------
rearrangement("pixel_shuffle", "*b (c r r) h w -> *b c (h r) (w r)", takes="x r")
rearrangement("pixel_unshuffle", "*b c (h r) (w r) -> *b (c r r) h w", takes="x r")
rearrangement("channel_shuffle native_channel_shuffle", "n (g c) *s -> n (c g) *s", takes="x g")
