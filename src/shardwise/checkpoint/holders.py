"""Who holds which tiles of a tensor of a state: a DTensor, a ShardedTensor, or a plain tensor that all ranks have.

A holder is a process. On a simulated mesh one process holds the tiles of all ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from shardwise.checkpoint.crc import crc_of
from shardwise.checkpoint.dtypes import short, stored
from shardwise.checkpoint.tree import Json
from shardwise.checkpoint.world import World
from shardwise.checkpoint_protocol import held_boxes, refuse_partial
from shardwise.errors import CheckpointError
from shardwise.layout import Layout
from shardwise.layout.placement import Placement, Shard
from shardwise.layout.tiles import Tile, Tiles
from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import DTensor


class Held(NamedTuple):
    """A tile, and the memory of this process that has its values."""

    tile: Tile
    values: torch.Tensor


class Side(NamedTuple):
    """Tiles of one tensor with the processes that hold them, a row each; a process's own are in the order of `held`."""

    ranks: np.ndarray
    tiles: Tiles

    @staticmethod
    def joined(sides: Sequence[Side], ndim: int) -> Side:
        ranks = np.concatenate([np.zeros(0, dtype=np.int64), *(side.ranks for side in sides)])
        nothing = np.zeros((0, ndim), dtype=np.int64)
        starts = np.concatenate([nothing, *(side.tiles.starts for side in sides)])
        return Side(ranks, Tiles(starts, np.concatenate([nothing, *(side.tiles.ends for side in sides)])))


class Kind(NamedTuple):
    """What a process says of a tensor: equal on processes that have the same tensor in the same layout."""

    dtype: str
    shape: tuple[int, ...]
    layout: str  # "dtensor", "tiles", "here" (all of it, in each process that says so)
    detail: str  # of the layout; of a tensor that is whole in each process, a checksum


def check_all(tensors: Mapping[str, torch.Tensor], doing: str) -> None:
    """Raise where one of some tensors cannot be saved or loaded."""
    known: set[Layout] = set()  # what is checked of a distributed tensor is its layout
    for name, tensor in tensors.items():
        layout = tensor._layout if isinstance(tensor, DTensor) else None
        if layout not in known:
            _check(name, tensor, doing)
        if layout is not None:
            known.add(layout)


def _check(name: str, tensor: torch.Tensor, doing: str) -> None:
    if isinstance(tensor, DTensor):
        refuse_partial(tensor._layout, f"{doing} {name!r}")
        dtype, is_meta = tensor._layout.dtype, tensor._layout.device.type == "meta"
    elif is_lazy(tensor):  # it has no shape
        raise CheckpointError(f"{doing} {name!r}: the parameter has no shape before the module has run once; run it")
    else:
        if tensor.is_nested:
            raise CheckpointError(f"{doing} {name!r}: a nested tensor has no tiles; save its values() and offsets()")
        if not isinstance(tensor, ShardedTensor):
            _check_plain(name, tensor, doing)
        dtype, is_meta = tensor.dtype, tensor.is_meta
    if is_meta:
        raise CheckpointError(f"{doing} {name!r}: the tensor is on the meta device and has no values; materialize it")
    try:
        stored(dtype, ())
    except CheckpointError as error:
        raise CheckpointError(f"{doing} {name!r}: {error}") from None


def _check_plain(name: str, tensor: torch.Tensor, doing: str) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        what = "quantized tensor" if tensor.is_quantized else f"tensor of layout {tensor.layout}"
        raise CheckpointError(f"{doing} {name!r}: a {what} has no tiles; make it dense first")
    if doing == "loading" and any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape)):
        raise CheckpointError(
            f"{doing} {name!r}: elements of the tensor share memory (it was expanded); clone it first"
        )


def kinds_of(tensors: Mapping[str, torch.Tensor], *, values: bool) -> dict[str, Kind]:
    """What this process says of some tensors; with `values`, those of plain ones too."""
    known: dict[Layout, Kind] = {}  # most tensors of a model share a layout with others
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and not tensor._layout.mesh.comm.simulated:
            layout = tensor._layout
            if layout not in known:
                known[layout] = _kind_of_layout(layout)
            found[name] = known[layout]
        else:
            found[name] = _kind_of(tensor, values)
    return found


def _kind_of_layout(layout: Layout) -> Kind:
    ranks = zlib.crc32(repr(layout.mesh.ranks).encode())
    return Kind(short(layout.dtype), tuple(layout.shape), "dtensor", f"{layout.digest:08x}{ranks:08x}")


def _kind_of(tensor: torch.Tensor, values: bool) -> Kind:
    dtype, shape = short(tensor.dtype), tuple(tensor.shape)
    if isinstance(tensor, ShardedTensor):
        return Kind(dtype, shape, "tiles", f"{zlib.crc32(repr(tensor._tiles.key).encode()):08x}")
    simulated = isinstance(tensor, DTensor)
    total = 0
    for piece in held(tensor) if values else ():
        total = crc_of(as_bytes(piece.values), total)
    return Kind(dtype, shape, "here", f"{'simulated' if simulated else 'plain'} {total:08x}")


def as_bytes(values: torch.Tensor) -> np.ndarray:
    """The memory of some values; where they lie together on the CPU, no copy."""
    flat = values.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    if not flat.numel():
        return np.zeros(0, dtype=np.uint8)
    flat = flat.as_strided(flat.shape, (1,))  # one element may come with any stride, but a view of bytes asks for 1
    return flat.view(torch.uint8).numpy()


