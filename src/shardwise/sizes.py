"""From what the ranks hold to a layout: global sizes are never guessed from one rank.

A rank sees its own local tensor only, and its size says nothing of the others: 16 rows cut over 4 ranks are 4, 4, 4, 4,
15 rows are 4, 4, 4, 3. A rank that went on with what it remembers would meet the one that changed in collectives of
other sizes: a hang, or wrong values. So before a layout is used, every rank must have heard from every other rank,
unless the sizes follow from what all ranks know anyway. They do where

- the caller gives the global shape (`shape=`, or a layer that knows the size of its input),
- nothing is cut,
- the tensor is one that a style took from a DTensor, or that has been here before (`parallel/styles/remembered.py`).

Else sizes are exchanged: one all-gather of 18 integers along each axis of the mesh, between the hosts where the process
group can do that (``cpu:gloo,cuda:nccl``, which ``init_process_group()`` makes without a backend): no host waits for
its device. On a group of NCCL alone they travel between the devices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from shardwise.comm.base import Comm, Coords
from shardwise.drawing import rank_names
from shardwise.errors import DimError, LayoutError, out_of_range
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.nesting import shards_from_table
from shardwise.layout.placement import StridedShard, check_reductions
from shardwise.layout.shapes import dense_stride
from shardwise.layout.split import Intervals, count
from shardwise.mesh import DeviceMesh, Mesh
from shardwise.protocols import LocalValue

Kinds = Mapping[Coords, tuple[str, tuple[int, ...]]]  # dtype and local shape of each rank, by its mesh coordinates
Shapes = Mapping[Coords, tuple[int, ...]]


def cut_as_held(
    layout: Layout, axes: Sequence[int], dim: int, length: int, held: Callable[[Coords], Intervals]
) -> tuple[Placement, ...]:
    """The placements of a layout, but these axes cut `dim`, of `length`: the rank at `coords` has held(coords)."""
    shape = layout.mesh.shape
    table = lambda here: held(coords_on(axes, here, len(shape)))
    shards = dict(zip(axes, shards_from_table([shape[a] for a in axes], length, table, dim), strict=True))
    return tuple(shards.get(axis, place) for axis, place in enumerate(layout.placements))


def coords_on(axes: Sequence[int], here: Sequence[int], ndim: int) -> Coords:
    """Coordinates on all axes of a mesh: those on some axes, and 0 on the others."""
    at = dict(zip(axes, here, strict=True))
    return tuple(at.get(axis, 0) for axis in range(ndim))


def layout_of_locals(
    local: torch.Tensor,
    mesh: Mesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    run_check: bool = False,
    assume_even: bool = False,
    kinds: Kinds | None = None,
) -> tuple[torch.Tensor, Layout]:
    """The local value in the backend's form, and the layout under which the ranks hold it.

    Arguments are those of `DTensor.from_local`; `kinds` is what `exchange_kinds` gave, if it has been called."""
    comm = mesh.comm
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"placements: {len(placements)} given {list(placements)} for a mesh of {len(mesh.shape)} axes "
            f"{mesh.shape}; give one per axis"
        )
    local = comm.adopt(local, tuple(a for a, p in enumerate(placements) if not p.is_replicate()))
    first = comm.first(local)
    check_reductions(placements, first.dtype)
    cut = any(isinstance(p, (Shard, StridedShard)) and k > 1 for p, k in zip(placements, mesh.shape, strict=True))
    if comm.outside:  # nobody tells this rank sizes: they are taken to be even
        run_check, assume_even = False, True
    if kinds is None and (run_check or (cut and shape is None and not assume_even)):
        kinds = exchange_kinds(local, mesh)  # before any check of this rank's own tensor: all ranks must come here
    if run_check:
        _check_grad_flags(local, mesh)
    shapes = None if kinds is None else {coords: held for coords, (_, held) in kinds.items()}
    placements = _from_the_front(placements, first)
    if comm.outlined and shape is None and cut:
        shape, placements = _global_if_alike(mesh, placements, tuple(first.shape))
    elif shape is None and (cut or run_check):
        alike = dict.fromkeys(itertools.product(*map(range, mesh.shape)), tuple(first.shape))
        strided = {p.dim for p in placements if isinstance(p, StridedShard)}
        shape, found = _global(mesh, tuple(map(_as_shard, placements)), shapes or alike)
        dims = [getattr(p, "dim", None) for p in placements]  # a strided cut says itself who holds how much
        placements = tuple(p if dim in strided else f for p, f, dim in zip(placements, found, dims, strict=True))
    shape = tuple(first.shape if shape is None else shape)
    if len(shape) != first.ndim:
        raise LayoutError(
            f"shape={shape}: {len(shape)} dims given for local tensors of {first.ndim} dims {tuple(first.shape)}"
        )
    stride = stride or dense_stride(shape, first.stride())
    layout = Layout.make(mesh, placements, shape, first.dtype, stride, first.device)
    for coords, held in (shapes or _shapes_here(comm, local)).items():
        if held != layout.local_shape_at(coords):
            raise LayoutError(
                f"shape={layout.shape}: under {list(layout.placements)} the rank at {coords} holds "
                f"{layout.local_shape_at(coords)}, but its local tensor is {held}"
            )
    if comm.outside:
        return comm.shared(local), layout
    if run_check:
        local = comm.first_of_replicas(local, tuple(a for a, p in enumerate(placements) if p.is_replicate()))
    return local, layout


# -- what the ranks hold -----------------------------------------------------------------------------------
def _shapes_here(comm: Comm, local: LocalValue) -> Shapes:
    """The local shapes of the ranks in this process, by coordinates."""
    if comm.simulated:
        return {coords: shape for coords, (_, shape) in comm.all_kinds(local).items()}
    return {coords: tuple(comm.at(local, coords).shape) for coords in comm.coords_here()}


def exchange_kinds(local: torch.Tensor, mesh: Mesh) -> Kinds:
    """The dtype and local shape of every rank (one small exchange, in which all ranks of the mesh take part); raises on
    all ranks alike, where they differ in dtype or in the number of dims."""
    if _hosts_can_gather(local, mesh):  # a tensor of this dtype and shape that takes one element in the host's memory
        local = torch.empty((), dtype=local.dtype, device="cpu").expand(local.shape)
    kinds = mesh.comm.all_kinds(local)
    dtype, some = next(iter(kinds.values()))
    for coords, (other, shape) in kinds.items():
        if len(shape) != len(some):
            odd = _odd_ones(mesh, {c: len(held) for c, (_, held) in kinds.items()})
            raise LayoutError(f"from_local: the ranks differ in dims: {some} and, at {coords}, {shape} ({odd})")
        if other != dtype:
            odd = _odd_ones(mesh, {c: name for c, (name, _) in kinds.items()})
            raise LayoutError(f"from_local: the ranks differ in dtype: {dtype} and, at {coords}, {other} ({odd})")
    return kinds


def _odd_ones(mesh: Mesh, facts: Mapping[Coords, object]) -> str:
    """Which ranks have something that fewest have."""
    counts = Counter(facts.values())
    least = min(counts.values())
    return rank_names([r for r in mesh.ranks if counts[facts[mesh.coords(r)]] == least])


def _check_grad_flags(local: torch.Tensor, mesh: Mesh) -> None:
    """Raise on all ranks alike where the tensors of some require grad and those of others do not: a backward pass would
    run on some ranks only (one more exchange, which `run_check` asks for)."""
    flag = lambda value: torch.empty(int(value.requires_grad), device=value.device)
    flags = mesh.comm.all_kinds(mesh.comm.bind(flag)(local))
    said = {coords: bool(size) for coords, (_, (size,)) in flags.items()}
    if len(set(said.values())) > 1:
        without = [coords for coords, requires in said.items() if not requires]
        raise LayoutError(
            f"from_local: the ranks differ in requires_grad: the local tensors at {without} do not require grad, the "
            f"others do; call requires_grad_() on all of them, or on none"
        )


def _hosts_can_gather(local: torch.Tensor, mesh: Mesh) -> bool:
    """Whether the tensor is on a device and the groups of all axes can exchange what is in a host's memory."""
    source = mesh.source
    if local.device.type == "cpu" or mesh.comm.simulated or not isinstance(source, DeviceMesh):
        return False
    return all("cpu:" in dist.get_backend_config(source.get_group(axis)) for axis in range(source.ndim))


