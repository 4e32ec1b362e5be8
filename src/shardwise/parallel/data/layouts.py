"""The layouts of a parameter under data parallelism: over the data axis, and over whatever mesh cuts it already."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.layout import shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, chunk_pieces, compose, count
from shardwise.mesh import DeviceMesh, Mesh, as_mesh
from shardwise.parallel.data.axis import DataAxis
from shardwise.tensor import DTensor


@dataclass(frozen=True)
class ParameterLayouts:
    """The layouts of one parameter."""

    kept: Layout  # as the optimizer sees it
    whole: Layout  # the same with nothing cut over the data axis
    inner: Layout | None  # over the other axes alone; None where the data axis is the only one
    axis: int  # the number of the data axis in the mesh of `kept` and `whole`
    dim: int | None  # the dim that the data axis cuts in `kept`; None where it cuts nothing


def common_mesh(params: Iterable[torch.Tensor], data: DataAxis) -> tuple[Mesh, int]:
    """The mesh for plain parameters, and the number of the data axis there: the mesh of the parameters that are laid
    out, so that all can be used together; else the data axis alone."""
    found = {data.mesh_with(p._layout.mesh) for p in params if isinstance(p, DTensor)}
    return found.pop() if len(found) == 1 else (data.mesh, 0)


def layouts_of(
    param: torch.Tensor, data: DataAxis, cut: bool, dtype: torch.dtype, common: tuple[Mesh, int]
) -> ParameterLayouts:
    """The layouts of a parameter, plain or laid out over other axes already.

    `cut` says whether each rank along the data axis keeps only a part, `dtype` what it is kept as, `common` where a
    plain parameter goes. Raises LayoutError where it is a pending sum, or the data axis cuts it already."""
    inner: Layout | None = None
    if isinstance(param, DTensor):
        whole, inner, axis = _on_data_axis(param._layout, data, dtype)
    else:
        joint, axis = common
        whole = Layout.make(joint, [REPLICATE] * len(joint.shape), tuple(param.shape), dtype, None, param.device)
    dim = _cut_dim(whole, data.size) if cut else None
    kept = whole if dim is None else whole.replace(placements=_placements(whole, axis, dim))
    return ParameterLayouts(kept, whole, inner, axis, dim)


def _on_data_axis(layout: Layout, data: DataAxis, dtype: torch.dtype) -> tuple[Layout, Layout | None, int]:
    """For a parameter that is laid out: its layout with the data axis, that without it, and the axis's number."""
    if layout.is_partial:
        raise LayoutError(
            f"data_parallel: a parameter of shape {layout.shape} is laid out {list(layout.placements)}; "
            f"redistribute it to Shard or Replicate first"
        )
    places = list(layout.placements)
    found = data.number_in(layout.mesh)
    if found is None:
        joint, axis = data.joint_mesh(layout.mesh)
        places.insert(axis, REPLICATE)
        inner: Layout | None = layout.replace(dtype=dtype)
    else:
        joint, axis = layout.mesh, found
        if not places[axis].is_replicate() and data.size > 1:
            raise LayoutError(
                f"data_parallel: a parameter of shape {layout.shape} is laid out {places} and so cut over the data "
                f"axis {joint.axis_names[axis]!r} already; redistribute it to Replicate() there"
            )
        places[axis] = REPLICATE
        inner = _without(layout.replace(dtype=dtype, stride=None), axis)
    return Layout.make(joint, places, layout.shape, dtype, None, layout.device), inner, axis


def _without(layout: Layout, axis: int) -> Layout | None:
    """The layout over the other axes alone, or None where there are none."""
    mesh = layout.mesh
    names = tuple(name for a, name in enumerate(mesh.axis_names) if a != axis)
    if not names:
        return None
    if isinstance(mesh.source, DeviceMesh) and mesh.source.mesh_dim_names is None:
        raise MeshError(f"data_parallel: name the axes of {mesh!r} (mesh_dim_names), to tell the data axis from others")
    rest = as_mesh(mesh.source[names if len(names) > 1 else names[0]])
    places = [p for a, p in enumerate(layout.placements) if a != axis]
    return Layout.make(rest, places, layout.shape, layout.dtype, None, layout.device)


def _cut_dim(whole: Layout, parts: int) -> int | None:
    """The dim to cut, of those that nothing else cuts: the first with something for every rank, else the longest."""
    free = [d for d in range(whole.ndim) if not whole.axes_of(d)]
    if whole.ndim == 0:
        return None
    if not free:
        return 0
    return next((d for d in free if whole.shape[d] >= parts), max(free, key=lambda d: whole.shape[d]))


def _placements(whole: Layout, axis: int, dim: int) -> tuple[Placement, ...]:
    """The data axis cuts what each rank holds of `dim` into chunks, whatever the others do to it."""
    others = whole.axes_of(dim)
    places = list(whole.placements)
    if not others:
        places[axis] = Shard(dim)
        return tuple(places)
    parts, axes = whole.mesh.shape[axis], sorted((axis, *others))

    def held(coords: tuple[int, ...]) -> Intervals:
        here = [0] * len(whole.mesh.shape)
        for a, c in zip(axes, coords, strict=True):
            here[a] = c
        mine = whole.held(dim, here)
        return compose(mine, chunk_pieces(count(mine), parts)[here[axis]])

    shards = shards_from_table([whole.mesh.shape[a] for a in axes], whole.shape[dim], held, dim)
    for a, shard in zip(axes, shards, strict=True):
        places[a] = shard
    return tuple(places)
