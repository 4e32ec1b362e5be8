"""From what the ranks hold to a layout: global sizes are never guessed from one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import DimError, LayoutError
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.layout import dense_stride
from shardwise.layout.placement import check_reductions
from shardwise.layout.split import count

Shapes = dict[tuple[int, ...], tuple[int, ...]]  # by mesh coordinates


def layout_of_locals(
    local: torch.Tensor,
    mesh: Any,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    run_check: bool,
    assume_even: bool,
) -> tuple[Any, Layout]:
    """The local value in the backend's form, and the layout under which the ranks hold it."""
    comm = mesh.comm
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"placements: {len(placements)} given {list(placements)} for a mesh of {len(mesh.shape)} axes "
            f"{mesh.shape}; give one an axis"
        )
    local = comm.adopt(local, tuple(a for a, p in enumerate(placements) if not p.is_replicate()))
    first = comm.first(local)
    check_reductions(placements, first.dtype)
    cut = any(isinstance(p, Shard) and k > 1 for p, k in zip(placements, mesh.shape, strict=True))
    shapes: Shapes | None = None
    if run_check or (cut and shape is None and not assume_even):
        kinds = comm.all_kinds(local)  # before any check of this rank's own tensor: all ranks must come here
        shapes = {coords: shape for coords, (_, shape) in kinds.items()}
        _check_agreement(kinds)
    placements = _from_the_front(placements, first)
    if shape is None and (cut or run_check):
        shape, placements = _global(mesh, placements, shapes or _same_everywhere(mesh, first))
    elif shape is None:
        shape = tuple(first.shape)
    if len(shape) != first.ndim:
        raise LayoutError(
            f"shape={tuple(shape)}: {len(shape)} dims given for local tensors of {first.ndim} dims {tuple(first.shape)}"
        )
    layout = Layout.make(
        mesh, placements, shape, first.dtype, stride or dense_stride(shape, first.stride()), first.device
    )
    for coords, mine in (shapes or {c: tuple(comm.at(local, c).shape) for c in comm.played()}).items():
        if mine != layout.local_shape_at(coords):
            raise LayoutError(
                f"shape={tuple(shape)}: under {list(placements)} the rank at {coords} holds "
                f"{layout.local_shape_at(coords)}, but its local tensor is {mine}"
            )
    if run_check:
        local = comm.first_of_replicas(local, tuple(a for a, p in enumerate(placements) if p.is_replicate()))
    return local, layout


def _from_the_front(placements: tuple[Placement, ...], local: torch.Tensor) -> tuple[Placement, ...]:
    """The placements with dims counted from the front."""
    placements = tuple(p.at(p.dim + local.ndim) if isinstance(p, Shard) and p.dim < 0 else p for p in placements)
    for axis, p in enumerate(placements):
        if isinstance(p, Shard) and not 0 <= p.dim < local.ndim:
            raise DimError(
                f"placements[{axis}] = {p!r}: dim {p.dim} is out of range for a local tensor of {local.ndim} dims "
                f"{tuple(local.shape)}"
            )
    return placements


def _same_everywhere(mesh: Any, local: torch.Tensor) -> Shapes:
    return {c: tuple(local.shape) for c in itertools.product(*(range(k) for k in mesh.shape))}


def _check_agreement(kinds: dict[tuple[int, ...], tuple[str, tuple[int, ...]]]) -> None:
    """All ranks hold the same dtype and number of dims."""
    dtype, some = next(iter(kinds.values()))
    for coords, (other, shape) in kinds.items():
        if len(shape) != len(some):
            raise LayoutError(f"from_local: the ranks differ in dims: {some} and, at {coords}, {shape}")
        if other != dtype:
            raise LayoutError(f"from_local: the ranks differ in dtype: {dtype} and, at {coords}, {other}")


def _global(
    mesh: Any, placements: tuple[Placement, ...], shapes: Shapes
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """The global shape, and the placements with the sizes the ranks really hold."""
    total = list(next(iter(shapes.values())))
    out = list(placements)
    for dim in range(len(total)):
        axes = tuple(a for a, p in enumerate(placements) if p.is_shard(dim))
        sizes: dict[tuple[int, ...], int] = {}
        for coords, shape in shapes.items():
            key = tuple(coords[a] for a in axes)
            if sizes.setdefault(key, shape[dim]) != shape[dim]:
                raise LayoutError(
                    f"from_local: ranks that must agree hold different sizes of dim {dim}: {sizes[key]} and "
                    f"{shape[dim]} at coordinates {coords} (shapes {shapes})"
                )
        total[dim] = sum(sizes.values())
        for depth, axis in enumerate(axes):
            rows: dict[tuple[int, ...], list[int]] = {}  # by the coordinates outside of this axis
            for key in sorted(sizes):
                row = rows.setdefault(key[:depth], [0] * mesh.shape[axis])
                row[key[depth]] += sizes[key]
            out[axis] = _with_sizes(placements[axis], axis, list(rows.values()))
    return tuple(total), tuple(out)


def _with_sizes(shard: Any, axis: int, rows: list[list[int]]) -> Shard:
    """The Shard under which the ranks hold so much; one that says itself how much must agree."""
    if shard.pieces is None:
        return Shard(shard.dim, sizes=rows)
    given = [[count(part) for part in row] for row in shard.pieces]
    if (given * len(rows) if len(given) == 1 else given) != rows:
        held = rows[0] if len(rows) == 1 else rows
        raise LayoutError(f"placements[{axis}] = {shard!r}: the ranks hold {held} indices of dim {shard.dim}")
    return shard
