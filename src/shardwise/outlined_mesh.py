"""`outline`: a mesh without values, of any number of ranks, of which one rank is played."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.comm.outline import OutlineComm
from shardwise.comm.without_values import Absent, Assumptions, Elsewhere, device_for
from shardwise.errors import MeshError
from shardwise.protocols import Result
from shardwise.simulated_mesh import SimulatedMesh, check_mesh
from shardwise.torch_private.tensors import optimizers_use_list_ops_on


class OutlinedMesh(SimulatedMesh):
    """A mesh of which one rank is played, on tensors without values. Make one with `outline`.

    Inside of ``with mesh:`` every tensor that is made has no values, plain ones too, so that a model of any size can be
    built there.

    Attributes:
        world, world_names: Size and name of every axis; `axes` are those of this (sub-)mesh.
        played: The coordinates, in the world, of the rank that is played.
        mode: In which tensors without values are made.
    """

    def __init__(
        self,
        world: tuple[int, ...],
        names: tuple[str, ...],
        axes: tuple[int, ...],
        device: str,
        played: Coords,
        mode: Absent,
    ) -> None:
        self.world, self.world_names, self.axes, self.first_rank = world, names, axes, 0
        self.device_type, self.device, self.played, self.mode = device, device_for(device), played, mode
        self.shape, self.axis_names = tuple(world[a] for a in axes), tuple(names[a] for a in axes)
        coords = tuple(played[a] for a in axes)
        strides = tuple(math.prod(world[a + 1 :]) for a in axes)
        self.comm = OutlineComm(self.shape, self.axis_names, coords, self.get_rank(), strides, mode)  # type: ignore[assignment]
        self._family, self._merged = {axes: self}, {}
        self._inside: list[ExitStack] = []

    @property
    def ranks(self) -> Sequence[int]:  # type: ignore[override]
        """The numbers of the ranks; of a sub-mesh, those of the line that the played rank is in."""
        if self.axes == tuple(range(len(self.world))):
            return tuple(range(math.prod(self.world)))
        steps = [math.prod(self.world[a + 1 :]) for a in range(len(self.world))]
        found = [
            sum(c * step for a, (c, step) in enumerate(zip(self.played, steps, strict=True)) if a not in self.axes)
        ]
        for axis in self.axes:
            found = [first + i * steps[axis] for first in found for i in range(self.world[axis])]
        return tuple(found)

    def with_axes(self, axes: tuple[int, ...]) -> OutlinedMesh:
        return OutlinedMesh(self.world, self.world_names, axes, self.device_type, self.played, self.mode)

    def with_merged(self, world: tuple[int, ...], names: tuple[str, ...], axis: int) -> OutlinedMesh:
        coords = 0
        for a in self.axes:
            coords = coords * self.world[a] + self.played[a]
        played = (*self.played[: self.axes[0]], coords, *self.played[self.axes[-1] + 1 :])
        return OutlinedMesh(world, names, (axis,), self.device_type, played, self.mode)

    def playing(self, rank: int | Sequence[int]) -> OutlinedMesh:
        """The same mesh with another rank played."""
        return OutlinedMesh(
            self.world,
            self.world_names,
            self.axes,
            self.device_type,
            _coords(self.world, rank),
            Absent(self.mode.assume),
        )

    def get_coordinate(self) -> list[int]:
        """The coordinates of the rank that is played."""
        return [self.played[a] for a in self.axes]

    def get_rank(self) -> int:
        rank = 0
        for size, c in zip(self.world, self.played, strict=True):
            rank = rank * size + c
        return rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        if mesh_dim is None:
            if len(self.axes) != 1:
                raise MeshError(f"get_local_rank: {self!r} has {len(self.axes)} axes; say which (mesh_dim)")
            mesh_dim = 0
        return self.get_coordinate()[self.axis_names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim]

    def get_group(self, mesh_dim: int | str | None = None) -> Result:  # type: ignore[override]
        """What stands for the process group of an axis where a script's torch.distributed is played, as by the command
        `shardwise estimate`; elsewhere there is none."""
        if self.mode.group_of is None:
            raise MeshError(f"get_group: {self!r} plays one rank and has no process group; use redistribute")
        return self.mode.group_of(self, mesh_dim)

    def __enter__(self) -> OutlinedMesh:
        super().__enter__()
        inside = ExitStack()
        inside.enter_context(self.mode)
        inside.enter_context(self.mode.swappable())
        inside.enter_context(self.mode.read_by_numpy())
        inside.enter_context(self.mode.deep_copied())
        kind = torch.device(self.device_type).type
        if kind != "cpu":  # one device stands for all of its kind: there may be fewer here than the program counts on
            inside.enter_context(optimizers_use_list_ops_on(self.device.type))
            inside.enter_context(Elsewhere(kind, self.device))
        self._inside.append(inside)
        return self

    def __exit__(self, *exc: object) -> None:
        self._inside.pop().close()
        super().__exit__(*exc)

    def __repr__(self) -> str:
        inside = ", ".join(f"{n}={k}" for n, k in zip(self.axis_names, self.shape, strict=True))
        return f"OutlinedMesh({inside}, device={self.device_type!r}, rank {self.get_rank()})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise MeshError(f"{self!r} has no values and cannot be saved; use simulate or a DeviceMesh")


def outline(
    shape: int | Sequence[int],
    *,
    axis_names: Sequence[str] | None = None,
    device: str = "cpu",
    play: int | Sequence[int] | None = None,
    assume: Assumptions | None = None,
) -> OutlinedMesh:
    """Make a mesh without values. It plays the part of one rank of a mesh of any size, without communication and
    without memory for tensors.

    Programs run on it as on a DeviceMesh, and a `debug.ledger()` records what the rank would communicate. Inside of
    ``with mesh:`` plain tensors have no values either, so that a model larger than this machine can be built.

    Args:
        shape: The number of ranks along each axis.
        axis_names: A name for each axis; their numbers ("0", "1", ...) by default.
        device: The kind of device of the ranks. Where this torch was not built for it, tensors report "cpu".
        play: The rank that is played, by its number or its coordinates; by default the first one.
        assume: What to take for values that the program asks for: by what asks ("item", "nonzero", "masked_select",
            "unique", "experts", ...) or by its line ("train.py:12"), a number, a share of the elements, or a function
            of the tensor that is asked.

    Returns:
        The mesh. Use it wherever you would use a DeviceMesh.

    Raises:
        MeshError: An argument does not describe a mesh or one of its ranks.

    Example:
        >>> import shardwise, torch
        >>> mesh = outline((512, 128), axis_names=("dp", "tp"))
        >>> with mesh:
        ...     x = shardwise.zeros(4096, 65536, device_mesh=mesh, placements=[shardwise.Shard(0), shardwise.Shard(1)])
        >>> tuple(x.to_local().shape)
        (8, 512)
    """
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise MeshError(f"outline: shape must be one or more ints > 0, got {shape!r}")
    names = tuple(map(str, range(len(sizes)))) if axis_names is None else axis_names
    axes = tuple(range(len(sizes)))
    if assume is not None and not isinstance(assume, Mapping):
        raise MeshError(f"outline: assume must be a dict, as {{'item': 1.0}}, or None; got {assume!r}")
    check_mesh(sizes, names, axes, device, 0, "outline")
    return OutlinedMesh(
        tuple(sizes), tuple(names), axes, device, _coords(sizes, 0 if play is None else play), Absent(assume)
    )


def _coords(world: Sequence[int], rank: int | Sequence[int]) -> Coords:
    """The coordinates of a rank, by its number or by themselves; MeshError if there is no such rank."""
    if isinstance(rank, int) and not isinstance(rank, bool):
        if not 0 <= rank < math.prod(world):
            raise MeshError(f"outline: play={rank} is no rank of a mesh of {math.prod(world)} ranks {tuple(world)}")
        found = []
        for size in reversed(world):
            rank, c = divmod(rank, size)
            found.append(c)
        return tuple(reversed(found))
    is_one = isinstance(rank, Sequence) and len(rank) == len(world)
    if is_one and all(isinstance(c, int) and 0 <= c < k for c, k in zip(rank, world, strict=True)):  # type: ignore[arg-type]
        return tuple(rank)  # type: ignore[arg-type]
    raise MeshError(f"outline: play={rank!r} must be a rank's number or coordinates on a mesh of shape {tuple(world)}")
