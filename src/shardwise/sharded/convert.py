"""Between the families: sharded tensors as DTensors and back. Where the tiles agree, nothing moves or is copied."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.record import Note
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, Shard
from shardwise.layout.layout import Tile, shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, count, normalize
from shardwise.layout.tiles import Tiles
from shardwise.layout.tileset import TileSet
from shardwise.mesh import Mesh, as_mesh
from shardwise.move.tile_step import run_tiles
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.owners import ranks_of
from shardwise.sharded.shard import Shard as TileShard
from shardwise.sharded.spec import EnumerableShardingSpec, spec_of
from shardwise.sharded.tensor import ShardedTensor
from shardwise.sharded.tiling import plan_between
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

_meshes: weakref.WeakKeyDictionary[Any, DeviceMesh] = weakref.WeakKeyDictionary()


def mesh_of(group: Any, device_type: str) -> DeviceMesh:
    """The mesh of one axis over a process group; the same one each time."""
    found = _meshes.get(group)
    if found is None or found.device_type != device_type:
        found = _meshes[group] = DeviceMesh.from_group(group, device_type)
    return found


# -- sharded -> DTensor ----------------------------------------------------------------------------------------
def to_dtensor(tensor: ShardedTensor, mesh: Any = None, placements: Sequence[Any] | None = None) -> DTensor:
    """The tensor as a DTensor on a mesh of its ranks (default: one axis over its process group), differentiable.

    Without placements: those that say where its tiles are, if a mesh layout can; then nothing moves, and one tile a
    rank is not even copied. Else its first dim is cut along the first axis, and the tiles move there.
    """
    if mesh is None:
        mesh = mesh_of(tensor._process_group, tensor.device.type)
    grid = as_mesh(mesh)
    if grid.comm.simulated:
        raise MeshError("to_dtensor: the tensor lives on a process group; give a DeviceMesh of its ranks")
    missing = [r for r in ranks_of(tensor._process_group) if r not in grid.ranks]
    if missing or len(grid.ranks) != len(ranks_of(tensor._process_group)):
        raise MeshError(
            f"to_dtensor: the mesh has the ranks {list(grid.ranks)}, the tensor's process group "
            f"{ranks_of(tensor._process_group)}; they must be the same"
        )
    if placements is None:
        placements = agreeing_placements(tensor, grid) or _first_dim_cut(tensor, grid)
    layout = Layout.make(grid, placements, tuple(tensor.size()), tensor.dtype, None, tensor.device)
    return wrap(_local_value(tensor, layout), layout)


def _first_dim_cut(tensor: ShardedTensor, mesh: Mesh) -> list[Any]:
    if not tensor.dim():
        return [REPLICATE] * len(mesh.shape)
    return [Shard(0)] * len(mesh.shape)


def layout_tiles(layout: Layout) -> TileSet:
    """What every rank of a layout holds, replicas included."""
    return TileSet.of({rank: layout.tiles(rank) for rank in layout.mesh.ranks})


def _local_value(tensor: ShardedTensor, layout: Layout) -> torch.Tensor:
    """What this rank holds under the layout."""
    me = dist.get_rank()
    boxes = layout.tiles(me)
    target = layout_tiles(layout)
    plan = plan_between(tensor._tiles, target, tensor.dtype.itemsize)
    parts = run_tiles(plan, tensor._parts, tensor._process_group, Note("to_dtensor"))
    if not boxes:
        return parts[0].reshape(layout.local_shape(me))
    value = _joined(parts, layout, me)
    return value if value.is_contiguous() else value.contiguous()


def _joined(parts: list[torch.Tensor], layout: Layout, rank: int) -> torch.Tensor:
    """The boxes of a rank, which come in the order of the intervals of each dim, as one tensor."""
    if len(parts) == 1:
        return parts[0]
    coords = layout.mesh.coords(rank)
    lengths = [len(layout.held(dim, coords)) for dim in range(layout.ndim)]
    for dim in reversed(range(layout.ndim)):
        n = lengths[dim]
        if n > 1:
            parts = [torch.cat(parts[i : i + n], dim) for i in range(0, len(parts), n)]
    return parts[0]


def agreeing_placements(tensor: ShardedTensor, mesh: Mesh) -> list[Any] | None:
    """Placements under which every rank of the mesh holds exactly its tiles, or None."""
    size = tuple(tensor.size())
    if not size:
        return None if len(mesh.ranks) > 1 else [REPLICATE] * len(mesh.shape)
    sides = {rank: _sides(tensor._tiles.of_rank(rank)) for rank in mesh.ranks}
    if any(side is None for side in sides.values()):
        return None
    table = {mesh.coords(rank): side for rank, side in sides.items()}
    cut = _dim_of_each_axis(table, mesh, size)
    if cut is None:
        return None
    placements: list[Any] = [REPLICATE] * len(mesh.shape)
    for dim, n in enumerate(size):
        axes = [axis for axis, d in enumerate(cut) if d == dim]
        if not axes:
            continue
        found = _held_table(table, axes, dim)
        if found is None or not _is_partition(found.values(), n):
            return None
        shards = shards_from_table([mesh.shape[a] for a in axes], n, found.__getitem__, dim)
        for axis, shard in zip(axes, shards):
            placements[axis] = shard
    layout = Layout.make(mesh, placements, size, tensor.dtype, None, tensor.device)
    return placements if _holds(layout, table) else None


def _sides(boxes: Tiles) -> list[Intervals] | None:
    """The sets whose product the boxes are; [] where there is no element; None if they are no product."""
    full = boxes.take(boxes.volumes > 0)
    if not len(full):
        return []
    pairs = zip(full.starts.T.tolist(), full.ends.T.tolist())
    sides = [normalize(list(set(zip(starts, ends)))) for starts, ends in pairs]
    return sides if int(np.prod([count(s) for s in sides], dtype=np.int64)) == int(full.volumes.sum()) else None


def _dim_of_each_axis(table: dict[Any, Any], mesh: Mesh, size: tuple[int, ...]) -> list[int | None] | None:
    """Which dim each mesh axis cuts: the one that differs between ranks along it."""
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


def _held_table(table: dict[Any, Any], axes: list[int], dim: int) -> dict[Any, Intervals] | None:
    """By the coordinates of some axes, the indices of `dim` held there."""
    found: dict[Any, Intervals] = {}
    for coords, side in table.items():
        key = tuple(coords[a] for a in axes)
        held = side[dim] if side else ()
        if found.get(key) and held and found[key] != held:
            return None
        found[key] = found.get(key) or held
    return found


def _is_partition(sets: Any, n: int) -> bool:
    sets = list(sets)
    return sum(map(count, sets)) == n and normalize([i for s in sets for i in s]) == normalize([(0, n)])


def _holds(layout: Layout, table: dict[Any, Any]) -> bool:
    for coords, side in table.items():
        held = [layout.held(dim, coords) for dim in range(layout.ndim)]
        empty = any(not count(h) for h in held)
        if empty != (not side) or (side and [tuple(h) for h in held] != [tuple(s) for s in side]):
            return False
    return True


# -- DTensor -> sharded ----------------------------------------------------------------------------------------
def to_sharded(tensor: DTensor) -> ShardedTensor:
    """The DTensor as a ShardedTensor, differentiable: its tiles, as views of what each rank holds.

    A sharded tensor has one owner for each element: axes that replicate it cut it instead, which moves nothing; pending
    sums are finished on the way there.
    """
    layout = tensor._layout
    mesh = layout.mesh
    if mesh.comm.simulated:
        raise MeshError("to_sharded: a ShardedTensor lives on a process group, this tensor on a simulated mesh")
    group = group_of(mesh)
    if layout.ndim:
        single = [Shard(0) if not p.is_shard() and k > 1 else p for p, k in zip(layout.placements, mesh.shape)]
        tensor = tensor.redistribute(placements=single)
    elif layout.is_partial:
        tensor = tensor.redistribute(placements=[REPLICATE] * len(mesh.shape))
    return _from_layout(tensor, group)


def _from_layout(tensor: DTensor, group: Any) -> ShardedTensor:
    layout, me = tensor._layout, dist.get_rank()
    boxes = {rank: layout.tiles(rank) or (_nothing(layout, rank),) for rank in layout.mesh.ranks}
    if not layout.ndim:
        boxes = {layout.mesh.ranks[0]: boxes[layout.mesh.ranks[0]]}
    shards = [
        ShardMetadata(list(tile.offsets), list(tile.sizes), f"rank:{rank}/{layout.device}")
        for rank, held in boxes.items()
        for tile in held
    ]
    local = tensor._local
    properties = TensorProperties(layout.dtype, requires_grad=local.requires_grad)
    metadata = ShardedTensorMetadata(shards, torch.Size(layout.shape), properties)
    mine = [s for s in shards if s.placement.rank() == me]  # type: ignore[union-attr]
    parts = [local] if len(mine) == 1 and local.shape == torch.Size(mine[0].shard_sizes) else _views(local, layout, me)
    empty = None if mine else local.reshape(-1)[:0].view([0] * max(1, layout.ndim))
    spec = spec_of(shards) if len(shards) > 1 else EnumerableShardingSpec(shards)
    return ShardedTensor._made(
        [TileShard(part, shard) for part, shard in zip(parts, mine)], metadata, spec, group, empty=empty
    )


def _nothing(layout: Layout, rank: int) -> Tile:
    """The empty tile of a rank without elements: at the end of the dims it has nothing of, as chunks are."""
    coords = layout.mesh.coords(rank)
    sides = [layout.held(dim, coords) for dim in range(layout.ndim)]
    offsets = tuple(side[0][0] if count(side) else n for side, n in zip(sides, layout.shape))
    return Tile(offsets, layout.local_shape(rank))


def _views(local: torch.Tensor, layout: Layout, rank: int) -> list[torch.Tensor]:
    """The boxes of a rank, as views of its local tensor, in the order of `layout.tiles`."""
    coords = layout.mesh.coords(rank)
    sides = []
    for dim in range(layout.ndim):
        ends = np.cumsum([b - a for a, b in layout.held(dim, coords)]).tolist()
        sides.append([slice(a, b) for a, b in zip([0, *ends[:-1]], ends)])
    return [local[index] for index in itertools.product(*sides)]


def group_of(mesh: Mesh) -> Any:
    """The process group of all ranks of a mesh."""
    source: DeviceMesh = mesh.source
    if len(mesh.shape) == 1:
        return source.get_group(0)
    if sorted(mesh.ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    flat = source._flatten()
    if flat is None:
        raise LayoutError(f"to_sharded: no process group over all ranks {list(mesh.ranks)} of {mesh!r}")
    return flat.get_group()


def full_tensor(tensor: ShardedTensor) -> torch.Tensor:
    """The whole value as a plain tensor on every rank, differentiable."""
    return to_dtensor(tensor).full_tensor()


ShardedTensor.to_dtensor = to_dtensor  # type: ignore[attr-defined]
ShardedTensor.full_tensor = full_tensor  # type: ignore[attr-defined]
DTensor.to_sharded = to_sharded  # type: ignore[attr-defined]
