"""From what the ranks hold to a layout: global sizes are never guessed from one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.layout import shards_from_table
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
    local = comm.adopt(local, tuple(a for a, p in enumerate(placements) if not p.is_replicate()))
    first = comm.first(local)
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"placements: {len(placements)} given {list(placements)} for a mesh of {len(mesh.shape)} axes "
            f"{mesh.shape}; give one an axis"
        )
    check_reductions(placements, first.dtype)
    placements = tuple(p.at(p.dim + first.ndim) if isinstance(p, Shard) and p.dim < 0 else p for p in placements)
    for axis, p in enumerate(placements):
        if isinstance(p, Shard) and not 0 <= p.dim < first.ndim:
            raise LayoutError(
                f"placements[{axis}] = {p!r}: dim {p.dim} is out of range for a local tensor of {first.ndim} dims "
                f"{tuple(first.shape)}"
            )
    if run_check:
        local = comm.first_of_replicas(local, tuple(a for a, p in enumerate(placements) if p.is_replicate()))
    if shape is not None:
        layout = Layout.make(mesh, placements, tuple(shape), first.dtype, stride or _stride_like(first, shape), first.device)
        for coords in comm.played():
            mine = tuple(comm.at(local, coords).shape)
            if mine != layout.local_shape_at(coords):
                raise LayoutError(
                    f"shape={tuple(shape)}: under {list(placements)} the rank at {coords} holds "
                    f"{layout.local_shape_at(coords)}, but its local tensor is {mine}"
                )
        return local, layout
    cut = any(isinstance(p, Shard) and k > 1 for p, k in zip(placements, mesh.shape, strict=True))
    if not cut and not run_check:
        shape = tuple(first.shape)
        return local, Layout.make(mesh, placements, shape, first.dtype, stride or _stride_like(first, shape), first.device)
    if assume_even:
        shapes = {c: tuple(first.shape) for c in itertools.product(*(range(k) for k in mesh.shape))}
    else:
        shapes = comm.all_shapes(local)
    shape, placements = _global(mesh, placements, shapes)
    return local, Layout.make(mesh, placements, shape, first.dtype, stride or _stride_like(first, shape), first.device)


def check_reductions(placements: Sequence[Placement], dtype: torch.dtype) -> None:
    for axis, p in enumerate(placements):
        if isinstance(p, Partial):
            if p.reduce_op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
                raise LayoutError(f"placements[{axis}] = {p!r}: an average of {dtype} is not a {dtype}; use a float dtype")
            if p.reduce_op in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
                raise LayoutError(f"placements[{axis}] = {p!r}: bitwise reductions need an integer or bool dtype, got {dtype}")


def _global(mesh: Any, placements: tuple[Placement, ...], shapes: Shapes) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """The global shape, and the placements with the sizes the ranks really hold."""
    some = next(iter(shapes.values()))
    out = list(placements)
    total = list(some)
    for dim in range(len(some)):
        axes = tuple(a for a, p in enumerate(placements) if p.is_shard(dim))
        sizes: dict[tuple[int, ...], int] = {}
        for coords, shape in shapes.items():
            if len(shape) != len(some):
                raise LayoutError(f"from_local: the ranks differ in dims: {some} and, at {coords}, {shape}")
            key = tuple(coords[a] for a in axes)
            if sizes.setdefault(key, shape[dim]) != shape[dim]:
                raise LayoutError(
                    f"from_local: ranks that must agree hold different sizes of dim {dim}: {sizes[key]} and "
                    f"{shape[dim]} at coordinates {coords} (shapes {shapes})"
                )
        if not axes:
            continue
        starts, at = {}, 0
        for key in sorted(sizes):
            starts[key] = (at, at + sizes[key])
            at += sizes[key]
        total[dim] = at
        found = shards_from_table(
            [mesh.shape[a] for a in axes], at, lambda c, s=starts: ((s[c],) if s[c][0] < s[c][1] else ()), dim
        )
        for axis, shard in zip(axes, found, strict=True):
            given = placements[axis]
            if isinstance(given, Shard) and given.pieces is not None and given.pieces != shard.pieces:
                counts = [count(part) for part in given.pieces[0]]
                if counts != [count(p) for p in shard.row(at, mesh.shape[axis], 0)]:
                    raise LayoutError(
                        f"placements[{axis}] = {given!r}: the ranks hold {[sizes[k] for k in sorted(sizes)]} of dim {dim}"
                    )
                continue
            out[axis] = shard
    return tuple(total), tuple(out)


def _stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Dense strides for `shape`, with the dims in the order they have in the local tensor's memory."""
    order = sorted(range(local.ndim), key=lambda d: (-local.stride(d), d))
    stride, step = [0] * local.ndim, 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)
