"""`simulate`: a mesh of ranks in this process, good wherever a DeviceMesh is."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from shardwise.comm.simulation import SimulatedComm
from shardwise.drawing import figure, markup, mesh_picture
from shardwise.errors import AxisError, MeshError


class SimulatedMesh:
    """A mesh of simulated ranks, good wherever a DeviceMesh is. Make one with `simulate`.

    A sub-mesh (``mesh["tp"]``) has the same ranks, but only some of the axes: as with a DeviceMesh, every rank sees its
    own row of the world along those axes.

    Attributes:
        world, world_names: Size and name of every axis of the mesh that `simulate` made; `axes` are those of this one.
        shape, axis_names: Size and name of the axes of this one.
        ranks: The numbers of the ranks; of a sub-mesh, those of the first row.
    """

    def __init__(
        self, world: tuple[int, ...], names: tuple[str, ...], axes: tuple[int, ...], device: str, first_rank: int = 0
    ) -> None:
        self.world, self.world_names, self.axes, self.first_rank = world, names, axes, first_rank
        self.device_type = device
        self.shape = tuple(world[a] for a in axes)
        self.axis_names = tuple(names[a] for a in axes)
        grid = list(itertools.product(*map(range, world)))
        spectators = [tuple(x for a, x in enumerate(c) if a not in axes) for c in grid]
        self.comm = SimulatedComm(self.shape, self.axis_names, [tuple(c[a] for a in axes) for c in grid], spectators)
        spots = {c: first_rank + i for i, c in enumerate(grid)}
        here = itertools.product(*map(range, self.shape))
        self.ranks = tuple(spots[tuple(c[axes.index(a)] if a in axes else 0 for a in range(len(world)))] for c in here)
        self._family: dict[tuple[int, ...], SimulatedMesh] = {axes: self}  # this world and its sub-meshes, by axes
        self._merged: dict[str, SimulatedMesh] = {}  # meshes with axes merged into one, by the name of that axis

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks in the form that DeviceMesh has; on a sub-mesh, those of its first group."""
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
            return self.on_axes(axes)
        return self._family[axes]

    def on_axes(self, axes: tuple[int, ...]) -> SimulatedMesh:
        """This world seen along these of its axes: always the same mesh."""
        if axes not in self._family:
            made = self.with_axes(axes)
            self._family[axes], made._family, made._merged = made, self._family, self._merged
        return self._family[axes]

    def with_axes(self, axes: tuple[int, ...]) -> SimulatedMesh:
        """A new mesh of this world with these axes."""
        return SimulatedMesh(self.world, self.world_names, axes, self.device_type, self.first_rank)

    def with_merged(self, world: tuple[int, ...], names: tuple[str, ...], axis: int) -> SimulatedMesh:
        """The mesh of the one axis that the axes of this one were merged into."""
        return _submesh(world, names, (axis,), self.device_type, self.first_rank)

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
            self._merged[name] = self.with_merged(world, names, first)
        return self._merged[name]

    def get_coordinate(self) -> list[int]:
        """The first simulated rank's coordinates: every rank lives in this process, so none of them is "this" one."""
        return [0] * self.ndim

    def get_rank(self) -> int:
        return 0

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0

    def get_group(self, mesh_dim: int | str | None = None) -> NoReturn:
        raise MeshError(
            f"get_group: the ranks of {self!r} live in one process and have no process group; use redistribute, or "
            f"init_device_mesh under torchrun"
        )

    def __enter__(self) -> SimulatedMesh:
        _active.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _active.stack.pop()

    def __repr__(self) -> str:
        inside = ", ".join(f"{n}={k}" for n, k in zip(self.axis_names, self.shape, strict=True))
        return f"SimulatedMesh({inside}, device={self.device_type!r})"

    def _repr_html_(self) -> str:
        return figure(mesh_picture(repr(self), self.shape, self.axis_names, self.ranks))

    def __rich__(self) -> str:
        return markup(mesh_picture(repr(self), self.shape, self.axis_names, self.ranks))

    def __deepcopy__(self, memo: object) -> SimulatedMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _submesh, (self.world, self.world_names, self.axes, self.device_type, self.first_rank)


