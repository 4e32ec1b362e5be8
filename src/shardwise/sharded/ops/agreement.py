"""Plain tensors that meet sharded ones over a mesh layout count as the same on all ranks: here that is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.messages import ALL_GATHER
from shardwise.comm.record import Note, listeners, record
from shardwise.sharded.ops.exchange import TilesAxis
from shardwise.sharded.owners import communication_device, ranks_of


def check_agreement(name: str, tensors: Sequence[torch.Tensor], group: Any) -> None:
    """One small exchange of fingerprints; raise on all ranks where they differ."""
    tensors = [t for t in tensors if t.device.type != "meta"]
    world = dist.get_world_size(group)
    if not tensors or world == 1:
        return
    device = communication_device(group)
    mine = torch.stack([_fingerprint(t).to(device) for t in tensors])
    every = torch.empty(world * len(mine), dtype=torch.int64, device=device)
    if listeners():
        record(TilesAxis(), "all_gather", 0, (world - 1) * mine.nbytes, Note(name, "do plain tensors agree?"))  # type: ignore[arg-type]
    getattr(dist, ALL_GATHER)(every, mine, group=group)
    table = every.view(world, -1)
    odd = (table != table[0]).any(dim=1).nonzero().flatten().tolist()
    if odd:
        which = int((table[odd[0]] != table[0]).nonzero()[0])
        ranks = ranks_of(group)
        raise RuntimeError(
            f"{name}: plain tensor {which} among the arguments differs between rank {ranks[0]} and rank "
            f"{ranks[odd[0]]}. A plain tensor that meets a ShardedTensor counts as the same on all ranks; if each rank "
            f"holds its own part of it, make it a ShardedTensor with init_from_local_shards"
        )


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A number for shape, dtype and bits; values at other places give another one."""
    shape = _shape_number(tensor)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    bits = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    words = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    weights = torch.arange(1, len(words) + 1, device=words.device) * 0x9E37_79B9 + 1
    return (words * weights).sum() + shape


def _shape_number(tensor: torch.Tensor) -> int:
    number = sum(map(ord, str(tensor.dtype)))
    for size in tensor.shape:
        number = (number * 1_000_003 + size + 1) & 0x7FFF_FFFF
    return number
