"""Many moves between meshes in one exchange: what all tensors send to a rank travels as one run of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.comm.base import Coords
from shardwise.comm.boxes import Box, build, pick
from shardwise.comm.record import Note, record
from shardwise.comm.swap import start_swap, world_of
from shardwise.layout import Layout
from shardwise.move.tiles import TilePlan


class Parcel(NamedTuple):
    """One tensor on its way from the ranks of one mesh to those of another, and what this rank holds of it."""

    plan: TilePlan
    src: Layout
    dst: Layout
    ranks: tuple[int, ...]  # everyone who takes part
    local: torch.Tensor


def exchange_parcels(parcels: Sequence[Parcel], bucket_bytes: int, note: Note) -> list[torch.Tensor]:
    """What this rank holds of each afterwards. Buckets are cut alike on all ranks: by what the fullest one sends."""
    out: list[torch.Tensor] = []
    bucket: list[Parcel] = []
    size = 0
    for parcel in parcels:
        most = max((parcel.plan.bytes_out(rank) for rank in parcel.ranks), default=0)
        if bucket and (size + most > bucket_bytes or bucket[0].ranks != parcel.ranks):
            out += exchange_bucket(bucket, note)
            bucket, size = [], 0
        bucket.append(parcel)
        size += most
    return out + (exchange_bucket(bucket, note) if bucket else [])


@torch.no_grad()
def exchange_bucket(bucket: Sequence[Parcel], note: Note) -> list[torch.Tensor]:
    """What this rank holds of each tensor afterwards, in one exchange."""
    me, ranks = dist.get_rank(), bucket[0].ranks
    sends: dict[int, list[torch.Tensor]] = {rank: [] for rank in ranks}
    sizes: dict[int, int] = dict.fromkeys(ranks, 0)
    held: list[list[torch.Tensor]] = []
    for parcel in bucket:
        local, width = parcel.local, parcel.local.itemsize
        tiles = tiles_of(local, parcel.src, parcel.src.mesh.coords(me)) if me in parcel.src.mesh.ranks else []
        held.append(tiles or [local.new_empty(0)])
        program = parcel.plan.program(me)
        wires = program.pack(held[-1]).view(torch.uint8).split([n * width for n in program.send_counts.values()])
        for rank, wire in zip(program.send_counts, wires, strict=True):
            sends[rank].append(wire)
        for rank, n in program.receive_counts.items():
            sizes[rank] += n * width
    empty = torch.empty(0, dtype=torch.uint8, device=bucket[0].local.device)
    packed = torch.cat([empty, *(wire for rank in ranks for wire in sends[rank])])
    received = packed.new_empty(sum(sizes.values()))
    counts = [sum(wire.numel() for wire in sends[rank]) for rank in ranks]
    record_between(received.numel(), note)
    start_swap(received, [sizes[r] for r in ranks], packed, counts, ranks, world_of(ranks)).wait()
    came = dict(zip(ranks, received.split([sizes[rank] for rank in ranks]), strict=True))
    return _unpacked(bucket, held, came, me)


def _unpacked(
    bucket: Sequence[Parcel], held: list[list[torch.Tensor]], came: dict[int, torch.Tensor], me: int
) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    at = dict.fromkeys(came, 0)
    for (plan, _, dst, _, local), tiles in zip(bucket, held, strict=True):
        program = plan.program(me)
        parts = []
        for rank, n in program.receive_counts.items():
            parts.append(came[rank][at[rank] : at[rank] + n * local.itemsize])
            at[rank] += n * local.itemsize
        wire = torch.cat(parts).view(local.dtype) if parts else local.new_empty(0)
        if me in dst.mesh.ranks:
            out.append(from_tiles(program.unpack(wire, tiles), dst, dst.mesh.coords(me), local))
        else:
            out.append(local.new_empty(0))
    return out


# -- a rank's tensor and its tiles -------------------------------------------------------------------------
def tiles_of(local: torch.Tensor, layout: Layout, coords: Coords) -> list[torch.Tensor]:
    """The tiles a rank holds, in the order of `Layout.tiles`."""
    return [pick(local, box) for box in _boxes(layout, coords)]


def from_tiles(tiles: Sequence[torch.Tensor], layout: Layout, coords: Coords, like: torch.Tensor) -> torch.Tensor:
    """The tensor a rank holds, from its tiles."""
    boxes, shape = _boxes(layout, coords), layout.local_shape_at(coords)
    if len(boxes) == 1:
        return tiles[0].reshape(shape).clone(memory_format=torch.contiguous_format)
    return build(shape, list(zip(boxes, tiles, strict=False)), like)


def _boxes(layout: Layout, coords: Coords) -> list[Box]:
    """Where each tile stands in the local tensor."""
    sides = []
    for dim in range(layout.ndim):
        at, side = 0, []
        for a, b in layout.held(dim, coords):
            side.append(((at, at + b - a),))
            at += b - a
        sides.append(side)
    return list(itertools.product(*sides))


class _Between:
    """What the ledger calls the way between two meshes."""

    axis_names = ("meshes",)


def record_between(received: int, note: Note) -> None:
    record(_Between(), "all_to_all", 0, received, note)  # type: ignore[arg-type]
