"""torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from shardwise.torch_private.taking import take

# --- torch.distributed ----------------------------------------------------------------------------------------------
remote_device: Any = take("torch.distributed._remote_device", "placements such as 'rank:1/cuda:0'")
default_group: Any = take("torch.distributed.distributed_c10d._get_default_group", "ShardedTensor of the default group")
default_store: Any = take("torch.distributed.distributed_c10d._get_default_store", "messages between two ranks")
functional_collectives: Any = take("torch.distributed._functional_collectives", "CommDebugMode: c10d_functional")
AsyncCollectiveTensor: Any = take(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor", "tensors of torch's DTensor that still wait"
)
_mesh_resources: Any = take("torch.distributed.device_mesh._mesh_resources", "`with mesh:` of a DeviceMesh")
root_mesh: Callable[[Any], Any] = take(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh", "tensors on two parts of one mesh meet"
)


take("torch.distributed.distributed_c10d._hash_ranks_to_str", "asynchronous saves of ranks with different groups")
_naming = threading.Lock()


def named_gloo_group(ranks: list[int], name: str) -> torch.distributed.ProcessGroup:
    """A gloo group that its ranks alone make, all of them with the same `name`.

    torch names such a group after the number of groups that a process is in. Where one rank is in more groups than
    another (it is on a mesh that the other is not on), the two would wait for each other under different names.
    """
    module = vars(torch.distributed.distributed_c10d)
    with _naming:
        usual = module["_hash_ranks_to_str"]
        module["_hash_ranks_to_str"] = lambda _: name
        made: torch.distributed.ProcessGroup
        try:
            made = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
        finally:
            module["_hash_ranks_to_str"] = usual
    return made


def active_device_mesh() -> Any:
    """The DeviceMesh of the innermost ``with mesh:`` of this thread; None outside of one."""
    try:
        return _mesh_resources.get_current_mesh()
    except (AttributeError, RuntimeError):
        return None


def mesh_of_one() -> torch.distributed.device_mesh.DeviceMesh:
    """A mesh of this process alone, without a process group: torch's own DTensors, while ours stand in their place."""
    return torch.distributed.device_mesh.DeviceMesh("cpu", torch.tensor([0]), _init_backend=False, _rank=0)


flatten_mesh: Any = take("torch.distributed.device_mesh.DeviceMesh._flatten", "to_sharded() on a part of the world")
rpc_is_running: Callable[[], bool] = take(
    "torch.distributed.rpc._is_current_rpc_agent_set", "remote shards, RPC workers"
)
_rpc_agent: Any = take("torch.distributed.rpc.api._get_current_rpc_agent", "remote shards, RPC workers")
_rref_future: Callable[[Any], Any] = take("torch.distributed.rpc.PyRRef._get_future", "waiting for remote shards")


def rpc_workers() -> list[Any]:
    """Every RPC worker, with its `name` and `id`."""
    return _rpc_agent().get_worker_infos()


def wait_for_rrefs(rrefs: list[Any]) -> None:
    """Wait until all remote references are made, or raise where one could not be."""
    torch.futures.wait_all([_rref_future(rref) for rref in rrefs])
