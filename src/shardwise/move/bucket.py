"""Many moves between meshes in one exchange: what all tensors send to a rank travels as one message of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.guard import Guard
from shardwise.comm.messages import Along, along_ranks, as_bytes
from shardwise.comm.record import Note, recorders, tell
from shardwise.layout import Region
from shardwise.move.across import CrossStep
from shardwise.move.schedule import Member, Pieces, Place, Route, Routes, Shape
from shardwise.move.transfer import Exchanged, Transfer

Parcel = tuple[CrossStep, torch.Tensor]  # a move between meshes, and what this rank holds of the tensor


class _Together(Exchanged):
    """Several plans joined to one that moves bytes."""

    def __init__(self, parcels: Sequence[Parcel]) -> None:
        self.parcels = parcels
        self.kept: dict[Any, Any] = {}

    def routes(self, member: int) -> Routes:
        """The routes of all plans: their tensors, and their messages, follow each other."""
        held: list[Shape] = []
        needed: list[Shape] = []
        sends: dict[Member, list[Place]] = {}
        takes: list[tuple[tuple[Member, ...], list[Place]]] = []
        for step, local in self.parcels:
            routes, width = step.plan.routes(member), local.itemsize
            for peer, pieces in routes.sends.items():
                sends.setdefault(peer, []).extend(_in_bytes(pieces, routes.held, width, len(held)))
            takes += [(to, _in_bytes(pieces, routes.needed, width, len(needed))) for to, pieces in routes.takes]
            held += (_longer(shape, width) for shape in routes.held)
            needed += (_longer(shape, width) for shape in routes.needed)
        return Routes(
            {peer: Pieces.of(places, held) for peer, places in sends.items()},
            [Route(sources, Pieces.of(places, needed)) for sources, places in takes],
            held,
            needed,
        )

    def sends_separately(self, along: Along) -> bool:
        return self.parcels[0][0].plan.sends_separately(along)


def _in_bytes(pieces: Pieces, tensors: Sequence[Shape], width: int, first: int) -> list[Place]:
    """The same pieces of tensors that are viewed as bytes, with a last dim that is `width` times longer. Slots count
    from `first`."""

    def stretched(region: Region) -> Region:
        last = region[-1] if region else ((0, 1),)
        return (*region[:-1], tuple((a * width, b * width) for a, b in last))

    regions = pieces.regions_in(tensors)
    return [(first + slot, stretched(region)) for slot, region in zip(pieces.slots, regions, strict=True)]


def _longer(shape: Sequence[int], width: int) -> Shape:
    """The shape of a tensor that is viewed as bytes; a tensor without dims gets one."""
    return (*shape[:-1], (shape[-1] if shape else 1) * width)


def exchange_parcels(parcels: Sequence[Parcel], bucket_bytes: int, note: Note) -> list[torch.Tensor]:
    """What this rank holds of each tensor afterwards. All ranks form the same buckets, by what the rank with most to
    send sends."""
    out: list[torch.Tensor] = []
    bucket: list[Parcel] = []
    size = 0
    for step, local in parcels:
        most = max((step.plan.bytes_out(rank) for rank in step.ranks), default=0)
        if bucket and (size + most > bucket_bytes or bucket[0][0].ranks != step.ranks):
            out += _exchange(bucket, note)
            bucket, size = [], 0
        bucket.append((step, local))
        size += most
    return out + (_exchange(bucket, note) if bucket else [])


@torch.no_grad()
def _exchange(bucket: Sequence[Parcel], note: Note) -> list[torch.Tensor]:
    me, (first, like) = dist.get_rank(), bucket[0]
    if to := recorders():
        tell(first.where, first.kind, sum(step.plan.bytes_in(me) for step, _ in bucket), note, to)
    held = [_bytes_of(local) for step, local in bucket if me in step.src.mesh.ranks]
    sources = held or [torch.empty(0, dtype=torch.uint8, device=like.device)]
    along = along_ranks(first.ranks, like.device)
    guard = Guard(along, first.kind, f"meshes of {len(first.ranks)} ranks", f" on rank {me}", note)
    guard.digest = hash(tuple(step.digest for step, _ in bucket))
    with guard:
        moved = iter(Transfer(_Together(bucket), sources, me, along).finish())
    return [
        _from_bytes(next(moved), step, me, x) if me in step.dst.mesh.ranks else x.new_empty(0) for step, x in bucket
    ]


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as bytes, with the same number of dims (at least one)."""
    return as_bytes(x.resolve_conj().resolve_neg().contiguous().view(-1)).view(_longer(x.shape, x.itemsize))


def _from_bytes(flat: torch.Tensor | None, step: CrossStep, rank: int, like: torch.Tensor) -> torch.Tensor:
    """The tensor that these bytes stand for; an empty one where this rank gets nothing."""
    if flat is None:
        return like.new_empty(0)
    return flat.view(-1).view(like.dtype).view(step.dst.local_shape(rank))
