"""Remote shards: RRefs to what the other ranks hold, over torch RPC.

Every rank knows a tensor by the same number. RRefs are made from that number when they are asked for; the tensor keeps
none, so that nothing delays RPC when it shuts down. The table holds tensors weakly: when one dies its entry goes. The
shards stay until the tensor has died on every rank, which the ranks tell each other: who still has it may ask for them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from shardwise.comm.group_calls import group_call
from shardwise.sharded.groups import Group, as_group, communication_device
from shardwise.torch_private.distributed import rpc_is_running, rpc_workers, wait_for_rrefs

_lock = threading.RLock()  # a finalizer may run while it is held
sharded_tensor_map: dict[int, weakref.ReferenceType[Any]] = {}  # what is alive here, by number
_next = [0]


@dataclass
class _Kept:
    """The shards of a tensor, and the ranks on which it lives."""

    shards: list[Any]
    ranks: set[int]


_kept: dict[int, _Kept] = {}


def checked_group(process_group: Group | None, init_rrefs: bool) -> Group:
    """Return the group of a new tensor. With `init_rrefs`, raise where RPC does not run, or has other ranks."""
    group = as_group(process_group)
    if not init_rrefs:
        return group
    if not rpc_is_running():
        raise RuntimeError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc if init_rrefs is set to True"
        )
    rank, world = rpc.get_worker_info().id, len(rpc_workers())
    if rank != dist.get_rank() or world != dist.get_world_size():
        raise ValueError(
            f"Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process group rank: "
            f"{dist.get_rank()} of {dist.get_world_size()} and RPC rank: {rank} of {world}"
        )
    return group


class RemoteShards:
    """The number of one tensor, from which RRefs to its shards are made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Every rank that RPC has calls this, whether it is in the tensor's group or not: it may ask for shards."""
        group = as_group(None)
        self.number = _agreed_number(group)
        self._end = weakref.finalize(tensor, _forget, self.number)
        self._end.atexit = False
        with _lock:
            sharded_tensor_map[self.number] = weakref.ref(tensor)
            shards = tensor.local_shards()  # type: ignore[attr-defined]
            _kept[self.number] = _Kept(shards, set(range(dist.get_world_size())))
        with group_call(group, "init_rrefs", "barrier"):
            dist.barrier(group=group)  # from now on every rank answers for it

    def end(self) -> None:
        """The tensor has other shards now."""
        self._end()

    def rrefs(self, owners: list[int]) -> dict[int, list[Any]]:
        """Return RRefs to the shards of other ranks, by rank. `owners` has the rank of each tile of the metadata."""
        if not rpc_is_running():
            raise RuntimeError("RPC has been shut down: there are no remote shards any more")
        names = {worker.id: worker.name for worker in rpc_workers()}
        found: dict[int, list[Any]] = {}
        for rank in owners:
            if rank != dist.get_rank():
                mine = found.setdefault(rank, [])
                mine.append(rpc.remote(names[rank], _shard_of, (self.number, len(mine))))
        wait_for_rrefs([rref for held in found.values() for rref in held])
        return found


def _shard_of(number: int, slot: int) -> Any:
    with _lock:
        known = _kept.get(number)
    if known is None:
        raise RuntimeError(f"the ShardedTensor does not live on any rank any more, asked of rank {dist.get_rank()}")
    return known.shards[slot]


def _agreed_number(group: Group) -> int:
    """Return a number that no rank of the group has used."""
    with _lock:
        mine = torch.tensor([_next[0]], device=communication_device(group))
    with group_call(group, "init_rrefs", "all_reduce", mine.device.type):
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
    with _lock:
        _next[0] = int(mine.item()) + 1
    return int(mine.item())


def _forget(number: int) -> None:
    """The tensor has died here. The others are told, so that they need not keep their shards for this rank."""
    with _lock:
        sharded_tensor_map.pop(number, None)
    if not rpc_is_running() or not dist.is_initialized():
        with _lock:
            _kept.pop(number, None)
        return
    me = dist.get_rank()
    _died_on(number, me)
    for worker in rpc_workers():
        if worker.id != me:
            with contextlib.suppress(RuntimeError):  # RPC is shutting down: nobody asks any more
                rpc.rpc_async(worker.name, _died_on, (number, me))


def _died_on(number: int, rank: int) -> None:
    with _lock:
        known = _kept.get(number)
        if known is not None:
            known.ranks.discard(rank)
            if not known.ranks:
                del _kept[number]
