"""The split of a sequence that gives all ranks the same work under a causal mask; tensors cut so, and whole again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch

from shardwise.api import distribute_tensor
from shardwise.errors import LayoutError, MeshError, check_type
from shardwise.layout import Placement, Shard
from shardwise.layout.layout import shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, normalize
from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh, as_mesh
from shardwise.tensor import DTensor


@overload
def zigzag(dim: int, length: int, ranks: int) -> Shard: ...
@overload
def zigzag(dim: int, length: int, ranks: Sequence[int]) -> tuple[Shard, ...]: ...
def zigzag(dim: int, length: int, ranks: int | Sequence[int]) -> Shard | tuple[Shard, ...]:
    """The Shard that gives rank i of n the chunks i and 2n-1-i of 2n: the same work for all under a causal mask.

    Args:
        dim: the dim that is the sequence.
        length: of the sequence.
        ranks: how many ranks are along the mesh axis; or along each of several, to all of which it is dealt.

    Returns:
        The Shard; a tuple of one for each axis where `ranks` is a sequence.

    Raises:
        LayoutError: `length` or `ranks` is not a number of positions or ranks.

    Example:
        >>> zigzag(1, 16, 4).pieces[0][1]
        ((2, 4), (12, 14))
    """
    check_type(ranks, (int, list, tuple), "zigzag: ranks", "give the number of ranks, or one for each axis")
    sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise LayoutError(f"zigzag: ranks must be an int > 0, or one for each axis, got {ranks!r}")
    if not isinstance(length, int) or length < 0:
        raise LayoutError(f"zigzag: length must be an int >= 0, got {length!r}")
    chunks = 2 * math.prod(sizes)

    def held(coords: tuple[int, ...]) -> Intervals:
        rank = 0
        for coord, n in zip(coords, sizes, strict=True):
            rank = rank * n + coord
        return normalize((length * j // chunks, length * (j + 1) // chunks) for j in (rank, chunks - 1 - rank))

    shards = shards_from_table(sizes, length, held, dim)
    return shards[0] if isinstance(ranks, int) else shards


def context_parallel_shard(
    mesh: DeviceMesh | SimulatedMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> list[DTensor]:
    """Cut the sequences of some tensors by `zigzag`; differentiable.

    Args:
        mesh: the axis or axes to cut over.
        buffers: DTensors, cut over these axes alone, or plain tensors, taken to be the same on all ranks.
        seq_dims: for each tensor, the dim that is the sequence.

    Returns:
        The tensors as DTensors.

    Raises:
        LayoutError: a dim is out of range, or another axis cuts it already.
        MeshError: a DTensor lies on a mesh without these axes.
    """
    cp, found = as_mesh(mesh), []
    for x, dim in zip(buffers, checked_dims(buffers, seq_dims, "context_parallel_shard", "seq_dims"), strict=True):
        if not isinstance(x, DTensor):
            x = distribute_tensor(x, cp.source, [REPLICATE] * len(cp.shape), src_data_rank=None)
        found.append(x.redistribute(placements=balanced_placements(x, dim, cp)))
    return found


def context_parallel_unshard(
    mesh: DeviceMesh | SimulatedMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> list[torch.Tensor]:
    """Make the sequences of some tensors whole; differentiable.

    Args:
        mesh: the axis or axes that the sequences are cut over.
        buffers: a DTensor stays one. A plain tensor is each rank's zig-zag part of the whole.
        seq_dims: for each tensor, the dim that is the sequence.

    Returns:
        DTensors whose sequence is whole on these axes; whole plain tensors where parts were plain.

    Raises:
        LayoutError: a dim is out of range.
        MeshError: a DTensor lies on a mesh without these axes, or `mesh` has several and a tensor is plain.
    """
    cp, found = as_mesh(mesh), list[torch.Tensor]()
    for x, dim in zip(buffers, checked_dims(buffers, seq_dims, "context_parallel_unshard", "seq_dims"), strict=True):
        if isinstance(x, DTensor):
            axes = _axes_in(x, cp)
            places = [REPLICATE if a in axes and p.is_shard(dim) else p for a, p in enumerate(x.placements)]
            found.append(x.redistribute(placements=places))
        else:
            found.append(from_parts(x, cp, dim, None).full_tensor())
    return found


def balanced_placements(x: DTensor, dim: int, cp: Mesh) -> list[Placement]:
    axes = _axes_in(x, cp)
    other = [a for a in x._layout.axes_of(dim) if a not in axes]
    if other:
        names = ", ".join(repr(x._layout.mesh.axis_names[a]) for a in other)
        raise LayoutError(
            f"context_parallel: dim {dim} of a tensor of shape {tuple(x.shape)} is cut on axis {names} already; "
            f"redistribute it, or give a mesh that has that axis too"
        )
    places = list(x.placements)
    for axis, shard in zip(axes, zigzag(dim, x.shape[dim], [x._layout.mesh.shape[a] for a in axes]), strict=True):
        places[axis] = shard
    return places


def _axes_in(x: DTensor, cp: Mesh) -> list[int]:
    """The axes of the mesh of `x` that the context-parallel mesh is made of."""
    mesh = x._layout.mesh
    if mesh is cp:
        return list(range(len(cp.shape)))
    if not set(cp.axis_names) <= set(mesh.axis_names):
        raise MeshError(
            f"context_parallel: mesh {cp!r} and the mesh {mesh!r} of a tensor have no axes in common by name; give the "
            f"tensor's own mesh, or a sub-mesh of it such as mesh['cp']"
        )
    return sorted(mesh.axis(name) for name in cp.axis_names)


def from_parts(local: torch.Tensor, cp: Mesh, dim: int, length: int | None) -> DTensor:
    """The tensor of whose sequence each rank holds its zig-zag part. Without `length`, sizes are exchanged."""
    if len(cp.shape) != 1:
        raise MeshError(
            f"context_parallel: plain tensors are cut over a mesh of one axis, got {cp!r}; give mesh[axis], or DTensors"
        )
    if length is None:
        length = DTensor.from_local(local, cp, [Shard(dim)]).shape[dim]
    shape = (*local.shape[:dim], length, *local.shape[dim + 1 :])
    return DTensor.from_local(local, cp, [zigzag(dim, length, cp.shape[0])], shape=shape)


def checked_dims(buffers: Sequence[object], dims: Sequence[int], what: str, name: str) -> list[int]:
    check_type(buffers, (list, tuple), f"{what}: buffers", "give a list of tensors")
    check_type(dims, (list, tuple), f"{what}: {name}", "give a list of dims")
    if len(buffers) != len(dims):
        raise LayoutError(f"{what}: {len(buffers)} buffers and {len(dims)} {name}; give one for each")
    found = []
    for i, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(x, torch.Tensor):
            raise LayoutError(f"{what}: {name}[{i}]: its buffer must be a tensor, got {type(x).__name__}")
        if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
            raise LayoutError(f"{what}: {name}[{i}] = {dim!r} is out of range for a tensor of {x.dim()} dims")
        found.append(dim % x.dim())
    return found
