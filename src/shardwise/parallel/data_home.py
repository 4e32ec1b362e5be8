"""Where data parallelism puts a parameter: over the data axis and whatever mesh cuts the parameter already."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.layout import shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import chunk_pieces, compose, count
from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh, _submesh, as_mesh
from shardwise.tensor import DTensor


@dataclass(frozen=True)
class Home:
    """The layouts of one parameter. `own` is how it is kept, `whole` the same with nothing cut over the data axis, and
    `inner` how the others axes lay it out (None: the data axis is the only one). `dim` is the one that is cut."""

    own: Layout
    whole: Layout
    inner: Layout | None
    axis: int
    dim: int | None


class DataAxis:
    """The mesh axis along which every rank has another part of the batch."""

    def __init__(self, device_mesh: Any) -> None:
        self.mesh = as_mesh(device_mesh)
        if len(self.mesh.shape) != 1:
            raise MeshError(
                f"data_parallel: mesh must have one axis, got {self.mesh!r}; give the one of the data, as in mesh['dp']"
            )
        self.size = self.mesh.shape[0]
        self._joints: dict[Mesh, tuple[Mesh, int]] = {}

    def __deepcopy__(self, memo: Any) -> DataAxis:
        return self

    @property
    def coords(self) -> list[int]:
        """The place on the axis of each rank played here."""
        return [c[0] for c in self.mesh.comm.played()]

    def within(self, mesh: Mesh) -> int | None:
        """Which axis of `mesh` this one is."""
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

    def joint_of(self, mesh: Mesh) -> tuple[Mesh, int]:
        """`mesh` if it has this axis, else the one with it; and which axis that is."""
        axis = self.within(mesh)
        return self.joined(mesh) if axis is None else (mesh, axis)

    def joined(self, inner: Mesh) -> tuple[Mesh, int]:
        """The mesh of this axis and those of `inner`, and which of its axes this one is."""
        if inner not in self._joints:
            mine, theirs = self.mesh.source, inner.source
            if isinstance(mine, SimulatedMesh):
                if not isinstance(theirs, SimulatedMesh) or mine._family is not theirs._family:
                    raise MeshError(f"data_parallel: a parameter lies on {inner!r}, which shares no mesh with {mine!r}")
                axes = tuple(sorted((*mine.axes, *theirs.axes)))
                found = _submesh(mine.world, mine.world_names, axes, mine.device_type, mine.first_rank)
                self._joints[inner] = as_mesh(found), axes.index(mine.axes[0])
            else:
                self._joints[inner] = as_mesh(_joined_groups(mine, theirs, inner)), 0
        return self._joints[inner]


def _joined_groups(mine: DeviceMesh, theirs: DeviceMesh, inner: Mesh) -> DeviceMesh:
    """A DeviceMesh over the groups there are: everyone along the data axis says which ranks its inner mesh has."""
    rows: list[Any] = [None] * mine.size()
    dist.all_gather_object(rows, theirs.mesh.tolist(), group=mine.get_group())
    groups = [mine.get_group(), *(theirs.get_group(axis) for axis in range(theirs.ndim))]
    names = ((mine.mesh_dim_names or ("data",))[0], *inner.axis_names)
    return DeviceMesh.from_group(groups, mine.device_type, mesh=torch.tensor(rows), mesh_dim_names=names)


def common_mesh(params: Iterable[Any], data: DataAxis) -> tuple[Mesh, int]:
    """Where plain parameters go: the mesh of those that are laid out, so that all meet; else the data axis alone."""
    found = {data.joint_of(p._layout.mesh) for p in params if isinstance(p, DTensor)}
    return found.pop() if len(found) == 1 else (data.mesh, 0)


def home_of(param: torch.Tensor, data: DataAxis, cut: bool, dtype: torch.dtype, common: tuple[Mesh, int]) -> Home:
    """The layouts of a parameter, plain or laid out over other axes already."""
    inner: Layout | None
    if not isinstance(param, DTensor):
        (joint, axis), inner = common, None
        whole = Layout.make(joint, [REPLICATE] * len(joint.shape), tuple(param.shape), dtype, None, param.device)
    else:
        layout = param._layout
        if layout.is_partial:
            raise LayoutError(
                f"data_parallel: a parameter of shape {layout.shape} is laid out {list(layout.placements)}; "
                f"redistribute it to Shard or Replicate first"
            )
        found = data.within(layout.mesh)
        if found is None:
            joint, axis = data.joined(layout.mesh)
            places = [*layout.placements[:axis], REPLICATE, *layout.placements[axis:]]
            inner = layout.replace(dtype=dtype)
        else:
            joint, axis, places = layout.mesh, found, list(layout.placements)
            if not places[axis].is_replicate() and data.size > 1:
                raise LayoutError(
                    f"data_parallel: a parameter of shape {layout.shape} is laid out {places} and so cut over the data "
                    f"axis {joint.axis_names[axis]!r} already; redistribute it to Replicate() there"
                )
            places[axis] = REPLICATE
            inner = _without(layout.replace(dtype=dtype, stride=None), axis)
        whole = Layout.make(joint, places, layout.shape, dtype, None, layout.device)
    dim = _cut_dim(whole, data.size) if cut else None
    own = whole if dim is None else whole.replace(placements=_placements(whole, axis, dim))
    return Home(own, whole, inner, axis, dim)


def _without(layout: Layout, axis: int) -> Layout | None:
    """The layout as the other axes see it."""
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
    """The dim to cut: the first that nothing else cuts and that gives every rank something, or the longest such."""
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

    def held(coords: tuple[int, ...]) -> Any:
        here = [0] * len(whole.mesh.shape)
        for a, c in zip(axes, coords, strict=True):
            here[a] = c
        mine = whole.held(dim, here)
        return compose(mine, chunk_pieces(count(mine), parts)[here[axis]])

    shards = shards_from_table([whole.mesh.shape[a] for a in axes], whole.shape[dim], held, dim)
    for a, shard in zip(axes, shards, strict=True):
        places[a] = shard
    return tuple(places)


def chunk_sizes(n: int, parts: int) -> list[int]:
    """How much of n indices each part gets.

    >>> chunk_sizes(5, 4)
    [2, 2, 1, 0]
    """
    return [count(piece) for piece in itertools.islice(chunk_pieces(n, parts), parts)]
