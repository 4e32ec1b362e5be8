"""Meshes inside the library: one `Mesh` for torch's DeviceMesh and for `simulate`, which layouts compare by identity.

A `Mesh` lives as long as the user's mesh or a tensor on it. Equal DeviceMeshes over the same process groups share one;
those over other groups do not, since two threads may talk on them at the same time.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.caches import PlanCache, PlanCaches, register_cache
from shardwise.comm.base import Comm, Coords
from shardwise.comm.outside import OutsideComm
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.errors import AxisError, MeshError
from shardwise.outlined_mesh import OutlinedMesh, outline
from shardwise.simulated_mesh import SimulatedMesh, _submesh, active_mesh, simulate  # noqa: F401  (_submesh: pickles)
from shardwise.torch_private.distributed import active_device_mesh, root_mesh
from shardwise.torch_private.tensors import without_fake_mode

__all__ = ["DeviceMesh", "Mesh", "OutlinedMesh", "SimulatedMesh", "as_mesh", "init_device_mesh", "outline", "simulate"]

UserMesh: TypeAlias = DeviceMesh | SimulatedMesh


PLANS = PlanCaches(maxsize=8192)
register_cache("plans", PLANS.info, PLANS.reset)


class Mesh:
    """What layouts, moves and the engine know of a mesh. Compared by identity; `as_mesh` makes them."""

    def __init__(
        self, source: UserMesh, shape: Sequence[int], axis_names: Sequence[str], device: torch.device, comm: Comm
    ) -> None:
        self.source: Any = source  # what the user made
        self.shape, self.axis_names = tuple(shape), tuple(axis_names)
        self.device, self.comm = device, comm
        self.world = _world()  # the default process group when this was made
        self.ranks = _ranks_of(source)  # the last axis fastest
        self.plans = PlanCache.one_of(PLANS)  # of calls on tensors of this mesh
        self.tried = PlanCache(1024)  # local calls of programs that torch was asked about, see strategy/empty_ranks.py

    def is_alike(self, other: Mesh) -> bool:
        """Whether it is of the same processes in the same order: only the process groups may be others."""
        mine, theirs = ((m.ranks, m.shape, m.axis_names, m.device, m.comm.simulated) for m in (self, other))
        return mine == theirs and not self.comm.simulated

    @cached_property
    def _coords(self) -> dict[int, Coords]:
        return dict(zip(self.ranks, itertools.product(*map(range, self.shape)), strict=True))

    def coords(self, rank: int) -> Coords:
        """Where `rank` stands on this mesh."""
        if rank not in self._coords:
            raise MeshError(f"rank {rank} is not in the mesh of ranks {list(self.ranks)}")
        return self._coords[rank]

    def axis(self, axis: int | str) -> int:
        """The number of an axis, by number or name."""
        if isinstance(axis, str):
            if axis not in self.axis_names:
                raise AxisError(f"axis {axis!r} is not one of {self.axis_names}")
            return self.axis_names.index(axis)
        if not -len(self.shape) <= axis < len(self.shape):
            raise MeshError(f"axis {axis} is out of range for a mesh of {len(self.shape)} axes {self.shape}")
        return axis % len(self.shape)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))
        return f"mesh({inside})"

    def __reduce__(self) -> tuple[Any, ...]:
        return as_mesh, (self.source,)


class _Held:
    """The Mesh of a user's mesh, kept on that object, so that both die together. Copies and pickles of the object do
    not have it: there it is an empty OrderedDict, which any unpickler takes."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


_HELD = "_shardwise_mesh"  # the attribute of a user's mesh
_meshes: weakref.WeakValueDictionary[Hashable, Mesh] = weakref.WeakValueDictionary()  # of DeviceMeshes, by value
_lock = threading.Lock()


