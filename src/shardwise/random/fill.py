"""Fill what a rank holds with random numbers: any tile of a global tensor, on any device, without the rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.imports import later
from shardwise.layout.region import Region
from shardwise.random.distributions import Distribution
from shardwise.random.philox import CHUNK, words
from shardwise.random.walk import Walk, walk_over
from shardwise.torch_private.tensors import is_abstract

if TYPE_CHECKING:
    from shardwise.random import triton_kernel
else:
    triton_kernel = later("shardwise.random.triton_kernel")  # needs Triton, which comes with torch for GPUs
_WORTH_THREADS = 1 << 19  # elements: with fewer, starting threads costs more than they save


def fill_held(
    local: torch.Tensor, region: Region, shape: Sequence[int], what: Distribution, key: int, draw: int = 0
) -> torch.Tensor:
    """Fill `local`, which holds this region of a tensor of `shape`, tile by tile, and return it."""
    tiles = [local.detach()]
    for dim, side in enumerate(region):
        tiles = [part for tile in tiles for part in tile.split([b - a for a, b in side], dim)]
    for tile, bounds in zip(tiles, itertools.product(*region), strict=True):
        fill_tile(tile, [a for a, _ in bounds], shape, what, key, draw)
    return local


def fill_tile(
    target: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], what: Distribution, key: int, draw: int = 0
) -> torch.Tensor:
    """Fill a plain tensor, the tile at `offsets` of one of `shape`, and return it. `draw` tells draws under one 64-bit
    key apart."""
    if not target.numel() or is_abstract(target):
        return target
    whole = target
    target = target.detach()
    if target.is_complex():  # two numbers per element, which share the variance
        if what.name == "normal":
            what = replace(what, b=what.b * math.sqrt(0.5))
        target, offsets, shape = torch.view_as_real(target), (*offsets, 0), (*shape, 2)
    walk = walk_over(shape, offsets, target.shape, target.stride())
    if target.device.type == "cuda":
        triton_kernel.fill(target, walk, what, key, draw)
    elif target.device.type == "cpu":
        _fill_cpu(target, walk, what, key, draw)
    else:
        target.copy_(fill_tile(torch.empty_like(target, device="cpu"), offsets, shape, what, key, draw))
    return whole


def _fill_cpu(target: torch.Tensor, walk: Walk, what: Distribution, key: int, draw: int) -> None:
    per = what.per_block(target.dtype)
    longest = walk.sizes[-1]
    padded = (longest + 2 * per - 2) // per * per  # a run of them may begin anywhere in a block
    limit = (CHUNK - 2) * per * longest // padded if longest < CHUNK * per else (CHUNK - 2) * per

    def fill_piece(placed: tuple[int, Walk]) -> None:
        offset, piece = placed
        part = target.as_strided(piece.sizes, piece.strides, target.storage_offset() + offset)
        part.copy_(torch.from_numpy(_numbers(piece, per, what, target.dtype, key, draw)).view(piece.sizes))

    pieces = walk.pieces(max(limit, 1))
    if torch.get_num_threads() > 1 and target.numel() >= _WORTH_THREADS:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(fill_piece, pieces))
    else:
        list(map(fill_piece, pieces))


def _numbers(piece: Walk, per: int, what: Distribution, dtype: torch.dtype, key: int, draw: int) -> np.ndarray:
    """The numbers of a piece, a row for each run."""
    starts, length = piece.run_starts(), piece.sizes[-1]
    phases = starts % per
    count = (int(phases.max()) + length + per - 1) // per
    blocks = (starts // per)[:, None] + np.arange(count, dtype=np.int64)
    rows = what.values(words(blocks, key, draw), dtype).reshape(len(starts), count * per)
    if (phases == phases[0]).all():
        first = int(phases[0])
        return rows[:, first : first + length]
    out = np.empty((len(starts), length), dtype=rows.dtype)
    for phase in np.unique(phases).tolist():
        those = phases == phase
        out[those] = rows[those, phase : phase + length]
    return out
