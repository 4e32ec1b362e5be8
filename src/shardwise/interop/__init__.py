"""torch's DTensor to ours and back, without a copy: the same local tensor under the same layout, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.tensor as theirs

from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.gradient import grad_placements
from shardwise.layout.layout import parent_sets
from shardwise.layout.placement import as_placement
from shardwise.layout.split import Intervals, chunk_pieces, compose, count, normalize
from shardwise.mesh import as_mesh
from shardwise.protocols import MeshLike
from shardwise.tensor import DTensor
from shardwise.torch_private import AsyncCollectiveTensor

__all__ = ["from_torch", "to_torch"]

_StridedShard = theirs.placement_types._StridedShard  # type: ignore[attr-defined]


def from_torch(tensor: theirs.DTensor) -> DTensor:
    """A DTensor of torch as one of ours, sharing its memory; differentiable.

    Args:
        tensor: The tensor of torch.distributed.tensor, on any layout that has one.

    Raises:
        LayoutError: If it is no DTensor of torch.
    """
    if not isinstance(tensor, theirs.DTensor):
        raise LayoutError(f"from_torch: expected a DTensor of torch.distributed.tensor, got {type(tensor).__name__}")
    shape, mesh = tuple(tensor.shape), as_mesh(tensor.device_mesh)
    ours = _ours(mesh, tensor.placements, shape)
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
    return theirs.DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=layout.stride)


def _ours(mesh: MeshLike, placements: Sequence[Any], shape: tuple[int, ...]) -> tuple[Placement, ...]:
    out: list[Placement] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            rows = _strided_rows(mesh, out, axis, placement.dim, shape, int(placement.split_factor))
            out.append(Shard(placement.dim, pieces=rows))
        else:
            out.append(as_placement(placement, f"placements[{axis}]"))
    return tuple(out)


def _theirs(
    mesh: MeshLike, placements: Sequence[Placement], axis: int, placement: Placement, shape: tuple[int, ...]
) -> theirs.placement_types.Placement:
    """torch's placement for ours on one axis, the axes before it being laid out as `placements` say."""
    if placement.is_replicate():
        return theirs.Replicate()
    if not isinstance(placement, Shard):
        return theirs.Partial(placement.reduce_op)  # type: ignore[attr-defined]
    if placement.pieces is None:
        return theirs.Shard(placement.dim)
    factor = max(len(part) for row in placement.pieces for part in row)
    rows = _strided_rows(mesh, placements[:axis], axis, placement.dim, shape, factor)
    if factor > 1 and rows == placement.pieces:
        return _StridedShard(placement.dim, split_factor=factor)
    raise LayoutError(
        f"to_torch: placements[{axis}] = {placement!r} has no counterpart in torch.distributed.tensor; "
        f"redistribute axis {axis} to Shard({placement.dim}) or Replicate() first"
    )


def _strided_rows(
    mesh: MeshLike, outer: Sequence[Placement], axis: int, dim: int, shape: tuple[int, ...], factor: int
) -> tuple[tuple[Intervals, ...], ...]:
    """The pieces of torch's _StridedShard: each parent is cut into `factor` chunks, and each chunk over the axis."""
    parts, rows = mesh.shape[axis], []
    for parent in parent_sets(mesh, outer, dim, shape[dim]):
        cut = [
            [compose(chunk, part) for part in chunk_pieces(count(chunk), parts)]
            for chunk in chunk_pieces(count(parent), factor)
        ]
        rows.append(tuple(normalize(interval for row in cut for interval in row[i]) for i in range(parts)))
    return tuple(rows)
