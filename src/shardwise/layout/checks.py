"""Checks of what makes a layout: placements, and values from outside. Brings placements into their canonical form."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import DimError, LayoutError, out_of_range
from shardwise.layout.nesting import parent_sets
from shardwise.layout.placement import Partial, Placement, Shard, StridedShard
from shardwise.layout.split import chunk_pieces, count, normalize
from shardwise.protocols import MeshLike


def checked_values(
    shape: object, dtype: object, stride: object, device: object
) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...], torch.device]:
    """What a layout says of the global tensor, from a file or another process; LayoutError where it makes no sense."""
    shape, stride = _checked_ints("shape", shape), _checked_ints("stride", stride)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"layout: dtype must be a torch.dtype, got {dtype!r}")
    if not isinstance(device, torch.device):
        raise LayoutError(f"layout: device must be a torch.device, got {device!r}")
    return shape, dtype, stride, device


def _checked_ints(name: str, sizes: object) -> tuple[int, ...]:
    if not isinstance(sizes, (tuple, list)) or not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise LayoutError(f"layout: {name} must be ints from 0 to 2**63 - 1, got {sizes!r}")
    return tuple(sizes)


def check_sizes(shape: tuple[Any, ...], stride: tuple[Any, ...]) -> None:
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise LayoutError(f"shape = {shape}: sizes must be ints >= 0")
    if len(stride) != len(shape):
        raise LayoutError(f"stride = {stride}: {len(stride)} strides for a shape of {len(shape)} dims {shape}")


def _as_many(mesh: MeshLike, placements: tuple[Placement, ...]) -> list[str]:
    """Placements for an error message: the given ones, and Replicate() for axes that have none."""
    shown = list(map(repr, placements[: len(mesh.shape)]))
    return shown + ["Replicate()"] * (len(mesh.shape) - len(shown))


def check_placements(
    mesh: MeshLike, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """The placements in canonical form: dims counted from the front, explicit splits that equal chunks as chunks."""
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"`placements` must have the same length as `device_mesh.ndim`! Found placements length: "
            f"{len(placements)}, and device_mesh.ndim: {len(mesh.shape)}. Given were "
            f"[{', '.join(map(repr, placements))}] for a mesh of shape {tuple(mesh.shape)}; give one for each axis, as "
            f"[{', '.join(_as_many(mesh, placements))}]"
        )
    _check_reductions_commute(mesh, placements)
    if not any(
        (isinstance(p, Shard) and (p.pieces is not None or p.dim < 0 or p.dim >= len(shape)))
        or isinstance(p, StridedShard)
        for p in placements
    ):
        return placements
    out: list[Placement] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, StridedShard)):
            dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
            if not 0 <= dim < len(shape):
                raise DimError(
                    f"placements[{axis}] = {placement!r}: dim {placement.dim} is out of range for a tensor of shape "
                    f"{shape}; "
                    + (f"use {-len(shape)} to {len(shape) - 1}" if shape else "it has no dim to shard")
                    + f". {out_of_range(placement.dim, len(shape))}"
                )
            placement = placement.at(dim)
            if isinstance(placement, StridedShard):
                parents = parent_sets(mesh, out, dim, shape[dim])
                rows = [placement.row(count(parent), mesh.shape[axis]) for parent in parents]
                placement = Shard(dim, pieces=rows)
            if placement.pieces is not None:
                placement = _check_pieces(mesh, tuple(out), axis, placement, shape)
        out.append(placement)
    return tuple(out)


def _check_reductions_commute(mesh: MeshLike, placements: tuple[Placement, ...]) -> None:
    """The order in which axes are reduced must not matter: sums and averages mix, others only with themselves."""
    ops = {p.reduce_op: axis for axis, p in enumerate(placements) if isinstance(p, Partial) and mesh.shape[axis] > 1}
    if len(ops) > 1 and not ops.keys() <= {"sum", "avg"}:
        pair = ", ".join(f"placements[{axis}] = {placements[axis]!r}" for axis in sorted(ops.values()))
        raise LayoutError(
            f"{pair}: these reductions do not commute, so the value would depend on their order; reduce one first"
        )


def _check_pieces(
    mesh: MeshLike, outer: tuple[Placement, ...], axis: int, shard: Shard, shape: tuple[int, ...]
) -> Shard:
    """Each row must deal out exactly what its parent holds; equal to a chunk split, it becomes one."""
    parts = mesh.shape[axis]
    parents = parent_sets(mesh, outer, shard.dim, shape[shard.dim])
    pieces = shard.pieces
    assert pieces is not None
    if len(pieces) == 1 and len(parents) > 1:
        pieces = pieces * len(parents)
    if len(pieces) != len(parents):
        raise LayoutError(
            f"placements[{axis}] = {shard!r}: {len(pieces)} rows of sizes, but the axes before it cut dim {shard.dim} "
            f"into {len(parents)} parts; give {len(parents)} rows, or one for all"
        )
    for parent, row in zip(parents, pieces, strict=True):
        if len(row) != parts:
            raise LayoutError(
                f"placements[{axis}] = {shard!r}: {len(row)} sizes for a mesh axis of {parts} ranks; give {parts}"
            )
        n, given = count(parent), sum(map(count, row))
        if given != n:
            raise LayoutError(
                f"placements[{axis}] = {shard!r}: the sizes {tuple(map(count, row))} add up to {given}, but there are "
                f"{n} indices of dim {shard.dim} of shape {shape} to deal out"
            )
        if normalize(part for r in row for part in r) != normalize([(0, n)]):
            raise LayoutError(
                f"placements[{axis}] = {shard!r}: the pieces overlap or leave holes; they must deal out each of "
                f"the {n} indices [0, {n}) of dim {shard.dim} of shape {shape} once"
            )
    if all(row == chunk_pieces(count(parent), parts) for parent, row in zip(parents, pieces, strict=True)):
        return Shard(shard.dim)
    return Shard(shard.dim, pieces=pieces)
