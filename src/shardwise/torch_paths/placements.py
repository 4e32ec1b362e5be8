"""The private methods that torch's placements have: what one axis of a mesh does to one rank's plain tensor.

`attach()` gives them to the placements of this library. Nothing in it calls them; programs written for torch do. The
other axes of the mesh take no part: ranks that differ there may hold different tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.errors import MismatchError
from shardwise.layout import Layout, Partial, Placement, Replicate, Shard
from shardwise.layout.placement import REPLICATE, StridedShard
from shardwise.layout.split import Intervals, count
from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.tensor import DTensor


def _on_axis(mesh: DeviceMesh, axis: int, placement: Placement) -> list[Placement]:
    return [placement if a == axis else REPLICATE for a in range(mesh.ndim)]


def _moved(
    local: torch.Tensor,
    mesh: DeviceMesh,
    axis: int,
    have: Placement,
    want: Placement,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """What this rank holds after a change of placement along one axis."""
    whole = None if shape is None else torch.Size(shape)
    return (
        DTensor.from_local(local, mesh, _on_axis(mesh, axis, have), shape=whole)
        .redistribute(placements=_on_axis(mesh, axis, want))
        .to_local()
    )


# -- of a Shard, strided or not ------------------------------------------------------------------------------------
def _row(placement: Shard | StridedShard, n: int, parts: int) -> tuple[Intervals, ...]:
    return placement.row(n, parts) if isinstance(placement, StridedShard) else placement.row(n, parts, 0)


def split_tensor(
    self: Shard | StridedShard,
    tensor: torch.Tensor,
    num_chunks: int,
    *,
    with_padding: bool = True,
    contiguous: bool = True,
) -> tuple[list[torch.Tensor], list[int]]:
    """The part of each coordinate, and how many rows of padding it has at its end."""
    if self.dim >= tensor.dim():
        raise MismatchError(f"Sharding dim {self.dim} greater than tensor ndim {tensor.dim()}")
    dim = self.dim % tensor.dim()
    row = _row(self, tensor.shape[dim], num_chunks)
    most = max(map(count, row))
    parts, pads = [], []
    for pieces in row:
        views = [tensor.narrow(dim, start, stop - start) for start, stop in pieces or ((0, 0),)]
        part = views[0] if len(views) == 1 else torch.cat(views, dim)
        if with_padding:
            pads.append(most - count(pieces))
            part = padded(part, dim, pads[-1])
        parts.append(part.contiguous() if contiguous else part)
    return parts, pads


def padded(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """The tensor with rows of zeros at the end of a dim."""
    if pad_size == 0:
        return tensor
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1 - pad_dim % tensor.dim()) + [0, pad_size])


def size_and_offset(
    self: Shard | StridedShard, curr_local_size: int, num_chunks: int, rank: int
) -> tuple[int, int | None]:
    """How many of so many indices a coordinate gets, and the first of them."""
    pieces = _row(self, curr_local_size, num_chunks)[rank]
    return count(pieces), pieces[0][0] if pieces else curr_local_size


def shard_tensor(
    self: Shard | StridedShard, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, src_data_rank: int | None = 0
) -> torch.Tensor:
    """This rank's part of a tensor of the coordinate `src_data_rank`; with None, of its own."""
    grid = as_mesh(mesh, outside=True)
    if grid.comm.outside:
        return tensor.new_empty(0)
    layout = Layout.make(grid, _on_axis(mesh, mesh_dim, self), tuple(tensor.shape), tensor.dtype)
    dim, comm = self.dim % tensor.dim(), layout.mesh.comm
    parts, _ = split_tensor(self, tensor, grid.shape[mesh_dim], with_padding=False)
    if src_data_rank is None:
        return parts[comm.coords[mesh_dim]].clone()
    row = _row(self, tensor.shape[dim], grid.shape[mesh_dim])
    shapes = [(*tensor.shape[:dim], count(pieces), *tensor.shape[dim + 1 :]) for pieces in row]
    return comm.scatter(parts.__getitem__, shapes, mesh_dim, src_data_rank, tensor.new_empty(0))


def to_replicate(
    self: Shard | StridedShard,
    local_tensor: torch.Tensor,
    mesh: DeviceMesh,
    mesh_dim: int,
    current_logical_shape: Sequence[int],
) -> torch.Tensor:
    return _moved(local_tensor, mesh, mesh_dim, self, REPLICATE, current_logical_shape)


def replicate_to_shard(
    self: Shard | StridedShard, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int
) -> torch.Tensor:
    return split_tensor(self, local_tensor, mesh.size(mesh_dim), with_padding=False)[0][shard_index].clone()


def to_new_dim(
    self: Shard,
    local_tensor: torch.Tensor,
    mesh: DeviceMesh,
    mesh_dim: int,
    current_logical_shape: Sequence[int],
    new_shard_dim: int,
) -> torch.Tensor:
    return _moved(local_tensor, mesh, mesh_dim, self, Shard(new_shard_dim), current_logical_shape)


def reduce_to_shard(
    self: Shard, tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int
) -> torch.Tensor:
    return _moved(tensor, mesh, mesh_dim, Partial(reduce_op), self)


# -- of Replicate and Partial --------------------------------------------------------------------------------------
def replicate_tensor(
    self: Replicate, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, src_data_rank: int | None = 0
) -> torch.Tensor:
    """The tensor of the coordinate `src_data_rank`; with None, this rank's own."""
    grid = as_mesh(mesh, outside=True)
    if grid.comm.outside:
        return tensor.new_empty(0)
    if src_data_rank is None:
        return tensor
    layout = Layout.make(grid, (REPLICATE,) * len(grid.shape), tuple(tensor.shape), tensor.dtype)
    return layout.mesh.comm.broadcast(tensor.clone(), mesh_dim, src_data_rank)


def reduce_value(self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    return _moved(tensor, mesh, mesh_dim, self, REPLICATE)


def reduce_shard_value(
    self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Shard
) -> torch.Tensor:
    return _moved(tensor, mesh, mesh_dim, self, shard_spec)


def partition_value(self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    """This rank's part of a value that all ranks hold: an equal share of a sum."""
    return tensor / mesh.size(mesh_dim) if self.reduce_op == "sum" else tensor


_OF_SHARDS: dict[str, Callable[..., Any]] = {
    "_split_tensor": split_tensor,
    "_local_shard_size_and_offset": size_and_offset,
    "_shard_tensor": shard_tensor,
    "_to_replicate_tensor": to_replicate,
    "_replicate_to_shard": replicate_to_shard,
}
_METHODS: dict[type[Placement], dict[str, Callable[..., Any]]] = {
    Shard: _OF_SHARDS | {"_to_new_shard_dim": to_new_dim, "_reduce_shard_tensor": reduce_to_shard},
    StridedShard: _OF_SHARDS | {"local_shard_size_and_offset": size_and_offset},
    Replicate: {"_replicate_tensor": replicate_tensor},
    Partial: {
        "_reduce_value": reduce_value,
        "_reduce_shard_value": reduce_shard_value,
        "_partition_value": partition_value,
    },
}


def attach() -> None:
    """Give the placements these methods."""
    for kind, methods in _METHODS.items():
        for name, method in methods.items():
            setattr(kind, name, method)


