"""The data axis, and the layouts of parameters over it and over whatever mesh cuts them already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.comm.base import Coords
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, chunk_pieces, compose, count
from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh, _submesh, as_mesh
from shardwise.sizes import cut_as_held
from shardwise.tensor import DTensor


class DataAxis:
    """The mesh axis along which every rank has another part of the batch."""

    def __init__(self, device_mesh: DeviceMesh | SimulatedMesh | Mesh) -> None:
        self.mesh = as_mesh(device_mesh)
        if len(self.mesh.shape) != 1:
            raise MeshError(
                f"data_parallel: mesh must have one axis, got {self.mesh!r}; give the one of the data, as in mesh['dp']"
            )
        self.size = self.mesh.shape[0]
        self._joint_meshes: dict[Mesh, tuple[Mesh, int]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> DataAxis:
        return self

    @property
    def coords(self) -> list[int]:
        """The coordinate on the axis of each rank that this process runs."""
        return [c[0] for c in self.mesh.comm.coords_here()]

    def number_in(self, mesh: Mesh) -> int | None:
        """The number that this axis has in `mesh`, or None where `mesh` does not have it."""
        for axis, name in enumerate(mesh.axis_names):
            if name == self.mesh.axis_names[0] and mesh.shape[axis] == self.size and self._same_ranks(mesh, axis):
                return axis
        return None

    def _same_ranks(self, mesh: Mesh, axis: int) -> bool:
        mine, theirs = self.mesh.source, mesh.source
        if isinstance(mine, SimulatedMesh) or isinstance(theirs, SimulatedMesh):
            return getattr(mine, "_family", None) is getattr(theirs, "_family", ())
        group = dist.get_process_group_ranks(theirs.get_group(axis))
        return group == dist.get_process_group_ranks(mine.get_group())

    def joint_mesh(self, inner: Mesh) -> tuple[Mesh, int]:
        """The mesh of this axis and those of `inner`, and the number of this axis there."""
        if inner not in self._joint_meshes:
            mine, theirs = self.mesh.source, inner.source
            if isinstance(mine, SimulatedMesh):
                if not isinstance(theirs, SimulatedMesh) or mine._family is not theirs._family:
                    raise MeshError(f"data_parallel: a parameter lies on {inner!r}, which shares no mesh with {mine!r}")
                axes = tuple(sorted((*mine.axes, *theirs.axes)))
                found = _submesh(mine.world, mine.world_names, axes, mine.device_type, mine.first_rank)
                self._joint_meshes[inner] = as_mesh(found), axes.index(mine.axes[0])
            else:
                self._joint_meshes[inner] = as_mesh(_joined_groups(mine, theirs, inner)), 0
        return self._joint_meshes[inner]

    def mesh_for_plain(self, params: Iterable[torch.Tensor]) -> tuple[Mesh, int]:
        """The mesh for plain parameters, and the number of this axis there: that of the parameters which are laid out,
        so that all can be used together; else this axis alone."""
        axes = {p._layout.mesh: self.number_in(p._layout.mesh) for p in params if isinstance(p, DTensor)}
        found = {self.joint_mesh(mesh) if axis is None else (mesh, axis) for mesh, axis in axes.items()}
        return found.pop() if len(found) == 1 else (self.mesh, 0)


def _joined_groups(mine: DeviceMesh, theirs: DeviceMesh, inner: Mesh) -> DeviceMesh:
    """A DeviceMesh over the groups there are: everyone along the data axis says which ranks its inner mesh has."""
    rows: list[Any] = [None] * mine.size()
    dist.all_gather_object(rows, theirs.mesh.tolist(), group=mine.get_group())
    groups = [mine.get_group(), *(theirs.get_group(axis) for axis in range(theirs.ndim))]
    names = ((mine.mesh_dim_names or ("data",))[0], *inner.axis_names)
    return DeviceMesh.from_group(groups, mine.device_type, mesh=torch.tensor(rows), mesh_dim_names=names)


class ParameterLayouts(NamedTuple):
    """The layouts of one parameter."""

    kept: Layout  # as the optimizer sees it
    whole: Layout  # the same with nothing cut over the data axis
    inner: Layout | None  # over the other axes alone; None where the data axis is the only one
    axis: int  # the number of the data axis in the mesh of `kept` and `whole`
    dim: int | None  # the dim that the data axis cuts in `kept`; None where it cuts nothing


def layouts_of(
    param: torch.Tensor, data: DataAxis, cut: bool, dtype: torch.dtype, common: tuple[Mesh, int]
) -> ParameterLayouts:
    """The layouts of a parameter, kept as `dtype` and, if `cut`, in parts; a plain one goes to the mesh `common`."""
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
    places, found = list(layout.placements), data.number_in(layout.mesh)
    if layout.is_partial:
        raise LayoutError(
            f"data_parallel: a parameter of shape {layout.shape} is laid out {places}; "
            f"redistribute it to Shard or Replicate first"
        )
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
    if not free:
        return 0 if whole.ndim else None
    return next((d for d in free if whole.shape[d] >= parts), max(free, key=lambda d: whole.shape[d]))


def _placements(whole: Layout, axis: int, dim: int) -> tuple[Placement, ...]:
    """The data axis cuts what each rank holds of `dim` into chunks, whatever the others do to it."""
    parts, axes = whole.mesh.shape[axis], sorted((axis, *whole.axes_of(dim)))
    if len(axes) == 1:
        return tuple(Shard(dim) if a == axis else p for a, p in enumerate(whole.placements))

    def held(coords: Coords) -> Intervals:
        mine = whole.held(dim, coords)
        return compose(mine, chunk_pieces(count(mine), parts)[coords[axis]])

    return cut_as_held(whole, axes, dim, whole.shape[dim], held)
