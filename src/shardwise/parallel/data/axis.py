"""The data axis: the mesh axis along which every rank has another part of the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import MeshError
from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh, _submesh, as_mesh


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
        return [c[0] for c in self.mesh.comm.played()]

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

    def mesh_with(self, mesh: Mesh) -> tuple[Mesh, int]:
        """`mesh` if it has this axis, else the mesh of its axes and this one; and the number of this axis there."""
        axis = self.number_in(mesh)
        return self.joint_mesh(mesh) if axis is None else (mesh, axis)

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


def _joined_groups(mine: DeviceMesh, theirs: DeviceMesh, inner: Mesh) -> DeviceMesh:
    """A DeviceMesh over the groups there are: everyone along the data axis says which ranks its inner mesh has."""
    rows: list[Any] = [None] * mine.size()
    dist.all_gather_object(rows, theirs.mesh.tolist(), group=mine.get_group())
    groups = [mine.get_group(), *(theirs.get_group(axis) for axis in range(theirs.ndim))]
    names = ((mine.mesh_dim_names or ("data",))[0], *inner.axis_names)
    return DeviceMesh.from_group(groups, mine.device_type, mesh=torch.tensor(rows), mesh_dim_names=names)
