"""Images at another size or from other places. Batch and channel dims pass; along a cut dim, resizing fetches the few
rows it reads around a rank's own, and what only copies pixels fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.layout import Layout
from shardwise.rules.pad import copied
from shardwise.rules.pool import ATEN, leading, resizing, spatial
from shardwise.strategy.notation import line
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Operand, PerCoords


def nearest(name: str, dims: int) -> None:
    """Which pixel an output reads is torch's own answer, read off a ramp."""

    @rule(f"{name}{dims}d")
    def copy_pixels(x: Operand, output_size: Sequence[int], *scales: Any) -> Any:
        def source(n: int, size: int, scale: Any) -> torch.Tensor:
            ramp = torch.arange(n, dtype=torch.promote_types(x.dtype, torch.float32)).view(1, 1, n)
            return getattr(ATEN, f"{name}1d")(ramp, [size], scale).flatten().long()

        sizes = zip(x.shape[-dims:], output_size, scales or [None] * dims, strict=True)
        return copied(x, {x.ndim - dims + i: source(*along) for i, along in enumerate(sizes)})


def smooth(name: str, dims: int, radius: int, antialias: bool = False) -> None:
    """Outputs that weigh the inputs around them; antialiased, `radius` counts steps of the coarser grid of the two."""

    @rule(name)
    def weigh_pixels(x: Operand, output_size: Sequence[int], align_corners: bool, *scales: Any) -> Any:
        given = zip(x.shape[-dims:], output_size, scales, strict=False)
        if align_corners or any(scale is not None and n * scale != m for n, m, scale in given):
            # the places outputs read do not repeat
            call = lambda v: getattr(ATEN, name)(v, output_size, align_corners, *scales)  # noqa: E731
            return leading(call, [x], dims, linear="joint")

        def reach(i: int, n: int, m: int) -> Any:
            return resizing(n, m, math.ceil(radius * max(n / m, 1)) + 1 if antialias else radius)

        resize = lambda v, sizes: getattr(ATEN, name)(v, sizes or output_size, align_corners)  # noqa: E731
        return spatial(x, dims, resize, reach, linear="joint")


for _dims in (1, 2, 3):
    nearest("upsample_nearest", _dims)
    nearest("_upsample_nearest_exact", _dims)
for _name, _dims, _radius in [("linear1d", 1, 1), ("bilinear2d", 2, 1), ("trilinear3d", 3, 1), ("bicubic2d", 2, 2)]:
    smooth(f"upsample_{_name}", _dims, _radius)
for _name, _radius in [("bilinear2d", 1), ("bicubic2d", 2), ("lanczos2d", 3)]:
    smooth(f"_upsample_{_name}_aa", 2, _radius, antialias=True)


# -- from anywhere -----------------------------------------------------------------------------------------
INPUT: dict[str, Any] = {"linear": "each", "joint": frozenset({0})}  # a sum over the pixels of the first operand
line("grid_sampler_2d _grid_sampler_2d_cpu_fallback", "n c h! w!, n y x two! -> n c y x", **INPUT)
line("grid_sampler_3d", "n c d! h! w!, n z y x three! -> n c z y x", **INPUT)


@rule("affine_grid_generator")
def affine_grid(theta: Operand, size: Sequence[int], align_corners: bool) -> Factors:
    def local(inputs: list[Layout], outputs: list[Layout]) -> PerCoords:
        call = lambda v, n: ATEN.affine_grid_generator(v, [n, *size[1:]], align_corners)  # noqa: E731
        return PerCoords(call, lambda coords: inputs[0].local_shape_at(coords)[0])

    return Factors([("n", None, None)], [("n", *[None] * (len(size) - 1))], linear="joint", local=local)


# -- pixels and channels -----------------------------------------------------------------------------------
def shuffled(x: Operand, apart: Sequence[int], order: Sequence[int], together: Sequence[int]) -> Algorithm | None:
    """The last dims taken `apart`, put in another order and `together`; None leaves the error to torch."""
    kept = x.shape[: x.ndim - len(together)]
    if x.ndim < len(together) or math.prod(apart) != math.prod(x.shape[len(kept) :]):
        return None
    permuted = [*range(len(kept)), *(len(kept) + i for i in order)]
    new = {"memory_format": torch.contiguous_format}  # never a view
    return Algorithm(
        lambda x, *args, **kwargs: x.reshape(*kept, *apart).permute(permuted).clone(**new).reshape(*kept, *together)
    )


@rule("pixel_shuffle")
def pixel_shuffle(x: Operand, upscale_factor: int) -> Algorithm | None:
    r, (n, h, w) = max(upscale_factor, 0), (1, 1, *x.shape)[-3:]
    c = n // max(r * r, 1)
    return shuffled(x, (c, r, r, h, w), (0, 3, 1, 4, 2), (c, h * r, w * r))


@rule("pixel_unshuffle")
def pixel_unshuffle(x: Operand, downscale_factor: int) -> Algorithm | None:
    r, (c, *sides) = max(downscale_factor, 0), (1, 1, *x.shape)[-3:]
    h, w = (side // max(r, 1) for side in sides)
    return shuffled(x, (c, h, r, w, r), (0, 2, 4, 1, 3), (c * r * r, h, w))


@rule("channel_shuffle native_channel_shuffle")
def channel_shuffle(x: Operand, groups: int) -> Algorithm | None:
    n, *rest = x.shape[1:]
    apart = (max(groups, 0), n // max(groups, 1), *rest)
    return shuffled(x, apart, (1, 0, *range(2, len(apart))), x.shape[1:])
