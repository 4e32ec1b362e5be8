"""Remote shards: RRefs to what the other ranks hold, exchanged over torch RPC when a tensor is made.

A tensor is known to the other ranks by a number all agree on. The registry holds it weakly: when the tensor dies, its
entry and its RRefs go, and with them the references that other workers count.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from shardwise.sharded.owners import communication_device, ranks_of, rpc_is_running

_lock = threading.Lock()
sharded_tensor_map: dict[int, weakref.ReferenceType[Any]] = {}  # what is alive here, by number
_received: dict[int, dict[int, list[Any]]] = {}  # number -> RPC rank -> RRefs
_next = [0]


def check_ready(group: Any) -> None:
    """RPC must run, with the same ranks as the default process group."""
    if not rpc_is_running():
        raise RuntimeError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc if init_rrefs is set to True"
        )
    rank, world = rpc.get_worker_info().id, len(rpc.api._get_current_rpc_agent().get_worker_infos())
    if rank != dist.get_rank() or world != dist.get_world_size():
        raise ValueError(
            f"Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process group rank: "
            f"{dist.get_rank()} of {dist.get_world_size()} and RPC rank: {rank} of {world}"
        )


class RemoteShards:
    """The RRefs of one tensor to the other ranks' shards."""

    def __init__(self, tensor: Any, group: Any) -> None:
        self.number = _agreed_number(group)
        self._end = weakref.finalize(tensor, _forget, self.number)
        self._end.atexit = False
        with _lock:
            sharded_tensor_map[self.number] = weakref.ref(tensor)
            _received.setdefault(self.number, {})
        self._exchange(tensor, group)

    def _exchange(self, tensor: Any, group: Any) -> None:
        """Tell every other rank of the group of this one's shards, and wait until all have told."""
        me, others = dist.get_rank(), [r for r in ranks_of(group) if r != dist.get_rank()]
        names = {worker.id: worker.name for worker in rpc.api._get_current_rpc_agent().get_worker_infos()}
        if tensor.local_shards():
            told = [
                rpc.rpc_async(names[r], _register, (self.number, [rpc.RRef(s) for s in tensor.local_shards()], me))
                for r in others
            ]
            torch.futures.wait_all(told)
        dist.barrier(group=group)

    def rrefs(self) -> dict[int, list[Any]]:
        if not rpc_is_running():
            raise RuntimeError("RPC has been shut down: there are no remote shards any more")
        with _lock:
            return dict(_received.get(self.number, {}))


def _agreed_number(group: Any) -> int:
    """A number no rank of the group has used."""
    with _lock:
        mine = torch.tensor([_next[0]], device=communication_device(group))
    dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
    with _lock:
        _next[0] = int(mine.item()) + 1
    return int(mine.item())


def _register(number: int, rrefs: list[Any], rpc_rank: int) -> None:
    """Called by another rank: its shards of tensor `number`."""
    with _lock:
        _received.setdefault(number, {})[rpc_rank] = rrefs


def _forget(number: int) -> None:
    with _lock:
        sharded_tensor_map.pop(number, None)
        _received.pop(number, None)
