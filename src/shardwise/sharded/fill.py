"""Random values of tiles: for one seed the same global tensor in any tiling, and the one a DTensor gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.layout import contiguous_stride
from shardwise.random import torch_stream
from shardwise.random.distributions import Distribution
from shardwise.random.fill import fill_box
from shardwise.random.generator import TORCH, next_key, stream


def fill_tiles(
    tiles: Sequence[tuple[torch.Tensor, Sequence[int]]],
    size: Sequence[int],
    what: Distribution,
    like: torch.Tensor,
    generator: Any = None,
) -> None:
    """Fill tiles (tensor, offsets) of a tensor of this size with its random numbers; each rank fills its own.

    A rank without tiles takes a key too: its generator stays with the others'.
    """
    with torch.no_grad():
        if stream() == TORCH:
            stride = contiguous_stride(size)
            for start, numbers in torch_stream.chunks(size, stride, like.dtype, like.device, what, generator):
                for tile, offsets in tiles:
                    sides = [((a, a + n),) if n else () for a, n in zip(offsets, tile.shape, strict=True)]
                    if tile.numel():
                        torch_stream.keep_part(tile, sides, size, start, numbers)
            return
        key = next_key(generator)
        for tile, offsets in tiles:
            fill_box(tile, offsets, size, what, key)
