"""Specs of every kind for a tensor, and its value in one piece."""

import random

import torch
import torch.distributed as dist

from shardwise.move.tiles import TilePlan, run_tiles
from shardwise.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensor,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded._utils import narrow_tensor


def places(ranks):
    return [f"rank:{r}/cpu" for r in ranks]


def chunks(dim, ranks):
    return ChunkShardingSpec(dim, places(ranks))


def cut_up(size, n, generator):
    """The box of this size cut n - 1 times at random."""
    boxes = [([0] * len(size), list(size))]
    for _ in range(n - 1):
        i, dim = generator.randrange(len(boxes)), generator.randrange(len(size))
        offsets, sizes = boxes[i]
        at = generator.randint(0, sizes[dim])
        left, right, start = list(sizes), list(sizes), list(offsets)
        left[dim], right[dim], start[dim] = at, sizes[dim] - at, offsets[dim] + at
        boxes[i : i + 1] = [(offsets, left), (start, right)]
    return boxes


def irregular(size, ranks, seed):
    """Tiles of any shape, empty ones among them, several a rank, some ranks with none."""
    generator = random.Random(seed)
    shards = [
        ShardMetadata(offsets, sizes, f"rank:{generator.choice(ranks)}/cpu")
        for offsets, sizes in cut_up(size, 2 * len(ranks) + 1, generator)
    ]
    generator.shuffle(shards)
    return EnumerableShardingSpec(shards)


def grid(size, ranks):
    """A grid of 2 x 2 of the first two dims, dealt out to the ranks in turn."""
    shards = []
    for i in range(2):
        for j in range(2):
            offsets, sizes = [0] * len(size), list(size)
            for dim, k in ((0, i), (1, j)):
                half = (size[dim] + 1) // 2
                offsets[dim], sizes[dim] = k * half, half if k == 0 else size[dim] - half
            shards.append(ShardMetadata(offsets, sizes, f"rank:{ranks[(2 * i + j) % len(ranks)]}/cpu"))
    return EnumerableShardingSpec(shards)


def on_one(size, rank):
    return EnumerableShardingSpec([ShardMetadata([0] * len(size), list(size), f"rank:{rank}/cpu")])


def specs_for(size, ranks, seed=0):
    """Specs of every kind, by name."""
    ranks = list(ranks)
    found = {"one": on_one(size, ranks[-1]), "irregular": irregular(size, ranks, seed) if size else None}
    for dim in range(len(size)):
        found[f"chunk {dim}"] = chunks(dim, ranks)
        found[f"turned {dim}"] = chunks(dim, ranks[::-1])
    if size:
        found["some"] = chunks(0, ranks[:1] + ranks[2:])
        found["twice"] = chunks(-1, ranks + ranks)
        found["other"] = irregular(size, ranks, seed + 1)
    if len(size) > 1:
        found["grid"] = grid(size, ranks)
    return {name: spec for name, spec in found.items() if spec is not None}


def sharded(value, spec, group=None, requires_grad=False):
    """A leaf with these values, which every rank has: no communication."""
    metadata = spec.build_metadata(value.size(), TensorProperties(value.dtype))
    mine = [m for m in metadata.shards_metadata if m.placement.rank() == dist.get_rank()]
    tiles = [Shard(narrow_tensor(value.detach(), m).clone(), m) for m in mine]
    st = ShardedTensor._init_from_local_shards_and_global_metadata(
        tiles, metadata, process_group=group, sharding_spec=spec
    )
    return st.requires_grad_(requires_grad)


def whole(tensor):
    """The value on every rank: one exchange of tiles (and not by the mesh)."""
    ranks = dist.get_process_group_ranks(tensor._process_group)
    everything = ([0] * tensor.dim(), list(tensor.size()))
    with torch.no_grad():
        return run_tiles(
            TilePlan(tensor._tiles, {r: [everything] for r in ranks}), tensor._parts, tensor._process_group
        )[0]


def values(*size, seed=0, dtype=torch.float64):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
