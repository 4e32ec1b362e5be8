"""The tiles of a tensor as arrays: made, checked (no overlap, no hole, nothing outside), and moved.

All moves of tiles are asked of `move/` here; exchanges of plain tensors in `ops/group_steps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from operator import add, gt
from typing import TypeVar

import numpy as np
import torch

from shardwise.caches import PlanCache, register_cache
from shardwise.comm.record import Note
from shardwise.layout import Layout
from shardwise.layout.tiles import Tiles, first_hole, first_overlap
from shardwise.layout.tileset import TileSet
from shardwise.move.tiles import TilePlan, run_tiles
from shardwise.sharded.groups import Group, owners, ranks_of
from shardwise.sharded.metadata import ShardMetadata

_KEPT_TILES = 64  # with more, comparing keys costs as much as making the arrays
T = TypeVar("T")


def new_cache(name: str, maxsize: int) -> PlanCache:
    cache = PlanCache(maxsize)
    register_cache(f"sharded {name}", cache.info, cache.reset)
    return cache


def kept(cache: PlanCache, key: Hashable, make: Callable[[], T]) -> T:
    """Return what is kept under a key; the first time it is made."""
    found = cache.get(key)
    if found is None:
        found = make()
        cache.add(key, found)
    else:
        cache.hits += 1
    return found


_plans, _tile_sets, _layout_tiles = new_cache("moves", 128), new_cache("tiles", 512), new_cache("layouts", 512)


def boxes_of(shards: Sequence[ShardMetadata]) -> Tiles:
    """Return the tiles as arrays. Raise ValueError where they have different numbers of dims."""
    ndim = len(shards[0].shard_offsets) if shards else 0
    for shard in shards:
        if len(shard.shard_offsets) != ndim:
            raise ValueError(f"Found inconsistent ranks for shards: {ndim} and {len(shard.shard_offsets)}")
    starts = np.array([s.shard_offsets for s in shards], dtype=np.int64).reshape(len(shards), ndim)
    sizes = np.array([s.shard_sizes for s in shards], dtype=np.int64).reshape(len(shards), ndim)
    return Tiles(starts, starts + sizes)


def tiles_of(shards: Sequence[ShardMetadata], group: Group) -> TileSet:
    """Return the tiles with their owners in a group; for few tiles the same object each time."""
    if len(shards) > _KEPT_TILES or any(s.placement is None or s.placement.rank() is None for s in shards):
        return TileSet.owned(owners(shards, group), boxes_of(shards))
    key = (tuple(ranks_of(group)), *[(*s.shard_offsets, *s.shard_sizes, id(s.placement)) for s in shards])
    placements = [s.placement for s in shards]  # kept alive, so that no other object gets one of these ids
    return kept(_tile_sets, key, lambda: (TileSet.owned(owners(shards, group), boxes_of(shards)), placements))[0]


def check_disjoint(shards: Sequence[ShardMetadata]) -> None:
    """Raise ValueError where two tiles overlap, and say which."""
    clash = overlapping(shards)
    if clash is not None:
        raise ValueError(f"Shards {shards[clash[0]]} and {shards[clash[1]]} overlap")


def overlapping(shards: Sequence[ShardMetadata]) -> tuple[int, int] | None:
    """Return the positions of two tiles that share an element, or None."""
    if len(shards) <= _FEW:
        return _first_overlap_of_few(shards) if shards else None
    return first_overlap(boxes_of(shards))


_FEW = 16  # up to so many tiles, looking at all pairs is quicker than making arrays


def _first_overlap_of_few(shards: Sequence[ShardMetadata]) -> tuple[int, int] | None:
    """Sweep along the first dim: each tile is compared with those that have not ended where it starts."""
    ndim = len(shards[0].shard_offsets)
    boxes: list[tuple[Sequence[int], list[int], int]] = []
    for i, shard in enumerate(shards):
        offsets, sizes = shard.shard_offsets, shard.shard_sizes
        if len(offsets) != ndim:
            raise ValueError(f"Found inconsistent ranks for shards: {ndim} and {len(offsets)}")
        if 0 not in sizes:
            boxes.append((offsets, list(map(add, offsets, sizes)), i))
    boxes.sort()
    beside: list[tuple[Sequence[int], list[int], int]] = []
    for box in boxes:
        starts, ends, i = box
        beside = [other for other in beside if not ndim or other[1][0] > starts[0]]
        for other_starts, other_ends, j in beside:
            if all(map(gt, ends, other_starts)) and all(map(gt, other_ends, starts)):
                return min(i, j), max(i, j)
        beside.append(box)
    return None


def _covers(shards: Sequence[ShardMetadata], size: Sequence[int]) -> bool:
    """Whether a few disjoint tiles are inside of a tensor and have its volume."""
    total, ndim = 0, len(size)
    for shard in shards:
        offsets, sizes = shard.shard_offsets, shard.shard_sizes
        if len(offsets) != ndim or any(map(gt, map(add, offsets, sizes), size)):
            return False
        total += math.prod(sizes)
    return total == math.prod(size)


def check_cover(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Raise ValueError where the (disjoint) tiles leave a hole in a tensor of these dims, or reach out of it."""
    if len(shards_metadata) <= _FEW and _covers(shards_metadata, tensor_dims):
        return
    boxes = boxes_of(shards_metadata)
    ndim = boxes.starts.shape[1]
    if ndim != len(tensor_dims):
        raise ValueError(f"Rank of tensor is {len(tensor_dims)}, but shards rank is {ndim}")
    beyond = boxes.ends > np.array(tensor_dims, dtype=np.int64).reshape(1, ndim)
    outside = np.argwhere(beyond & (boxes.ends > boxes.starts))  # a dim that a chunk has nothing of may lie behind
    if len(outside):
        row, dim = outside[0].tolist()
        start, end = int(boxes.starts[row, dim]), int(boxes.ends[row, dim])
        raise ValueError(
            f"Shard offset {start} and length {end - start} exceeds tensor dim: {tensor_dims[dim]} for shard "
            f"{shards_metadata[row]}"
        )
    total, whole = int(boxes.volumes.sum()), int(np.prod(tensor_dims, dtype=np.int64))
    if total != whole:
        hole = first_hole(boxes, tensor_dims)
        where = f"; nobody has the box at {list(hole[0])} of sizes {list(hole[1])}" if hole and total < whole else ""
        raise ValueError(
            f"Total volume of shards: {total} does not match tensor volume: {whole}, in other words all the individual "
            f"shards do not cover the entire tensor{where}"
        )


