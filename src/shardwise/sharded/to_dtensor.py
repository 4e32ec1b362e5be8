"""Sharded tensors as DTensors. Where a mesh layout has the same tiles, nothing moves or is copied."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shardwise.comm.record import Note
from shardwise.errors import MeshError
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.nesting import shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, count, normalize
from shardwise.layout.tiles import Tiles
from shardwise.layout.tileset import TileSet
from shardwise.mesh import DeviceMesh, Mesh, as_mesh
from shardwise.sharded.groups import Group, ranks_of
from shardwise.sharded.tiles import kept, layout_tiles, move_parts, new_cache
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor

Coords = tuple[int, ...]
Held = dict[Coords, list[Intervals]]  # for each rank of a mesh, what it holds of each dim; [] for nothing

_meshes: weakref.WeakKeyDictionary[Group, DeviceMesh] = weakref.WeakKeyDictionary()
_layouts = new_cache("to_dtensor", 512)


def mesh_of(group: Group, device_type: str) -> DeviceMesh:
    """Return the mesh of one axis over a process group; the same one each time."""
    found = _meshes.get(group)
    if found is None or found.device_type != device_type:
        found = _meshes[group] = DeviceMesh.from_group(group, device_type)
    return found


def to_dtensor(
    self: ShardedTensor, mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> DTensor:
    """Return the tensor as a DTensor on a mesh of its ranks, differentiable.

    Args:
        mesh: The default is one axis over the process group.
        placements: The default is those that say where the tiles are, if a mesh layout can say it: then nothing moves,
            and a rank's only tile is not even copied. Else the first dim is cut along every axis.

    Raises:
        MeshError: If the mesh has other ranks than the process group, or is simulated.
    """
    group = self._process_group
    grid = as_mesh(mesh_of(group, self.device.type) if mesh is None else mesh)
    if mesh is not None:
        _check_ranks(grid, group)
    if placements is None:
        return on_mesh(self, grid)
    layout = Layout.make(grid, placements, tuple(self.size()), self.dtype, None, self.device)
    return wrap(_local_value(self, layout), layout)


def on_mesh(tensor: ShardedTensor, grid: Mesh) -> DTensor:
    """Return the tensor as a DTensor on a mesh of its ranks; where it is now if the mesh has a layout for that."""
    found = natural_layout(tensor, grid)
    if not found.is_one_tile_each:
        return wrap(_local_value(tensor, found.layout), found.layout)
    local, shape = tensor._parts[0].contiguous(), found.layout.local_shape(dist.get_rank())
    return wrap(local if local.shape == shape else local.reshape(shape), found.layout)  # an empty tile may have another


def _check_ranks(grid: Mesh, group: Group) -> None:
    if grid.comm.simulated:
        raise MeshError("to_dtensor: the tensor lives on a process group; give a DeviceMesh of its ranks")
    if set(ranks_of(group)) != set(grid.ranks):
        raise MeshError(
            f"to_dtensor: the mesh has the ranks {list(grid.ranks)}, the tensor's process group "
            f"{ranks_of(group)}; they must be the same"
        )


class NaturalLayout(NamedTuple):
    """The layout that a sharded tensor gets on a mesh if nobody says which."""

    layout: Layout
    agrees: bool  # whether every rank holds exactly its tiles; else the first dim is cut, and the tiles move
    is_one_tile_each: bool  # whether it agrees, and no rank has several tiles: the same answer on all ranks


def natural_layout(tensor: ShardedTensor, grid: Mesh) -> NaturalLayout:
    """Return the layout that has the tensor's tiles, or that cuts its first dim where no layout has them; kept, since
    working it out grows with the number of ranks."""
    key = (tensor._tiles.key, grid, tensor.size(), tensor.dtype, tensor.device)
    return kept(_layouts, key, lambda: _find_natural_layout(tensor, grid))


def _find_natural_layout(tensor: ShardedTensor, grid: Mesh) -> NaturalLayout:
    placements = _agreeing_placements(tensor._tiles, tensor.size(), grid)
    chosen = placements or [Shard(0) if tensor.dim() else REPLICATE] * len(grid.shape)
    layout = Layout.make(grid, chosen, tuple(tensor.size()), tensor.dtype, None, tensor.device)
    ranks = tensor._tiles.ranks.tolist()
    return NaturalLayout(layout, placements is not None, placements is not None and len(set(ranks)) == len(ranks))


def _local_value(tensor: ShardedTensor, layout: Layout) -> torch.Tensor:
    """Return what this rank holds under the layout; what it lacks is moved."""
    me = dist.get_rank()
    target = layout_tiles(layout)
    parts = move_parts(tensor._parts, tensor._tiles, target, tensor._process_group, Note("to_dtensor"))
    if not layout.tiles(me):
        return parts[0].reshape(layout.local_shape(me))
    value = _joined(parts, layout, me)
    return value if value.is_contiguous() else value.contiguous()


def _joined(parts: list[torch.Tensor], layout: Layout, rank: int) -> torch.Tensor:
    """Join the boxes of a rank, which come in the order of the intervals of each dim, to one tensor."""
    if len(parts) == 1:
        return parts[0]
    coords = layout.mesh.coords(rank)
    lengths = [len(layout.held(dim, coords)) for dim in range(layout.ndim)]
    for dim in reversed(range(layout.ndim)):
        n = lengths[dim]
        if n > 1:
            parts = [torch.cat(parts[i : i + n], dim) for i in range(0, len(parts), n)]
    return parts[0]


def _agreeing_placements(tiles: TileSet, size: torch.Size, mesh: Mesh) -> list[Placement] | None:
    """Return placements under which every rank of the mesh holds exactly its tiles, or None."""
    if not size:
        return None if len(mesh.ranks) > 1 else [REPLICATE] * len(mesh.shape)
    table: Held = {}
    for rank in mesh.ranks:
        side = _sides(tiles.of_rank(rank))
        if side is None:
            return None
        table[mesh.coords(rank)] = side
    cut = _dim_of_each_axis(table, mesh, size)
    if cut is None:
        return None
    placements: list[Placement] = [REPLICATE] * len(mesh.shape)
    for dim, n in enumerate(size):
        axes = [axis for axis, d in enumerate(cut) if d == dim]
        if not axes:
            continue
        found = _held_by_coords(table, axes, dim)
        if not _is_partition(found.values(), n):
            return None
        shards = shards_from_table([mesh.shape[a] for a in axes], n, found.__getitem__, dim)
        for axis, shard in zip(axes, shards):
            placements[axis] = shard
    return placements if _holds(Layout.make(mesh, placements, tuple(size), torch.uint8), table) else None


def _sides(boxes: Tiles) -> list[Intervals] | None:
    """Return the set of indices of each dim whose product the boxes are; [] for no elements, None for no product."""
    full = boxes.take(boxes.volumes > 0)
    if not len(full):
        return []
    pairs = zip(full.starts.T.tolist(), full.ends.T.tolist())
    sides = [normalize(list(set(zip(starts, ends)))) for starts, ends in pairs]
    return sides if int(np.prod([count(s) for s in sides], dtype=np.int64)) == int(full.volumes.sum()) else None


def _dim_of_each_axis(table: Held, mesh: Mesh, size: tuple[int, ...]) -> list[int | None] | None:
    """Return which dim each mesh axis cuts: the one that differs between ranks along it."""
    uncut = next((d for d, n in enumerate(size) if n), 0)
    out: list[int | None] = []
    for axis, k in enumerate(mesh.shape):
        differing: set[int] = set()
        for coords in table:
            if coords[axis] == 0:
                line = [table[(*coords[:axis], i, *coords[axis + 1 :])] for i in range(k)]
                held = [s for s in line if s]
                differing |= {d for s in held for d in range(len(size)) if s[d] != held[0][d]}
        if len(differing) > 1:
            return None
        out.append(next(iter(differing)) if differing else (uncut if k > 1 else None))
    return out


def _held_by_coords(table: Held, axes: list[int], dim: int) -> dict[Coords, Intervals]:
    """Return, by the coordinates of some axes, the indices of `dim` that the first rank with elements holds there."""
    found: dict[Coords, Intervals] = {}
    for coords, side in table.items():
        key = tuple(coords[a] for a in axes)
        found[key] = found.get(key) or (side[dim] if side else ())
    return found


def _is_partition(sets: Iterable[Intervals], n: int) -> bool:
    sets = list(sets)
    return sum(map(count, sets)) == n and normalize([i for s in sets for i in s]) == normalize([(0, n)])


def _holds(layout: Layout, table: Held) -> bool:
    """Whether every rank holds under the layout what the table says."""
    for coords, side in table.items():
        held = [layout.held(dim, coords) for dim in range(layout.ndim)]
        empty = any(not count(h) for h in held)
        if empty != (not side) or (side and [tuple(h) for h in held] != [tuple(s) for s in side]):
            return False
    return True
