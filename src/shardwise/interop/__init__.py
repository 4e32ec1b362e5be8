"""torch's DTensor to ours and back, without a copy: the same local tensor under the same layout, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch

from shardwise.errors import LayoutError, MeshError
from shardwise.interop.adoption import loaded_original, original, ready_originals
from shardwise.layout import Layout, Placement, Shard, StridedShard
from shardwise.layout.gradient import grad_placements
from shardwise.layout.nesting import parent_sets
from shardwise.layout.split import count
from shardwise.mesh import as_mesh
from shardwise.protocols import MeshLike
from shardwise.tensor import DTensor
from shardwise.torch_private.distributed import AsyncCollectiveTensor

if TYPE_CHECKING:
    import torch.distributed.tensor as theirs

__all__ = ["from_torch", "is_torchs", "to_torch"]


def from_torch(tensor: theirs.DTensor) -> DTensor:
    """A DTensor of torch as one of ours, sharing its memory; differentiable.

    Args:
        tensor: The tensor of torch.distributed.tensor, on any layout that has one.

    Raises:
        LayoutError: If it is no DTensor of torch.
    """
    if not is_torchs(tensor):
        raise LayoutError(f"from_torch: expected a DTensor of torch.distributed.tensor, got {type(tensor).__name__}")
    shape, mesh = tuple(tensor.shape), as_mesh(tensor.device_mesh)
    ours = Layout.make(mesh, tensor.placements, shape, tensor.dtype).placements
    grads = [_theirs(mesh, ours, axis, p, shape) for axis, p in enumerate(grad_placements(ours))]
    local = tensor.to_local(grad_placements=grads)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return DTensor.from_local(local, mesh, ours, shape=shape, stride=tensor.stride())


def to_torch(tensor: DTensor) -> theirs.DTensor:
    """A DTensor of ours as one of torch, sharing its memory; differentiable.

    Args:
        tensor: The tensor, on a mesh of processes.

    Raises:
        LayoutError: For explicit sizes and other splits that torch has no placement for.
        MeshError: For a tensor on a simulated mesh.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"to_torch: expected a shardwise.DTensor, got {type(tensor).__name__}")
    layout: Layout = tensor.layout
    if layout.mesh.comm.simulated:
        raise MeshError("to_torch: torch's DTensor needs processes, but this tensor lives on a simulated mesh")
    placements = [_theirs(layout.mesh, layout.placements, a, p, layout.shape) for a, p in enumerate(layout.placements)]
    local, shape = tensor.to_local(), torch.Size(layout.shape)
    mesh = layout.mesh.source
    ready_originals()
    torchs = original("torch.distributed.tensor")
    return torchs.DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=layout.stride)


def is_torchs(tensor: object) -> TypeGuard[theirs.DTensor]:
    """Whether it is a DTensor of torch's own class."""
    torchs = loaded_original("torch.distributed.tensor")
    return torchs is not None and isinstance(tensor, torchs.DTensor)


def _theirs(
    mesh: MeshLike, placements: Sequence[Placement], axis: int, placement: Placement, shape: tuple[int, ...]
) -> theirs.placement_types.Placement:
    """torch's placement for ours on one axis, the axes before it being laid out as `placements` say."""
    torchs = original("torch.distributed.tensor")
    if placement.is_replicate():
        return torchs.Replicate()
    if not isinstance(placement, Shard):
        return torchs.Partial(placement.reduce_op)  # type: ignore[attr-defined]
    if placement.pieces is None:
        return torchs.Shard(placement.dim)
    factor = max(len(part) for row in placement.pieces for part in row)
    parents = parent_sets(mesh, placements[:axis], placement.dim, shape[placement.dim])
    strided = StridedShard(placement.dim, split_factor=factor)
    if factor > 1 and tuple(strided.row(count(parent), mesh.shape[axis]) for parent in parents) == placement.pieces:
        return torchs.placement_types._StridedShard(placement.dim, split_factor=factor)
    raise LayoutError(
        f"to_torch: placements[{axis}] = {placement!r} has no counterpart in torch.distributed.tensor; "
        f"redistribute axis {axis} to Shard({placement.dim}) or Replicate() first"
    )