class _Active(threading.local):
    """The meshes whose ``with`` blocks a thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[SimulatedMesh] = []


_active = _Active()


def active_mesh() -> SimulatedMesh | None:
    """The simulated mesh of the innermost ``with mesh:`` of this thread."""
    return _active.stack[-1] if _active.stack else None


_worlds: weakref.WeakValueDictionary[tuple[Any, ...], SimulatedMesh] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def simulate(
    shape: int | Sequence[int], *, axis_names: Sequence[str] | None = None, device: str = "cpu", first_rank: int = 0
) -> SimulatedMesh:
    """Make a mesh whose ranks are simulated in this process. Equal calls return the same mesh while it is in use.

    Args:
        shape: The number of ranks along each axis.
        axis_names: A name for each axis; their numbers ("0", "1", ...) by default.
        device: The device type of the ranks' tensors; "meta" for tensors without values.
        first_rank: The number of the first rank. Ranks of the same number are the same rank in all meshes, which
            matters when tensors move between meshes.

    Returns:
        The mesh. Use it wherever you would use a DeviceMesh.

    Raises:
        MeshError: An argument does not describe a mesh.

    Example:
        >>> simulate((2, 4), axis_names=("dp", "tp"))
        SimulatedMesh(dp=2, tp=4, device='cpu')
    """
    sizes = (shape,) if isinstance(shape, int) else shape
    if (
        not isinstance(sizes, Sequence)
        or isinstance(sizes, str)
        or not sizes
        or not all(_is_index(k, 1) for k in sizes)
    ):
        raise MeshError(f"simulate: shape must be one or more ints > 0, got {shape!r}")
    names = tuple(map(str, range(len(sizes)))) if axis_names is None else axis_names
    return _submesh(sizes, names, tuple(range(len(sizes))), device, first_rank)


_MOST_RANKS = 2**18  # each of them is an object here; a file of some bytes may name any number


def _is_index(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_mesh(
    world: Sequence[int], names: Sequence[str], axes: Sequence[int], device: object, first_rank: int, caller: str
) -> str:
    """The kind of device of a mesh that `simulate` or a pickle describes; MeshError if it describes none."""
    if not world or not all(_is_index(k, 1) for k in world):
        raise MeshError(f"{caller}: shape must be one or more ints > 0, got {tuple(world)}")
    if math.prod(world) > _MOST_RANKS and caller == "simulate":
        raise MeshError(
            f"{caller}: shape {tuple(world)} has {math.prod(world)} ranks, and at most {_MOST_RANKS} can be simulated"
        )
    if (
        isinstance(names, str)
        or not isinstance(names, Sequence)
        or not all(isinstance(name, str) for name in names)
        or not len(names) == len(set(names)) == len(world)
    ):
        raise MeshError(
            f"{caller}: axis_names {names!r} must name each of the {len(world)} axes of {tuple(world)} once; "
            f"use strings"
        )
    if not axes or not all(_is_index(a) and a < len(world) for a in axes) or len(set(axes)) != len(axes):
        raise MeshError(f"{caller}: axes {axes!r} must be some of the {len(world)} axes of {tuple(world)}, each once")
    if not _is_index(first_rank):
        raise MeshError(f"{caller}: first_rank must be an int >= 0, got {first_rank!r}")
    try:
        return torch.device(device).type  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise MeshError(f"{caller}: device must be a kind of device, as 'cpu' or 'cuda', got {device!r}") from error


def _submesh(
    world: Sequence[int], names: Sequence[str], axes: Sequence[int], device: str, first_rank: int = 0
) -> SimulatedMesh:
    for name, value in (("shape", world), ("axes", axes)):
        if not isinstance(value, Sequence):
            raise MeshError(f"simulate: {name} must be a sequence of ints, got {value!r}")
    device = check_mesh(world, names, axes, device, first_rank, "simulate")
    world, names, axes = tuple(world), tuple(names), tuple(axes)
    key = (world, names, device, first_rank)
    with _lock:
        found = _worlds.get(key)
        if found is None:
            found = _worlds[key] = SimulatedMesh(world, names, tuple(range(len(world))), device, first_rank)
    return found if axes == found.axes else found[tuple(names[a] for a in axes)]


torch.serialization.add_safe_globals([(_submesh, "shardwise.mesh._submesh")])  # its name in older files
