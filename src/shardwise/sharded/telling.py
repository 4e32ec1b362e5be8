"""Small things that all ranks of a group tell each other, in one collective."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.messages import ALL_GATHER
from shardwise.sharded.owners import communication_device

_SLOT = 2048  # bytes that the first collective carries for each rank
_HEAD = 8  # of them say how many there are


def tell_all(value: Any, group: Any) -> list[Any]:
    """What every rank of the group says, in its order; a second collective where one of them says much."""
    text = pickle.dumps(value)
    slots = _gathered(len(text).to_bytes(_HEAD, "little") + text[: _SLOT - _HEAD], _SLOT, group)
    lengths = [int.from_bytes(slot[:_HEAD], "little") for slot in slots]
    texts = [slot[_HEAD:] for slot in slots]
    more = max(lengths) - (_SLOT - _HEAD)
    if more > 0:
        texts = [one + rest for one, rest in zip(texts, _gathered(text[_SLOT - _HEAD :], more, group))]
    return [pickle.loads(one[:length]) for one, length in zip(texts, lengths)]


def _gathered(text: bytes, width: int, group: Any) -> list[bytes]:
    """The text of every rank, filled up to one width."""
    device, world = communication_device(group), dist.get_world_size(group)
    mine = torch.frombuffer(bytearray(text.ljust(width, b"\0")), dtype=torch.uint8).to(device)
    every = torch.empty(world * width, dtype=torch.uint8, device=device)
    getattr(dist, ALL_GATHER)(every, mine, group=group)
    whole = every.cpu().numpy().tobytes()
    return [whole[i * width : (i + 1) * width] for i in range(world)]
