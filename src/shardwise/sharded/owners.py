"""Process groups, and who owns a placement: "rank:1/cuda:0" by global rank, "trainer1/cpu" by the name RPC knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import rpc

from shardwise.sharded.metadata import ShardMetadata
from shardwise.torch_private import default_group


def as_group(process_group: Any) -> Any:
    """The group given, or the default one."""
    if isinstance(process_group, dist.ProcessGroup) or process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return process_group
    if process_group is not None:
        raise TypeError(f"process_group: expected a ProcessGroup or None, got {process_group!r}")
    if not dist.is_initialized():
        raise RuntimeError(
            "process_group: None given and there is no default process group; call torch.distributed.init_process_group"
        )
    return default_group()


def ranks_of(group: Any) -> list[int]:
    """The global ranks of a group; none for the stand-in that `new_group` gives to ranks outside."""
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)
    return []


def is_member(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0


def rpc_is_running() -> bool:
    return rpc._is_current_rpc_agent_set()  # type: ignore[attr-defined]


def rank_of(placement: Any) -> int:
    """The global rank a placement names."""
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
    workers = {worker.name: worker.id for worker in rpc.api._get_current_rpc_agent().get_worker_infos()}
    if name not in workers:
        raise ValueError(f"Invalid worker name: {name}; RPC knows {sorted(workers)}")
    return workers[name]


def owners(shards: Sequence[ShardMetadata], group: Any) -> np.ndarray:
    """The global rank of each shard's owner, all of them in the group."""
    known = _ranks_by_placement(shards, group)
    return np.array([known[id(shard.placement)] for shard in shards], dtype=np.int64)


def shards_of(rank: int, shards: Sequence[ShardMetadata], group: Any) -> list[ShardMetadata]:
    """The shards that a rank owns, once all owners are known to be in the group."""
    known = _ranks_by_placement(shards, group)
    return [shard for shard in shards if known[id(shard.placement)] == rank]


def _ranks_by_placement(shards: Sequence[ShardMetadata], group: Any) -> dict[int, int]:
    """The ranks of all placements, by the object: most shards share few of them."""
    placements = {id(shard.placement): shard.placement for shard in shards}
    known = {key: rank_of(placement) for key, placement in placements.items()}
    members = ranks_of(group)
    if members:
        for rank in known.values():
            if rank not in members:
                raise ValueError(f"Global rank {rank} does not exist in input process group: {members}")
    return known


def check_remote_device(pg: Any, remote_device: Any) -> tuple[int, torch.device]:
    """The owner of a placement and its device there."""
    rank = rank_of(remote_device)
    members = ranks_of(pg)
    if members and rank not in members:
        raise ValueError(f"Global rank {rank} does not exist in input process group: {members}")
    return rank, remote_device.device()


def communication_device(group: Any) -> torch.device:
    """Where tensors must lie for this group's collectives: NCCL wants the current CUDA device."""
    backend = dist.get_backend(group)
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
