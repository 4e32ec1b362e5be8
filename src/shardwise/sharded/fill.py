"""Random values of tiles: the same global tensor whatever the tiling, for the same torch.manual_seed on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_CHUNK = 1 << 20  # elements drawn at once


def fill_tiles(
    tiles: Sequence[tuple[torch.Tensor, Sequence[int]]],
    size: Sequence[int],
    draw: Callable[[torch.Tensor], object],
    like: torch.Tensor,
) -> None:
    """Fill tiles (tensor, offsets) of a tensor of this size with what `draw` gives for the whole of it.

    The whole is drawn in flat chunks of bounded size, by every rank alike, of the dtype and device of `like`, and each
    tile takes its part. A rank without tiles draws too: its generator stays with the others'.
    """
    total = torch.Size(size).numel()
    flat = [(tile, _flat_positions(tile, offsets, size)) for tile, offsets in tiles if tile.numel()]
    with torch.no_grad():
        for start in range(0, total, _CHUNK):
            chunk = torch.empty(min(_CHUNK, total - start), dtype=like.dtype, device=like.device)
            draw(chunk)
            for tile, positions in flat:
                here = (positions >= start) & (positions < start + len(chunk))
                if here.all():
                    tile.copy_(chunk[positions - start].view(tile.shape))
                elif here.any():
                    tile[here.view(tile.shape)] = chunk[positions[here] - start]


def _flat_positions(tile: torch.Tensor, offsets: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """For each element of a tile, its place in the whole tensor laid flat."""
    place = torch.zeros((), dtype=torch.int64, device=tile.device)
    for dim, (start, length) in enumerate(zip(offsets, tile.shape)):
        index = torch.arange(start, start + length, device=tile.device)
        place = place.unsqueeze(-1) * size[dim] + index
    return place.reshape(-1)