def plan_between(sources: TileSet, targets: TileSet, itemsize: int) -> TilePlan:
    """Return the plan of a move between two sets of tiles, kept for the next time."""
    key = (sources.key, targets.key, itemsize)
    return kept(_plans, key, lambda: TilePlan(sources, targets, itemsize=itemsize))


def move_parts(
    parts: Sequence[torch.Tensor],
    sources: TileSet,
    targets: TileSet,
    group: Group,
    note: Note,
    into: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return this rank's target tiles, given its source tiles; see `run_tiles`."""
    return run_tiles(plan_between(sources, targets, parts[0].dtype.itemsize), parts, group, note, into)


def whole_on(rank: int, size: Sequence[int]) -> TileSet:
    """Return one tile, the whole tensor, held by `rank`; the same object each time."""
    return kept(_tile_sets, ("whole", rank, tuple(size)), lambda: _made_whole_on(rank, size))


def _made_whole_on(rank: int, size: Sequence[int]) -> TileSet:
    start = np.zeros((1, len(size)), dtype=np.int64)
    end = np.array(size, dtype=np.int64).reshape(1, len(size))
    return TileSet.owned(np.array([rank], dtype=np.int64), Tiles(start, end))


def layout_tiles(layout: Layout) -> TileSet:
    """Return what every rank of a layout holds, replicas included; the same object each time."""
    return kept(_layout_tiles, layout, lambda: TileSet.of({rank: layout.tiles(rank) for rank in layout.mesh.ranks}))
