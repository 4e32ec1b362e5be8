"""The data mesh, and the layouts of parameters over it and over whatever mesh cuts them already."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.caches import PlanCache, register_cache
from shardwise.comm.base import Coords
from shardwise.comm.group_calls import group_call
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, chunk_pieces, compose, count
from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh, as_mesh
from shardwise.sizes import cut_as_held
from shardwise.tensor import DTensor

Axes = tuple[int, ...]  # numbers of axes of a mesh


class DataMesh:
    """The mesh along which every rank has another part of the batch.

    It has one axis, over which parameters may be cut; or two: copies of them along the first (HSDP), parts along the
    second."""

    def __init__(self, device_mesh: DeviceMesh | SimulatedMesh | Mesh, caller: str = "data_parallel") -> None:
        self.mesh, self.caller = as_mesh(device_mesh), caller
        self.size = math.prod(self.mesh.shape)  # parts of the batch
        self.parts = self.mesh.shape[-1]  # parts of a parameter
        self._joint_meshes: dict[Mesh, tuple[Mesh, Axes]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> DataMesh:
        return self

    @property
    def coords(self) -> list[int]:
        """Which part of a parameter each rank that this process runs has."""
        return [c[-1] for c in self.mesh.comm.coords_here()]

    def placements(self, copies: Placement, parts: Placement) -> list[Placement]:
        """Of a tensor over the data mesh alone."""
        return [*([copies] * (len(self.mesh.shape) - 1)), parts]

    def numbers_in(self, mesh: Mesh) -> Axes | None:
        """The numbers that these axes have in `mesh`, or None where it does not have all of them."""
        found = self._numbers(mesh)
        if not any(number is not None for number in found):
            return None
        if None in found:
            raise MeshError(
                f"{self.caller}: a DTensor lies on {mesh!r}, which has some axes of the data mesh {self.mesh!r}, but "
                f"not all; lay it out over all of them"
            )
        return tuple(number for number in found if number is not None)

    def _numbers(self, mesh: Mesh) -> list[int | None]:
        return [self._number_in(mesh, mine) for mine in range(len(self.mesh.shape))]

    def _number_in(self, mesh: Mesh, mine: int) -> int | None:
        for axis, name in enumerate(mesh.axis_names):
            same = name == self.mesh.axis_names[mine] and mesh.shape[axis] == self.mesh.shape[mine]
            if same and self._same_ranks(mesh, axis, mine):
                return axis
        return None

    def _same_ranks(self, mesh: Mesh, axis: int, number: int) -> bool:
        mine, theirs = self.mesh.source, mesh.source
        if isinstance(mine, SimulatedMesh) or isinstance(theirs, SimulatedMesh):
            return getattr(mine, "_family", None) is getattr(theirs, "_family", ())
        group = dist.get_process_group_ranks(theirs.get_group(axis))
        return group == dist.get_process_group_ranks(mine.get_group(number))

    def joint_mesh(self, inner: Mesh) -> tuple[Mesh, Axes]:
        """The mesh of these axes and those of `inner`, and the numbers of these axes there."""
        if inner not in self._joint_meshes:
            mine, theirs = self.mesh.source, inner.source
            if isinstance(mine, SimulatedMesh):
                if not isinstance(theirs, SimulatedMesh) or mine._family is not theirs._family:
                    raise MeshError(f"{self.caller}: a parameter lies on {inner!r}, which shares no mesh with {mine!r}")
                axes = tuple(sorted((*mine.axes, *theirs.axes)))
                self._joint_meshes[inner] = as_mesh(mine.on_axes(axes)), tuple(map(axes.index, mine.axes))
            else:
                self._joint_meshes[inner] = as_mesh(_joined_groups(mine, theirs, inner)), tuple(range(mine.ndim))
        return self._joint_meshes[inner]

    def mesh_for_plain(self, params: Iterable[torch.Tensor]) -> tuple[Mesh, Axes]:
        """The mesh for plain parameters, and the numbers of these axes there: that of the parameters which are laid
        out, so that all can be used together; else these axes alone."""
        meshes = {p._layout.mesh for p in params if isinstance(p, DTensor)}
        whole = [mesh for mesh in meshes if len({number is None for number in self._numbers(mesh)}) == 1]
        axes = {mesh: self.numbers_in(mesh) for mesh in whole}  # not those of units over other data axes
        found = {self.joint_mesh(mesh) if numbers is None else (mesh, numbers) for mesh, numbers in axes.items()}
        return found.pop() if len(found) == 1 else (self.mesh, tuple(range(len(self.mesh.shape))))


def _joined_groups(mine: DeviceMesh, theirs: DeviceMesh, inner: Mesh) -> DeviceMesh:
    """A DeviceMesh over the groups there are: everyone along the data axes says which ranks its inner mesh has."""
    ranks: list[Any] = theirs.mesh.tolist()
    for axis in reversed(range(mine.ndim)):
        rows: list[Any] = [None] * mine.size(axis)
        with group_call(mine.get_group(axis), "data_parallel", "all_gather", mine.device_type):
            dist.all_gather_object(rows, ranks, group=mine.get_group(axis))
        ranks = rows
    groups = [*map(mine.get_group, range(mine.ndim)), *map(theirs.get_group, range(theirs.ndim))]
    own = mine.mesh_dim_names or ("data", "parts")[: mine.ndim]
    names = (*own, *inner.axis_names)
    return DeviceMesh.from_group(groups, mine.device_type, mesh=torch.tensor(ranks), mesh_dim_names=names)


class ParameterLayouts(NamedTuple):
    """The layouts of one parameter."""

    kept: Layout  # as the optimizer sees it
    whole: Layout  # the same with nothing cut over the data axis
    inner: Layout | None  # over the other axes alone; None where there are none
    axes: Axes  # the numbers of the data axes in the mesh of `kept` and `whole`
    dim: int | None  # the dim that the last data axis cuts in `kept`; None where it cuts nothing


def layouts_of(
    param: torch.Tensor, data: DataMesh, cut: Cut, dtype: torch.dtype, device: torch.device, common: tuple[Mesh, Axes]
) -> ParameterLayouts:
    """The layouts of a parameter, kept as `dtype` on `device`, and in parts unless `cut` gives None for its layout; a
    plain one goes to the mesh `common`."""
    inner: Layout | None = None
    if isinstance(param, DTensor):
        whole, inner, axes = _on_data_axes(param._layout, data, dtype, device)
    else:
        joint, axes = common
        whole = Layout.make(joint, [REPLICATE] * len(joint.shape), tuple(param.shape), dtype, None, device)
    dim = cut(whole, data.parts)
    kept = whole if dim is None else whole.replace(placements=_placements(whole, axes[-1], dim))
    return ParameterLayouts(kept, whole, inner, axes, dim)


def moved(layouts: ParameterLayouts, dtype: torch.dtype, device: torch.device) -> ParameterLayouts:
    """The same layouts with another dtype and on another device."""
    kept, whole, inner, axes, dim = layouts
    change = lambda layout: layout.replace(dtype=dtype, device=device)  # noqa: E731
    return ParameterLayouts(change(kept), change(whole), None if inner is None else change(inner), axes, dim)


def _on_data_axes(
    layout: Layout, data: DataMesh, dtype: torch.dtype, device: torch.device
) -> tuple[Layout, Layout | None, Axes]:
    """For a parameter that is laid out: its layout with the data axes, that without them, and their numbers."""
    places, found = list(layout.placements), data.numbers_in(layout.mesh)
    if layout.is_partial:
        raise LayoutError(
            f"{data.caller}: a parameter of shape {layout.shape} is laid out {places}; "
            f"redistribute it to Shard or Replicate first"
        )
    if found is None:
        joint, axes = data.joint_mesh(layout.mesh)
        for axis in sorted(axes):  # every one is where it belongs once those before it are there
            places.insert(axis, REPLICATE)
        inner: Layout | None = layout.replace(dtype=dtype, device=device)
    else:
        joint, axes = layout.mesh, found
        for axis in axes:
            if not places[axis].is_replicate() and joint.shape[axis] > 1:
                raise LayoutError(
                    f"{data.caller}: a parameter of shape {layout.shape} is laid out {places} and so cut over the data "
                    f"axis {joint.axis_names[axis]!r} already; redistribute it to Replicate() there"
                )
            places[axis] = REPLICATE
        inner = _without(layout.replace(dtype=dtype, stride=None, device=device), axes, data.caller)
    return Layout.make(joint, places, layout.shape, dtype, None, device), inner, axes


def _without(layout: Layout, axes: Axes, caller: str) -> Layout | None:
    mesh = layout.mesh
    names = tuple(name for a, name in enumerate(mesh.axis_names) if a not in axes)
    if not names:
        return None
    if isinstance(mesh.source, DeviceMesh) and mesh.source.mesh_dim_names is None:
        raise MeshError(f"{caller}: name the axes of {mesh!r} (mesh_dim_names), to tell the data axes from others")
    rest = as_mesh(mesh.source[names if len(names) > 1 else names[0]])
    places = [p for a, p in enumerate(layout.placements) if a not in axes]
    return Layout.make(rest, places, layout.shape, layout.dtype, None, layout.device)


Cut = Callable[[Layout, int], int | None]  # which dim of a layout the data axis cuts into so many parts


def cut_nothing(whole: Layout, parts: int) -> int | None:
    """Every rank keeps the whole parameter."""
    return None


def cut_best(whole: Layout, parts: int) -> int | None:
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

    # no layout and no mesh in the key, which would live as long as this cache
    sizes, places = whole.mesh.shape, whole.placements
    key = (whole.shape[dim], dim, axes.index(axis), tuple((sizes[a], places[a]) for a in axes))
    shards = _cuts.get(key)
    if shards is None:
        cut = cut_as_held(whole, axes, dim, whole.shape[dim], held)
        shards = tuple(cut[a] for a in axes)
        _cuts.add(key, shards)
    found = dict(zip(axes, shards, strict=True))
    return tuple(found.get(a, p) for a, p in enumerate(places))


_cuts = PlanCache(1024)  # layers of a model have parameters of the same shapes
register_cache("cuts of parameters", _cuts.info, _cuts.reset)
