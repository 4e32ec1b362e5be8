"""The functions that torch has around the collectives of one mesh axis, and what it says a change of layout costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.comm.group_calls import group_call
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE, Shard
from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.move import plan_move
from shardwise.move.cost import cost_of
from shardwise.spec import Spec, TensorMeta
from shardwise.tensor import DTensor
from shardwise.torch_paths.placements import padded as pad_tensor

__all__ = ["pad_tensor"]


def mesh_broadcast(
    tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int = 0, async_op: bool = False, *, group_src: int = 0
) -> dist.Work | None:
    """Write the tensor of one coordinate of an axis into that of the others. On a rank outside of the mesh nothing."""
    if tensor.is_meta or mesh.get_coordinate() is None:
        return None
    return dist.broadcast(tensor, group=mesh.get_group(mesh_dim), async_op=async_op, group_src=group_src)


def mesh_scatter(
    output: torch.Tensor,
    scatter_list: list[torch.Tensor],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> dist.Work | None:
    """Write the tensors of one coordinate of an axis into the outputs of all. On a rank outside of the mesh nothing."""
    if output.is_meta or mesh.get_coordinate() is None:
        return None
    gives = mesh.get_local_rank(mesh_dim) == group_src
    return dist.scatter(
        output, scatter_list if gives else None, group=mesh.get_group(mesh_dim), async_op=async_op, group_src=group_src
    )


def shard_dim_alltoall(
    input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """What this rank holds once the ranks of an axis, which hold equal parts along `gather_dim`, hold parts along
    `shard_dim`."""
    shape = list(input.shape)
    shape[gather_dim] *= mesh.size(mesh_dim)
    have, want = ([Shard(d) if a == mesh_dim else REPLICATE for a in range(mesh.ndim)] for d in (gather_dim, shard_dim))
    laid = DTensor.from_local(input, mesh, have, shape=torch.Size(shape))
    return laid.redistribute(placements=want).to_local()


def unpad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """The tensor without so many rows at the end of a dim."""
    return tensor.narrow(pad_dim, 0, tensor.size(pad_dim) - pad_size) if pad_size else tensor


def fill_empty_tensor_to_shards(
    shards: list[torch.Tensor], shard_dim: int, num_empty_tensors: int
) -> list[torch.Tensor]:
    """The parts, and so many empty ones after them."""
    if num_empty_tensors == 0:
        return shards
    shape = list(shards[0].shape)
    shape[shard_dim] = 0
    return [*shards, *(shards[0].new_zeros(shape) for _ in range(num_empty_tensors))]


def check_tensor_meta(local_tensor: torch.Tensor, check_shape_stride: bool = False) -> TensorMeta | None:
    """Raise ValueError where dtype or requires_grad of a tensor, or its shape and strides too, differ among ranks."""
    mine = {"dtype": local_tensor.dtype, "requires_grad": local_tensor.requires_grad}
    if check_shape_stride:
        mine |= {"shape": tuple(local_tensor.shape), "stride": tuple(local_tensor.stride())}
    everyone: list[object] = [None] * dist.get_world_size()
    with group_call(None, "check_tensor_meta", "all_gather"):
        dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if theirs != mine:
            raise ValueError(
                f"Inconsistent tensor metadata (including shape and stride) across ranks: here {mine}, on rank {rank} "
                f"{theirs}"
            )
    return None


# -- costs ---------------------------------------------------------------------------------------------------------
@dataclass
class MeshTopoInfo:
    """What is known of each axis of a mesh: ranks, gigabytes and microseconds a second."""

    mesh: DeviceMesh
    mesh_dim_devices: list[int]
    mesh_dim_bandwidth: list[float]
    mesh_dim_latency: list[float]

    @staticmethod
    def build_from_mesh(mesh: DeviceMesh) -> MeshTopoInfo:
        axes = cost_of(as_mesh(mesh)).axes
        bandwidths, latencies = [a.bandwidth / 2**30 for a in axes], [a.latency * 1e6 for a in axes]
        return MeshTopoInfo(mesh, list(mesh.shape), bandwidths, latencies)

    def _cost(self, bytes_in: float, mesh_dim: int, rounds: int = 1) -> float:
        """Microseconds for gigabytes that a rank receives along an axis."""
        k = self.mesh_dim_devices[mesh_dim]
        seconds = bytes_in * (k - 1) / k / self.mesh_dim_bandwidth[mesh_dim]
        return rounds * (self.mesh_dim_latency[mesh_dim] + seconds * 1e6)


def allgather_cost(bytes_gb: float, mesh_topo: MeshTopoInfo, mesh_dim: int) -> float:
    return mesh_topo._cost(bytes_gb, mesh_dim)


def reduce_scatter_cost(bytes_gb: float, mesh_topo: MeshTopoInfo, mesh_dim: int) -> float:
    return mesh_topo._cost(bytes_gb, mesh_dim)


def allreduce_cost(bytes_gb: float, mesh_topo: MeshTopoInfo, mesh_dim: int) -> float:
    return mesh_topo._cost(bytes_gb, mesh_dim, rounds=2)


def spec_to_bytes(spec: Spec) -> int:
    """Bytes of the global tensor."""
    return math.prod(spec.shape) * spec._meta.dtype.itemsize


def redistribute_cost(current_spec: Spec, target_spec: Spec) -> float:
    """Microseconds that a change of layout takes by the cost model of moves; inf between meshes and towards a pending
    reduction, 0 where nothing is sent."""
    pairs = list(zip(current_spec.placements, target_spec.placements, strict=False))
    if current_spec.mesh != target_spec.mesh or any(q.is_partial() and p != q for p, q in pairs):
        return math.inf
    mesh, meta = as_mesh(current_spec.mesh), current_spec._meta
    here, there = (
        Layout.make(mesh, spec.placements, tuple(meta.shape), meta.dtype) for spec in (current_spec, target_spec)
    )
    plan, model, sample = plan_move(here, there), cost_of(mesh), mesh.ranks[0]
    received = plan.bytes_in(sample)
    if not received:
        return 0.0
    changed = [axis for axis, (p, q) in enumerate(pairs) if p != q]
    return model.over(changed, mesh.shape, received) * 1e6
