"""Process groups, who owns a placement ("rank:1/cuda:0" by global rank, "trainer1/cpu" by the name RPC knows), and
small objects that all ranks exchange."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from shardwise.comm.group_calls import group_call
from shardwise.comm.messages import ALL_GATHER
from shardwise.sharded.metadata import ShardMetadata
from shardwise.torch_private.distributed import default_group, remote_device, rpc_is_running, rpc_workers

Group: TypeAlias = dist.ProcessGroup  # or the object that `new_group` returns on ranks outside of the group

_ranks: weakref.WeakKeyDictionary[Group, list[int]] = weakref.WeakKeyDictionary()


def as_group(process_group: Group | None) -> Group:
    """Return the group, or the default one for None."""
    if isinstance(process_group, dist.ProcessGroup) or process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return process_group
    if process_group is not None:
        raise TypeError(f"process_group: expected a ProcessGroup or None, got {process_group!r}")
    if not dist.is_initialized():
        raise RuntimeError(
            "process_group: None given and there is no default process group; call torch.distributed.init_process_group"
        )
    return default_group()


def ranks_of(group: Group) -> list[int]:
    """Return the global ranks of a group: the same list each time, not to be changed. Ranks outside get []."""
    if not isinstance(group, dist.ProcessGroup):
        return []
    found = _ranks.get(group)
    if found is None:
        found = _ranks[group] = dist.get_process_group_ranks(group)
    return found


def same_ranks(one: Group, other: Group) -> bool:
    return one is other or ranks_of(one) == ranks_of(other)


def is_member(group: Group) -> bool:
    return isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0


def check_member(group: Group) -> Group:
    """Return the group; raise ValueError where this rank is not in it."""
    if not is_member(group):
        raise ValueError(f"process_group: rank {dist.get_rank()} is not in it; call this on its ranks only")
    return group


def communication_device(group: Group) -> torch.device:
    """Return the device on which this group's collectives work: for NCCL the current CUDA device."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


# -- owners of placements ------------------------------------------------------------------------------------------
def rank_of(placement: remote_device | None) -> int:
    if placement is None:
        raise ValueError("remote device is None: give every shard a placement such as 'rank:0/cpu'")
    rank = placement.rank()
    if rank is not None:
        return rank
    name = placement.worker_name()
    if name is None:
        raise ValueError(f"placement {placement} names no owner; write 'rank:<rank>/{placement}'")
    if not rpc_is_running():
        raise RuntimeError(f"RPC framework needs to be initialized for using worker names: {name}")
    workers = {worker.name: worker.id for worker in rpc_workers()}
    if name not in workers:
        raise ValueError(f"Invalid worker name: {name}; RPC knows {sorted(workers)}")
    return workers[name]


def owners(shards: Sequence[ShardMetadata], group: Group) -> np.ndarray:
    """Return the global rank of each shard's owner; all must be in the group."""
    placements = {id(shard.placement): shard.placement for shard in shards}  # most shards share few objects
    known = {key: rank_of(placement) for key, placement in placements.items()}
    _check_members(known.values(), group)
    return np.array([known[id(shard.placement)] for shard in shards], dtype=np.int64)


def shards_of(rank: int, shards: Sequence[ShardMetadata], group: Group) -> list[ShardMetadata]:
    """Return the shards that a rank owns; all owners must be in the group."""
    return [shard for shard, owner in zip(shards, owners(shards, group).tolist()) if owner == rank]


def check_remote_device(pg: Group, remote_device: remote_device) -> tuple[int, torch.device]:
    """Return the owner of a placement, which must be in the group, and its device there."""
    rank = rank_of(remote_device)
    _check_members([rank], pg)
    return rank, remote_device.device()


def _check_members(ranks: Iterable[int], group: Group) -> None:
    members = set(ranks_of(group))
    for rank in ranks if members else ():
        if rank not in members:
            raise ValueError(f"Global rank {rank} does not exist in input process group: {ranks_of(group)}")


# -- objects of all ranks ------------------------------------------------------------------------------------------
_SLOT = 2048  # bytes that the first collective carries for each rank
_HEADER = 8  # of them say how many there are


def all_gather_objects(value: object, group: Group, op: str = "exchange") -> list[Any]:
    """Return every rank's value, in the order of the group. One collective, or two if a value is large. An error says
    that it is for `op`."""
    text = pickle.dumps(value)
    slots = _all_gather_bytes(len(text).to_bytes(_HEADER, "little") + text[: _SLOT - _HEADER], _SLOT, group, op)
    lengths = [int.from_bytes(slot[:_HEADER], "little") for slot in slots]
    texts = [slot[_HEADER:] for slot in slots]
    longer = max(lengths) - (_SLOT - _HEADER)
    if longer > 0:
        texts = [a + b for a, b in zip(texts, _all_gather_bytes(text[_SLOT - _HEADER :], longer, group, op))]
    return [pickle.loads(text[:length]) for text, length in zip(texts, lengths)]


def _all_gather_bytes(text: bytes, width: int, group: Group, op: str) -> list[bytes]:
    """Return the text of every rank, filled up to one width."""
    mine = torch.frombuffer(bytearray(text.ljust(width, b"\0")), dtype=torch.uint8).to(communication_device(group))
    whole = all_gather_rows(mine, group, op).cpu().numpy()
    return [row.tobytes() for row in whole]


def all_gather_rows(mine: torch.Tensor, group: Group, op: str) -> torch.Tensor:
    """Return the flat tensors of all ranks, which have one length, as the rows of one tensor."""
    rows = mine.new_empty(dist.get_world_size(group), mine.numel())
    with group_call(group, op, "all_gather", mine.device.type):
        getattr(dist, ALL_GATHER)(rows.view(-1), mine, group=group)
    return rows
