"""The tiles of a tensor as arrays, and the checks on them: no overlap, no hole, nothing outside. All by sweeps."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from operator import add, gt
from typing import Any

import numpy as np

from shardwise.layout.tiles import Tiles, first_hole, first_overlap
from shardwise.layout.tileset import TileSet
from shardwise.move.tiles import TilePlan
from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.owners import owners, ranks_of


class _Recent:
    """What was made for the latest keys."""

    def __init__(self, most: int) -> None:
        self.most, self.lock, self.kept = most, threading.Lock(), OrderedDict[Any, Any]()

    def get(self, key: Any) -> Any:
        with self.lock:
            found = self.kept.get(key)
            if found is not None:
                self.kept.move_to_end(key)
        return found

    def put(self, key: Any, value: Any) -> Any:
        with self.lock:
            value = self.kept.setdefault(key, value)
            if len(self.kept) > self.most:
                self.kept.popitem(last=False)
        return value


_plans, _tile_sets = _Recent(128), _Recent(512)
_KEPT_TILES = 64  # with more, comparing keys costs as much as making the arrays


def boxes_of(shards: Sequence[ShardMetadata]) -> Tiles:
    """The tiles as arrays; all must have as many dims."""
    ndim = len(shards[0].shard_offsets) if shards else 0
    for shard in shards:
        if len(shard.shard_offsets) != ndim:
            raise ValueError(f"Found inconsistent ranks for shards: {ndim} and {len(shard.shard_offsets)}")
    starts = np.array([s.shard_offsets for s in shards], dtype=np.int64).reshape(len(shards), ndim)
    sizes = np.array([s.shard_sizes for s in shards], dtype=np.int64).reshape(len(shards), ndim)
    return Tiles(starts, starts + sizes)


def tiles_of(shards: Sequence[ShardMetadata], group: Any) -> TileSet:
    """The tiles with their owners in a group; for few tiles the same object each time."""
    if len(shards) > _KEPT_TILES or any(s.placement is None or s.placement.rank() is None for s in shards):
        return TileSet.owned(owners(shards, group), boxes_of(shards))
    key = (tuple(ranks_of(group)), *[(*s.shard_offsets, *s.shard_sizes, id(s.placement)) for s in shards])
    kept = _tile_sets.get(key)
    if kept is None:
        made = TileSet.owned(owners(shards, group), boxes_of(shards))
        kept = _tile_sets.put(key, (made, [s.placement for s in shards]))  # which live, so their ids stay theirs
    return kept[0]


def check_disjoint(shards: Sequence[ShardMetadata], boxes: Tiles | None = None) -> None:
    """Raise ValueError where two tiles overlap, and say which."""
    clash = overlapping(shards, boxes)
    if clash is not None:
        raise ValueError(f"Shards {shards[clash[0]]} and {shards[clash[1]]} overlap")


def overlapping(shards: Sequence[ShardMetadata], boxes: Tiles | None = None) -> tuple[int, int] | None:
    """The numbers of two tiles that share an element, if any do."""
    if len(shards) <= _FEW:
        return _first_overlap_of_few(shards) if shards else None
    return first_overlap(boxes_of(shards) if boxes is None else boxes)


_FEW = 16  # up to so many tiles, looking at all pairs is quicker than making arrays


def _first_overlap_of_few(shards: Sequence[ShardMetadata]) -> tuple[int, int] | None:
    """A sweep along the first dim: a tile is compared with those that it starts beside."""
    ndim, boxes = len(shards[0].shard_offsets), []
    for i, shard in enumerate(shards):
        offsets, sizes = shard.shard_offsets, shard.shard_sizes
        if len(offsets) != ndim:
            raise ValueError(f"Found inconsistent ranks for shards: {ndim} and {len(offsets)}")
        if 0 not in sizes:
            boxes.append((offsets, list(map(add, offsets, sizes)), i))
    boxes.sort()
    beside: list[Any] = []
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


def check_cover(
    shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int], boxes: Tiles | None = None
) -> None:
    """Raise ValueError where the (disjoint) tiles leave a hole in a tensor of these dims, or reach out of it."""
    if len(shards_metadata) <= _FEW and _covers(shards_metadata, tensor_dims):
        return
    boxes = boxes_of(shards_metadata) if boxes is None else boxes
    ndim = boxes.starts.shape[1]
    if ndim != len(tensor_dims):
        raise ValueError(f"Rank of tensor is {len(tensor_dims)}, but shards rank is {ndim}")
    outside = np.argwhere(boxes.ends > np.array(tensor_dims, dtype=np.int64).reshape(1, ndim))
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
    """The plan of a move, kept for the next time."""
    key = (sources.key, targets.key, itemsize)
    found = _plans.get(key)
    return _plans.put(key, TilePlan(sources, targets, itemsize=itemsize)) if found is None else found


def whole_on(rank: int, size: Sequence[int]) -> TileSet:
    """One tile, the whole tensor, held by `rank`."""
    start = np.zeros((1, len(size)), dtype=np.int64)
    end = np.array(size, dtype=np.int64).reshape(1, len(size))
    return TileSet.owned(np.array([rank], dtype=np.int64), Tiles(start, end))
