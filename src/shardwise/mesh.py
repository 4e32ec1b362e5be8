"""Meshes: torch's DeviceMesh as it is, and `simulate`, a mesh of ranks in this process.

Inside the library a mesh is a `Mesh`: shape, axis names, device and the backend that talks along its axes. There is
one for each DeviceMesh, so layouts can hold it and compare by identity.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.base import Comm, Coords
from shardwise.comm.outside import OutsideComm
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.simulation import SimulatedComm
from shardwise.errors import AxisError, MeshError
from shardwise.torch_private import without_fake_mode

__all__ = ["DeviceMesh", "Mesh", "SimulatedMesh", "as_mesh", "init_device_mesh", "simulate"]


class Mesh:
    """What layouts, moves and the engine know of a mesh. Compared by identity; `as_mesh` makes them."""

    def __init__(self, source: Any, shape: Sequence[int], axis_names: Sequence[str], device: Any, comm: Comm) -> None:
        self.source = source  # what the user gave: a DeviceMesh or a SimulatedMesh
        self.shape = tuple(shape)
        self.axis_names = tuple(axis_names)
        self.device = device
        self.comm = comm
        self.world = _world()
        self.ranks: tuple[int, ...] = _ranks_of(source)
        grid = itertools.product(*(range(k) for k in self.shape))
        self._coords = dict(zip(self.ranks, grid, strict=True))

    def coords(self, rank: int) -> Coords:
        """Where `rank` stands on this mesh."""
        found = self._coords.get(rank)
        if found is None:
            raise MeshError(f"rank {rank} is not in the mesh of ranks {list(self.ranks)}")
        return found

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


_meshes: weakref.WeakKeyDictionary[Any, Mesh] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def as_mesh(mesh: Any, *, outside: bool = False) -> Mesh:
    """The Mesh of a DeviceMesh or SimulatedMesh (always the same one); with None, of the enclosing ``with mesh:``.

    With `outside`, this rank need not be in it."""
    if mesh is None:
        mesh = _current_mesh()
    if isinstance(mesh, Mesh):
        return mesh
    with _lock:
        found = _meshes.get(mesh) if isinstance(mesh, (DeviceMesh, SimulatedMesh)) else None
    if found is not None and (found.comm.simulated or found.world is _world()):
        return found if outside or not found.comm.outside else _refuse(mesh)
    if isinstance(mesh, SimulatedMesh):
        made = Mesh(mesh, mesh.shape, mesh.axis_names, torch.device(mesh.device_type), mesh.comm)
    elif isinstance(mesh, DeviceMesh):
        with without_fake_mode():  # a mesh is made of tensors, and may be met first in a fake mode
            made = _of_device_mesh(mesh, outside)
    else:
        raise MeshError(f"device_mesh: expected a DeviceMesh or simulate(...), got {mesh!r} ({type(mesh).__name__})")
    with _lock:
        if found is not None:
            _meshes[mesh] = made
        return _meshes.setdefault(mesh, made)


def _of_device_mesh(mesh: DeviceMesh, outside: bool) -> Mesh:
    names = mesh.mesh_dim_names or tuple(str(i) for i in range(mesh.ndim))
    here = mesh.get_coordinate() is not None
    comm: Comm = ProcessGroupComm(mesh) if here else OutsideComm(mesh) if outside else _refuse(mesh)
    return Mesh(mesh, tuple(mesh.shape), names, _device_of(mesh.device_type), comm)


def _refuse(mesh: Any) -> NoReturn:
    raise MeshError(
        f"rank {torch.distributed.get_rank()} is not in the mesh {mesh}; call this only on the ranks of the mesh"
    )


def _world() -> Any:
    """The default process group: a mesh made before it was destroyed and made anew must not serve the new one."""
    return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None


def _ranks_of(source: Any) -> tuple[int, ...]:
    """A simulated mesh knows its ranks as ints: it may be met first in a fake mode, where tensors have no values."""
    if isinstance(source, SimulatedMesh):
        return source.ranks
    return tuple(int(r) for r in source.mesh.flatten().tolist())


def _device_of(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


class SimulatedMesh:
    """A mesh of simulated ranks; good wherever a DeviceMesh is. Make one with `simulate`.

    A sub-mesh (``mesh["tp"]``) sees the same ranks through some of the axes: every rank belongs to its own one.
    """

    def __init__(
        self,
        world: tuple[int, ...],
        axis_names: tuple[str, ...],
        axes: tuple[int, ...],
        device: str,
        first_rank: int = 0,
    ) -> None:
        self.world, self.world_names, self.axes, self.first_rank = world, axis_names, axes, first_rank
        self.device_type = device
        self.shape = tuple(world[a] for a in axes)
        self.axis_names = tuple(axis_names[a] for a in axes)
        grid = list(itertools.product(*(range(k) for k in world)))
        self.comm = SimulatedComm(
            self.shape,
            self.axis_names,
            [tuple(c[a] for a in axes) for c in grid],
            [tuple(x for a, x in enumerate(c) if a not in axes) for c in grid],
        )
        spots = {c: first_rank + i for i, c in enumerate(grid)}
        here = itertools.product(*(range(k) for k in self.shape))
        self.ranks = tuple(spots[tuple(c[axes.index(a)] if a in axes else 0 for a in range(len(world)))] for c in here)
        self._family: dict[tuple[int, ...], SimulatedMesh] = {axes: self}  # the views of one world, by their axes
        self._merged: dict[str, SimulatedMesh] = {}  # those with axes merged into one, by its name

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks, as a DeviceMesh has them; of a sub-mesh, those of its first group."""
        return torch.tensor(self.ranks, device="cpu").view(self.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return self.axis_names

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def __len__(self) -> int:
        return self.size()

    def __getitem__(self, names: str | tuple[str, ...]) -> SimulatedMesh:
        names = tuple(names) if isinstance(names, (tuple, list)) else (names,)
        if len(names) == 1 and names[0] in self._merged:
            return self._merged[names[0]]
        for name in names:
            if name not in self.axis_names:
                raise AxisError(f"mesh axis {name!r} is not one of {(*self.axis_names, *self._merged)}")
        axes = tuple(self.world_names.index(name) for name in names)
        if axes not in self._family:
            made = self._family[axes] = SimulatedMesh(
                self.world, self.world_names, axes, self.device_type, self.first_rank
            )
            made._family, made._merged = self._family, self._merged
        return self._family[axes]

    def _flatten(self, mesh_dim_name: str | None = None) -> SimulatedMesh:
        """All axes as one, as DeviceMesh names it: from then on `mesh[name]` is that."""
        name = mesh_dim_name or "_".join(self.axis_names)
        first, end = self.axes[0], self.axes[0] + len(self.axes)
        if self.axes != tuple(range(first, end)):
            raise MeshError(f"_flatten: the axes {self.axis_names} must follow each other in {self.world_names}")
        if name in self.world_names and self.axis_names != (name,):
            raise MeshError(f"_flatten: {name!r} is an axis of {self.world_names} already; choose another name")
        if name not in self._merged:
            world = (*self.world[:first], self.size(), *self.world[end:])
            names = (*self.world_names[:first], name, *self.world_names[end:])
            self._merged[name] = _submesh(world, names, (first,), self.device_type, self.first_rank)
        return self._merged[name]

    def get_coordinate(self) -> list[int]:
        """The first simulated rank's coordinates: every rank lives in this process, so none of them is "this" one."""
        return [0] * self.ndim

    def get_rank(self) -> int:
        return 0

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        raise MeshError(
            f"get_group: the ranks of {self!r} live in one process and have no process group; use redistribute, or "
            f"init_device_mesh under torchrun"
        )

    def __enter__(self) -> SimulatedMesh:
        _stack().append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        _stack().pop()

    def __repr__(self) -> str:
        inside = ", ".join(f"{n}={k}" for n, k in zip(self.axis_names, self.shape, strict=True))
        return f"SimulatedMesh({inside}, device={self.device_type!r})"

    def __deepcopy__(self, memo: Any) -> SimulatedMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _submesh, (self.world, self.world_names, self.axes, self.device_type, self.first_rank)


_threads = threading.local()


def _stack() -> list[Any]:
    found = getattr(_threads, "stack", None)
    if found is None:
        found = _threads.stack = []
    return found


def _current_mesh() -> Any:
    if _stack():
        return _stack()[-1]
    current = getattr(torch.distributed.device_mesh, "_mesh_resources", None)
    if current is not None and hasattr(current, "get_current_mesh"):
        try:
            return current.get_current_mesh()
        except RuntimeError:
            pass
    raise MeshError("device_mesh: None given and no mesh is active; pass a mesh or use `with mesh:`")


_worlds: dict[tuple[Any, ...], SimulatedMesh] = {}


def simulate(
    shape: int | Sequence[int],
    *,
    axis_names: Sequence[str] | None = None,
    device: str = "cpu",
    first_rank: int = 0,
) -> SimulatedMesh:
    """A mesh of simulated ranks in this process. Equal calls give the same mesh.

    Ranks are numbered from `first_rank`: meshes that share numbers share ranks, which matters to moves between them.

    >>> simulate((2, 4), axis_names=("dp", "tp"))
    SimulatedMesh(dp=2, tp=4, device='cpu')
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or not all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in sizes):
        raise MeshError(f"simulate: shape must be one or more ints > 0, got {shape!r}")
    names = tuple(axis_names) if axis_names is not None else tuple(str(i) for i in range(len(sizes)))
    if len(names) != len(sizes) or len(set(names)) != len(names):
        raise MeshError(f"simulate: axis_names {names} must name each of the {len(sizes)} axes of {sizes} once")
    if not isinstance(first_rank, int) or isinstance(first_rank, bool) or first_rank < 0:
        raise MeshError(f"simulate: first_rank must be an int >= 0, got {first_rank!r}")
    return _submesh(sizes, names, tuple(range(len(sizes))), torch.device(device).type, first_rank)


def _submesh(
    world: tuple[int, ...], names: tuple[str, ...], axes: tuple[int, ...], device: str, first_rank: int = 0
) -> SimulatedMesh:
    key = (world, names, device, first_rank)
    with _lock:
        if key not in _worlds:
            _worlds[key] = SimulatedMesh(world, names, tuple(range(len(world))), device, first_rank)
    found = _worlds[key]
    return found if axes == found.axes else found[tuple(names[a] for a in axes)]