def lies_together(values: torch.Tensor) -> bool:
    """Whether some values are one run of this process's memory, as they are."""
    return values.device.type == "cpu" and values.is_contiguous() and not (values.is_conj() or values.is_neg())


def held(tensor: torch.Tensor) -> list[Held]:
    """The tiles of a tensor in this process, each piece of memory once."""
    if isinstance(tensor, DTensor):
        return [Held(tile, _box(values, start, tile.sizes)) for tile, values, start in held_boxes(tensor)]
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return [
            Held(Tile(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor.detach())
            for s in shards
            if s.tensor.numel()
        ]
    if not tensor.numel():
        return []
    plain = tensor.detach()
    return [Held(Tile((0,) * plain.dim(), tuple(plain.shape)), plain)]


def _box(values: torch.Tensor, start: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (a, n) in enumerate(zip(start, sizes, strict=True)):
        if n != values.shape[dim]:
            values = values.narrow(dim, a, n)
    return values


def side_of(tensor: torch.Tensor, rank: int) -> Side:
    """All holders of a tensor, as far as its layout says; of what is whole in each process, this one alone."""
    ndim = tensor.dim()
    if isinstance(tensor, DTensor) and not tensor._layout.mesh.comm.simulated:
        return side_of_layout(tensor._layout)
    if isinstance(tensor, ShardedTensor):
        tiles = tensor._tiles
        full = np.nonzero(tiles.tiles.volumes)[0]
        full = full[np.lexsort((tiles.slots[full], tiles.ranks[full]))]
        return Side(tiles.ranks[full], tiles.tiles.take(full))
    boxes = [piece.tile for piece in held(tensor)]
    return Side(np.full(len(boxes), rank, dtype=np.int64), Tiles.of(boxes, ndim))


def side_of_layout(layout: Layout) -> Side:
    """All holders of a tensor of a layout; arrays, whatever the number of ranks."""
    mesh = layout.mesh
    coords = np.indices(mesh.shape).reshape(len(mesh.shape), -1)
    starts = np.zeros((coords.shape[1], layout.ndim), dtype=np.int64)
    ends = np.zeros_like(starts)
    for dim in range(layout.ndim):
        axes = layout.axes_of(dim)
        table = np.zeros((*(mesh.shape[axis] for axis in axes), 2), dtype=np.int64)
        for at in np.ndindex(table.shape[:-1]):
            here = dict(zip(axes, at))
            found = layout.held(dim, [here.get(axis, 0) for axis in range(len(mesh.shape))])
            if len(found) > 1:
                return _side_of_pieces(layout)
            table[at] = found[0] if found else (0, 0)
        starts[:, dim], ends[:, dim] = table[tuple(coords[axis] for axis in axes)].T.reshape(2, -1)
    full = (starts < ends).all(axis=1)
    return Side(np.array(mesh.ranks, dtype=np.int64)[full], Tiles(starts[full], ends[full]))


def _side_of_pieces(layout: Layout) -> Side:
    rows = [(rank, tile) for rank in layout.mesh.ranks for tile in layout.tiles(rank) if 0 not in tile.sizes]
    ranks = np.array([rank for rank, _ in rows], dtype=np.int64)
    return Side(ranks, Tiles.of([tile for _, tile in rows], layout.ndim))


def share_of(tensor: torch.Tensor, ranks_with_it: Sequence[int], world: World) -> tuple[int, int]:
    """How many times all of a tensor is held, and which of them this process belongs to."""
    if isinstance(tensor, ShardedTensor):
        return 1, 0
    if isinstance(tensor, DTensor) and not tensor._layout.mesh.comm.simulated:
        layout = tensor._layout
        if layout.mesh.comm.outside:
            return replicas(layout), 0
        coords, number = layout.mesh.coords(world.rank), 0
        for axis, place in enumerate(layout.placements):
            if place.is_replicate():
                number = number * layout.mesh.shape[axis] + coords[axis]
        return replicas(layout), number
    return len(ranks_with_it), list(ranks_with_it).index(world.rank)


def replicas(layout: Layout) -> int:
    """How many ranks hold each element."""
    return math.prod(k for k, p in zip(layout.mesh.shape, layout.placements, strict=True) if p.is_replicate())


# -- what the manifest says ----------------------------------------------------------------------------------
def layouts_json(tensors: Mapping[str, torch.Tensor]) -> dict[str, Json]:
    """How tensors were laid out when they were saved, for people and tools; None for plain ones."""
    known: dict[Layout, Json] = {}
    found: dict[str, Json] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            layout = tensor._layout
            if layout not in known:
                known[layout] = _layout_json(layout)
            found[name] = known[layout]
        else:
            tiles = len(tensor.metadata().shards_metadata) if isinstance(tensor, ShardedTensor) else None
            found[name] = None if tiles is None else {"tiles": tiles}
    return found


def _layout_json(layout: Layout) -> Json:
    mesh: Json = {"shape": list(layout.mesh.shape), "axes": list(layout.mesh.axis_names)}
    return {"mesh": mesh, "placements": [_placement_json(p) for p in layout.placements]}


def _placement_json(place: Placement) -> str:
    text = str(place)
    return text if len(text) <= 80 or not isinstance(place, Shard) else f"S({place.dim}, pieces)"
