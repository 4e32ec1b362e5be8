"""What torch.distributed.checkpoint asks of a tensor: the boxes this process can write, those it wants read, and the
memory behind each box.

A box is a tile of the layout, so uneven, strided and nested splits need nothing special. Replicas offer the same boxes,
and the checkpoint planner writes each box once and shares the work among the holders. On a simulated mesh this process
holds every rank's boxes: it writes each box once and reads it into every tensor that holds it.

torch.distributed.checkpoint is imported later: the import takes half a second, and a program that calls these functions
has done it already.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch

from shardwise.errors import LayoutError, check_type
from shardwise.imports import later
from shardwise.layout import Layout
from shardwise.layout.tiles import Tile, TileLike
from shardwise.wrapper import Wrapper

if TYPE_CHECKING:
    from torch.distributed.checkpoint import metadata, planner
else:
    metadata = later("torch.distributed.checkpoint.metadata")
    planner = later("torch.distributed.checkpoint.planner")


def write_items(fqn: str, tensor: Wrapper) -> list[planner.WriteItem]:
    """Return one item for each distinct box of a tensor that is held here.

    Args:
        fqn: The name of the tensor in its state dict.
        tensor: The tensor.
    """
    check_type(tensor, Wrapper, "write_items: tensor", "torch.distributed.checkpoint saves plain tensors itself")
    check_type(fqn, str, "write_items: fqn", "give the name of the tensor in its state dict")
    layout: Layout = tensor._layout
    refuse_partial(layout, f"saving {fqn!r}")
    boxes = dict.fromkeys(tile for tile, _, _ in held_boxes(tensor))
    if 0 in layout.shape and not layout.mesh.comm.outside:  # nobody holds anything, but the name must be written
        boxes = {Tile((0,) * layout.ndim, layout.shape): None}
    return items_for(fqn, tensor, list(boxes))


def items_for(fqn: str, tensor: torch.Tensor, boxes: Iterable[TileLike]) -> list[planner.WriteItem]:
    """Return one item for each of these boxes of a tensor."""
    properties = metadata.TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(fqn, torch.Size(box[0])),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk(box), properties, torch.Size(tensor.shape)),
        )
        for box in boxes
    ]


def chunk_list(tensor: Wrapper) -> list[metadata.ChunkStorageMetadata]:
    """Return the boxes to read, one for each piece of memory that holds one.

    Args:
        tensor: The tensor to read into.
    """
    check_type(tensor, Wrapper, "chunk_list: tensor", "torch.distributed.checkpoint loads plain tensors itself")
    refuse_partial(tensor._layout, "loading into a tensor")
    return [chunk(tile) for tile, _, _ in held_boxes(tensor)]


def tensor_shard(tensor: Wrapper, index: metadata.MetadataIndex) -> torch.Tensor:
    """Return the memory of a box of a tensor: a view to write from or read into.

    Args:
        tensor: The tensor.
        index: The box, by where it begins: `index.offset`.

    Raises:
        TypeError: `index` is none of torch.distributed.checkpoint.
        LayoutError: The index has no offset, or no box that is held here begins there.
    """
    check_type(tensor, Wrapper, "tensor_shard: tensor", "torch.distributed.checkpoint loads plain tensors itself")
    if not hasattr(index, "offset"):
        raise TypeError(f"tensor_shard: index: expected a MetadataIndex of torch.distributed.checkpoint, got {index!r}")
    layout: Layout = tensor._layout
    if 0 in layout.shape:
        return torch.empty(layout.shape, dtype=layout.dtype, device=layout.device)
    held = list(held_boxes(tensor))
    if index.offset is None:
        raise LayoutError(f"{index.fqn!r}: a distributed tensor is read and written by box; the index has no offset")
    offsets = tuple(index.offset)
    hint = index.index  # when reading, the position in chunk_list; when writing, that in the checkpoint
    if hint is not None and hint < len(held) and held[hint][0].offsets == offsets:
        held = [held[hint]]
    for tile, value, start in held:
        if tile.offsets == offsets:
            for dim, (a, n) in enumerate(zip(start, tile.sizes, strict=True)):
                value = value.narrow(dim, a, n)
            return value
    raise LayoutError(f"{index.fqn!r}: no box at {offsets} is held here; there are {[t.offsets for t, _, _ in held]}")


def held_boxes(tensor: Wrapper) -> Iterator[tuple[Tile, torch.Tensor, tuple[int, ...]]]:
    """Yield each box of each distinct local tensor of this process, with the tensor and where the box starts in it."""
    layout: Layout = tensor._layout
    comm, local = layout.mesh.comm, tensor._local
    if comm.outside:
        return
    values = comm.values(local)
    seen: set[int] = set()
    for coords, i in zip(comm.coords_here(), comm.structure(local) or (0,), strict=True):
        if i not in seen:
            seen.add(i)
            value = values[i].detach()
            for tile, start in _boxes_at(layout, tuple(coords)):
                yield tile, value, start


Box: TypeAlias = tuple[Tile, tuple[int, ...]]  # of a tensor, and where it starts in what a rank holds
_boxes: weakref.WeakKeyDictionary[Layout, dict[tuple[int, ...], list[Box]]] = weakref.WeakKeyDictionary()


def _boxes_at(layout: Layout, coords: tuple[int, ...]) -> list[Box]:
    """The boxes of the rank at `coords`; those of a layout are found once."""
    known = _boxes.setdefault(layout, {})
    found = known.get(coords)
    if found is None:
        sides = [layout.held(dim, coords) for dim in range(layout.ndim)]
        found = []
        for tile in layout.tiles_at(coords):  # a piece starts locally after those of smaller indices
            start = (sum(b - a for a, b in side if b <= at) for side, at in zip(sides, tile.offsets))
            found.append((tile, tuple(start)))
        known[coords] = found
    return found


def chunk(box: TileLike) -> metadata.ChunkStorageMetadata:
    return metadata.ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))


def refuse_partial(layout: Layout, doing: str) -> None:
    if layout.is_partial:
        raise LayoutError(
            f"{doing}: laid out {list(layout.placements)}, the ranks hold parts of values, which a checkpoint cannot "
            f"say; redistribute it to Replicate() or Shard(dim) first"
        )
