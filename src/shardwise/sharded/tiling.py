"""The tiles of a tensor as arrays, and the checks on them: no overlap, no hole, nothing outside. All by sweeps."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.move.tiles import Boxes, TilePlan, TileSet, first_hole, first_overlap
from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.owners import owners


def boxes_of(shards: Sequence[ShardMetadata]) -> Boxes:
    """The tiles as arrays; all must have as many dims."""
    ndim = len(shards[0].shard_offsets) if shards else 0
    for shard in shards:
        if len(shard.shard_offsets) != ndim:
            raise ValueError(f"Found inconsistent ranks for shards: {ndim} and {len(shard.shard_offsets)}")
    starts = np.array([s.shard_offsets for s in shards], dtype=np.int64).reshape(len(shards), ndim)
    sizes = np.array([s.shard_sizes for s in shards], dtype=np.int64).reshape(len(shards), ndim)
    return Boxes(starts, starts + sizes)


def tiles_of(shards: Sequence[ShardMetadata], group: Any) -> TileSet:
    """The tiles with their owners in a group."""
    return TileSet.owned(owners(shards, group), boxes_of(shards))


def check_disjoint(shards: Sequence[ShardMetadata], boxes: Boxes | None = None) -> None:
    """Raise ValueError where two tiles overlap, and say which."""
    if not shards:
        raise ValueError("Empty shard list provided: []")
    if len(shards) <= _FEW:
        clash = _first_overlap_of_few(shards)
    else:
        clash = first_overlap(boxes_of(shards) if boxes is None else boxes)
    if clash is not None:
        raise ValueError(f"Shards {shards[clash[0]]} and {shards[clash[1]]} overlap")


_FEW = 16  # up to so many tiles, looking at all pairs is quicker than making arrays


def _first_overlap_of_few(shards: Sequence[ShardMetadata]) -> tuple[int, int] | None:
    ndim = len(shards[0].shard_offsets)
    for j, one in enumerate(shards):
        if len(one.shard_offsets) != ndim:
            raise ValueError(f"Found inconsistent ranks for shards: {ndim} and {len(one.shard_offsets)}")
        if 0 in one.shard_sizes:
            continue
        for i in range(j):
            other = shards[i]
            for a, n, b, m in zip(one.shard_offsets, one.shard_sizes, other.shard_offsets, other.shard_sizes):
                if a >= b + m or b >= a + n:
                    break
            else:
                if 0 not in other.shard_sizes:
                    return i, j
    return None


def _covers(shards: Sequence[ShardMetadata], size: Sequence[int]) -> bool:
    """Whether a few disjoint tiles are inside of a tensor and have its volume."""
    total = 0
    for shard in shards:
        if len(shard.shard_offsets) != len(size):
            return False
        volume = 1
        for start, length, n in zip(shard.shard_offsets, shard.shard_sizes, size):
            if start + length > n:
                return False
            volume *= length
        total += volume
    return total == math.prod(size)


def check_cover(
    shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int], boxes: Boxes | None = None
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


_plans: OrderedDict[Any, TilePlan] = OrderedDict()
_lock = threading.Lock()
_KEPT = 128


def plan_between(sources: TileSet, targets: TileSet, itemsize: int) -> TilePlan:
    """The plan of a move, kept for the next time."""
    key = (_key(sources), _key(targets), itemsize)
    with _lock:
        found = _plans.get(key)
        if found is not None:
            _plans.move_to_end(key)
            return found
    made = TilePlan(sources, targets, itemsize=itemsize)
    with _lock:
        _plans[key] = made
        if len(_plans) > _KEPT:
            _plans.popitem(last=False)
    return made


def _key(tiles: TileSet) -> tuple[bytes, ...]:
    return tiles.ranks.tobytes(), tiles.boxes.starts.tobytes(), tiles.boxes.ends.tobytes()


def whole_on(rank: int, size: Sequence[int]) -> TileSet:
    """One tile, the whole tensor, held by `rank`."""
    start = np.zeros((1, len(size)), dtype=np.int64)
    end = np.array(size, dtype=np.int64).reshape(1, len(size))
    return TileSet.owned(np.array([rank], dtype=np.int64), Boxes(start, end))
