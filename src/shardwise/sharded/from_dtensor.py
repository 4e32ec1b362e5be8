"""DTensors as sharded tensors: the same tiles, as views of what each rank holds."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import count
from shardwise.layout.tiles import Tile
from shardwise.layout.tileset import TileSet
from shardwise.mesh import Mesh
from shardwise.sharded.groups import Group, as_group, rank_of
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.shard import Shard as TileShard
from shardwise.sharded.spec import EnumerableShardingSpec, ShardingSpec, spec_of
from shardwise.sharded.tensor import ShardedTensor
from shardwise.sharded.tiles import kept, new_cache, tiles_of
from shardwise.tensor import DTensor
from shardwise.torch_private.distributed import flatten_mesh

_tilings = new_cache("to_sharded", 512)


def to_sharded(tensor: DTensor) -> ShardedTensor:
    """Return a DTensor as a ShardedTensor, differentiable: its tiles are views of what each rank holds.

    A sharded tensor has one owner for each element. So axes that replicate the tensor cut it instead, which moves
    nothing, and pending sums are finished on the way there.

    Args:
        tensor: The tensor.

    Raises:
        MeshError: If the tensor is on a simulated mesh.
    """
    layout, mesh = tensor._layout, tensor._layout.mesh
    if mesh.comm.simulated:
        raise MeshError("to_sharded: a ShardedTensor lives on a process group, this tensor on a simulated mesh")
    if layout.ndim:
        single = [Shard(0) if not p.is_shard() and k > 1 else p for p, k in zip(layout.placements, mesh.shape)]
        tensor = tensor.redistribute(placements=single)
    elif layout.is_partial:
        tensor = tensor.redistribute(placements=[REPLICATE] * len(mesh.shape))
    layout, local = tensor._layout, tensor._local
    tiling = kept(_tilings, layout, lambda: _tiling_of(layout))
    properties = TensorProperties(layout.dtype, requires_grad=local.requires_grad)
    metadata = ShardedTensorMetadata(tiling.shards, torch.Size(layout.shape), properties)
    mine, me = tiling.mine, dist.get_rank()
    parts = [local] if len(mine) == 1 and list(local.shape) == mine[0].shard_sizes else _views(local, layout, me)
    return ShardedTensor._from_parts(
        [TileShard(part, shard) for part, shard in zip(parts, mine)],
        metadata,
        tiling.spec,
        tiling.group,
        tiles=tiling.tiles,
        empty=None if mine else local.reshape(-1)[:0].view([0] * max(1, layout.ndim)),
    )


class Tiling(NamedTuple):
    shards: list[ShardMetadata]
    mine: list[ShardMetadata]
    spec: ShardingSpec
    tiles: TileSet
    group: Group


def _tiling_of(layout: Layout) -> Tiling:
    """Return the tiles of a layout in which nothing is replicated."""
    ranks = layout.mesh.ranks if layout.ndim else layout.mesh.ranks[:1]  # one rank owns a single value
    shards = [
        ShardMetadata(list(tile.offsets), list(tile.sizes), f"rank:{rank}/{layout.device}")
        for rank in ranks
        for tile in layout.tiles(rank) or (_empty_tile(layout, rank),)
    ]
    mine = [shard for shard in shards if rank_of(shard.placement) == dist.get_rank()]
    spec = spec_of(shards) if len(shards) > 1 else EnumerableShardingSpec(shards)
    group = group_of(layout.mesh)
    return Tiling(shards, mine, spec, tiles_of(shards, group), group)


def _empty_tile(layout: Layout, rank: int) -> Tile:
    """Return the tile of a rank without elements: at the end of the dims of which it holds nothing, as chunks are."""
    coords = layout.mesh.coords(rank)
    sides = [layout.held(dim, coords) for dim in range(layout.ndim)]
    offsets = tuple(side[0][0] if count(side) else n for side, n in zip(sides, layout.shape))
    return Tile(offsets, layout.local_shape(rank))


def _views(local: torch.Tensor, layout: Layout, rank: int) -> list[torch.Tensor]:
    """Return the boxes of a rank, as views of its local tensor, in the order of `layout.tiles`."""
    coords = layout.mesh.coords(rank)
    sides = []
    for dim in range(layout.ndim):
        ends = np.cumsum([b - a for a, b in layout.held(dim, coords)]).tolist()
        sides.append([slice(a, b) for a, b in zip([0, *ends[:-1]], ends)])
    return [local[index] for index in itertools.product(*sides)]


def group_of(mesh: Mesh) -> Group:
    if len(mesh.shape) == 1:
        return mesh.source.get_group(0)
    if sorted(mesh.ranks) == list(range(dist.get_world_size())):
        return as_group(None)
    flat = flatten_mesh(mesh.source)
    if flat is None:
        raise LayoutError(f"to_sharded: no process group over all ranks {list(mesh.ranks)} of {mesh!r}")
    return flat.get_group()


DTensor.to_sharded = to_sharded  # type: ignore[attr-defined]