def as_mesh(mesh: UserMesh | Mesh | None, *, outside: bool = False) -> Mesh:
    """The Mesh of a user's mesh, always the same one; of the enclosing ``with mesh:`` if None. This rank must be in it,
    unless it may be `outside`."""
    if mesh is None:
        mesh = active_mesh() or active_device_mesh()
        if mesh is None:
            raise MeshError(
                "No device mesh is currently active! Pass a device_mesh, or use `with mesh:`; a mesh is made by "
                "simulate((4,)) in one process, and by init_device_mesh('cpu', (4,)) under torchrun"
            )
    if isinstance(mesh, Mesh):
        return mesh
    held = getattr(mesh, _HELD, None)
    if type(held) is _Held and (held.mesh.comm.simulated or held.mesh.comm.outlined or held.mesh.world is _world()):
        found = held.mesh
    elif isinstance(mesh, SimulatedMesh):
        found = _of_simulated(mesh)
    elif isinstance(mesh, DeviceMesh):
        with without_fake_mode():  # a mesh is made of tensors, and may be met first in a fake mode
            found = _of_device_mesh(mesh)
    else:
        what = f"device_mesh: expected a DeviceMesh or simulate(...), got {mesh!r} ({type(mesh).__name__})"
        if isinstance(mesh, (list, tuple)) and any(hasattr(value, "is_replicate") for value in mesh):
            what += f"; placements without a mesh are given by name: placements={mesh!r}"
        raise MeshError(what)
    if found.comm.outside and not outside:
        here = torch.distributed.get_rank()
        raise MeshError(f"rank {here} is not in the mesh {mesh}; call this only on the ranks of the mesh")
    return found


def root_of(mesh: Mesh) -> Mesh | None:
    """The mesh that it was cut from, or itself; None where its axes have no names to cut by."""
    source = mesh.source
    if isinstance(source, SimulatedMesh):
        return as_mesh(source.on_axes(tuple(range(len(source.world)))))
    if source.mesh_dim_names is None:
        return None
    return as_mesh(root_mesh(source), outside=True)


def _of_simulated(source: SimulatedMesh) -> Mesh:
    with _lock:
        held = getattr(source, _HELD, None)
        if type(held) is not _Held:
            device = getattr(source, "device", torch.device(source.device_type))
            held = _Held(Mesh(source, source.shape, source.axis_names, device, source.comm))
            setattr(source, _HELD, held)
    return held.mesh


def _of_device_mesh(source: DeviceMesh) -> Mesh:
    coords = source.get_coordinate()
    if coords is not None and not all(type(c) is int for c in coords):
        raise MeshError(
            f"{source} is made in a LocalTensorMode of torch's; to play all ranks in one process, leave that mode and "
            f"use shardwise.simulate({tuple(source.shape)}) as the mesh"
        )
    names = tuple(source.mesh_dim_names or map(str, range(source.ndim)))
    groups = _groups_of(source) if coords is not None else (_world(),)
    where = None if coords is None else tuple(coords)  # ranks that are threads share one table
    key = (_ranks_of(source), tuple(source.shape), names, source.device_type, where, groups)
    with _lock:
        found = _meshes.get(key) if groups else _equal_one(source)
        if found is None or found.world is not _world():
            comm = OutsideComm(source) if coords is None else ProcessGroupComm(source)
            found = _meshes[key] = Mesh(source, tuple(source.shape), names, _device_of(source.device_type), comm)
        setattr(source, _HELD, _Held(found))
    return found


def _groups_of(mesh: DeviceMesh) -> tuple[Any, ...]:
    """The process group of each axis; none where they are not known here, as of a mesh from another job's pickle."""
    try:
        return tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
    except (RuntimeError, AssertionError, LookupError):
        return ()


def _equal_one(source: DeviceMesh) -> Mesh | None:
    """The Mesh of a DeviceMesh of equal value in the present world."""
    return next((m for m in _meshes.values() if m.world is _world() and m.source == source), None)


def _world() -> Any:
    """The default process group: a mesh made before it was destroyed and made anew must not serve the new one."""
    return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None


def _ranks_of(source: UserMesh) -> tuple[int, ...]:
    """A simulated mesh knows its ranks as ints: it may be met first in a fake mode, where tensors have no values."""
    if isinstance(source, SimulatedMesh):
        return source.ranks
    return tuple(int(r) for r in source.mesh.flatten().tolist())


def _device_of(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