# -- what layout that is -----------------------------------------------------------------------------------
def _from_the_front(placements: tuple[Placement, ...], local: torch.Tensor) -> tuple[Placement, ...]:
    found: list[Placement] = []
    for axis, p in enumerate(placements):
        if isinstance(p, (Shard, StridedShard)):
            if not -local.ndim <= p.dim < local.ndim:
                raise DimError(
                    f"placements[{axis}] = {p!r}: dim {p.dim} is out of range for a local tensor of {local.ndim} dims "
                    f"{tuple(local.shape)}. {out_of_range(p.dim, local.ndim)}"
                )
            p = p.at(p.dim % local.ndim)
        found.append(p)
    return tuple(found)


def _as_shard(placement: Placement) -> Placement:
    """A strided cut as a plain one of the same dim: as far as sums of sizes go, they are the same."""
    return Shard(placement.dim) if isinstance(placement, StridedShard) else placement


def _global(
    mesh: Mesh, placements: tuple[Placement, ...], shapes: Shapes
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """The global shape, and the placements with the sizes the ranks really hold."""
    total = list(next(iter(shapes.values())))
    out = list(placements)
    for dim in range(len(total)):
        axes = tuple(a for a, p in enumerate(placements) if p.is_shard(dim))
        sizes = _sizes_along(dim, axes, shapes)
        total[dim] = sum(sizes.values())
        for depth, axis in enumerate(axes):
            rows: dict[tuple[int, ...], list[int]] = {}  # by the coordinates outside of this axis
            for key in sorted(sizes):
                row = rows.setdefault(key[:depth], [0] * mesh.shape[axis])
                row[key[depth]] += sizes[key]
            out[axis] = _with_sizes(placements[axis], axis, list(rows.values()))
    return tuple(total), tuple(out)


def _global_if_alike(
    mesh: Mesh, placements: tuple[Placement, ...], held: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """The global shape where every rank holds as much as this one, without looking at every rank."""
    total = list(held)
    for axis, p in enumerate(placements):
        if isinstance(p, Shard) and p.pieces is None:
            total[p.dim] *= mesh.shape[axis]
        elif not p.is_replicate() and not p.is_partial():
            raise LayoutError(
                f"placements[{axis}] = {p!r}: on an outlined mesh nobody tells the sizes of other ranks; give shape="
            )
    return tuple(total), placements


def _sizes_along(dim: int, axes: tuple[int, ...], shapes: Shapes) -> dict[tuple[int, ...], int]:
    """The local size of a dim by the coordinates on the axes that cut it; along the other axes all must agree."""
    sizes: dict[tuple[int, ...], int] = {}
    for coords, shape in shapes.items():
        key = tuple(coords[a] for a in axes)
        if sizes.setdefault(key, shape[dim]) != shape[dim]:
            raise LayoutError(
                f"from_local: ranks that must agree hold different sizes of dim {dim}: {sizes[key]} and "
                f"{shape[dim]} at coordinates {coords} (shapes {shapes})"
            )
    return sizes


def _with_sizes(placement: Placement, axis: int, rows: list[list[int]]) -> Shard:
    """The Shard under which the ranks hold so much; a Shard that says itself how much must agree."""
    assert isinstance(placement, Shard)  # it cuts a dim
    if placement.pieces is None:
        return Shard(placement.dim, sizes=rows)
    said = [[count(part) for part in row] for row in placement.pieces]
    if (said * len(rows) if len(said) == 1 else said) != rows:
        held = rows[0] if len(rows) == 1 else rows
        raise LayoutError(f"placements[{axis}] = {placement!r}: the ranks hold {held} indices of dim {placement.dim}")
    return placement
