"""torch.distributed as a script sees it whose rank is played: process groups and meshes of any number of ranks.

Inside of `PlayedWorld.active()`, `init_process_group`, `init_device_mesh`, `DeviceMesh` and their kin are ours,
wherever the script imports them from, and the environment is that of `torchrun`.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as torch_meshes
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.outline import OutlineComm
from shardwise.comm.record import user_line
from shardwise.errors import MeshError, OutlineError
from shardwise.forecast.groups import Collectives, Group
from shardwise.mesh import OutlinedMesh
from shardwise.torch_private.tensors import FakeTensor

_ROOT = __name__.partition(".")[0]
_REFUSED = ("batch_isend_irecv", "gather", "scatter", "scatter_object_list", "monitored_barrier", "reduce_scatter_v")


Ranks: TypeAlias = torch.Tensor | Sequence[Any]
"""Numbers of ranks, nested as the axes of a mesh are."""


class PlayedWorld:
    """The ranks of an outlined mesh, for a script that makes its process groups and meshes itself.

    Args:
        mesh: Says how many ranks there are, which one is played and on which device.
        say: Is told where the script asked for something else than it gets.
        local: How many ranks there are on a machine.
    """

    def __init__(self, mesh: OutlinedMesh, say: Callable[[str], None], local: int = 8) -> None:
        self.mesh, self.say, self.size = mesh, say, math.prod(mesh.world)
        self.local = math.gcd(local, self.size) if self.size >= local else self.size
        self.meshes: dict[tuple[Any, ...], OutlinedMesh] = {}
        rank = mesh.get_rank()
        comm = OutlineComm((self.size,), ("world",), (rank,), rank, (1,), mesh.mode)
        self.group = Group(comm, range(self.size))
        self._told: set[str] = set()

    # -- meshes -----------------------------------------------------------------------------------------------------
    def mesh_of(self, shape: Sequence[int], names: Sequence[str] | None, device: str) -> OutlinedMesh:
        """The mesh that a script gets which asks for one of this shape. Equal questions get the same mesh.

        Raises:
            MeshError: There is no such mesh of the ranks that are played.
        """
        asked = tuple(int(k) for k in shape)
        given = self._shape(asked)
        if names is None:
            names = self.mesh.world_names if len(given) == len(self.mesh.world) else tuple(map(str, range(len(given))))
        if len(names) != len(given):
            raise MeshError(f"init_device_mesh: {tuple(names)} must name each of the {len(given)} axes of {asked}")
        if torch.device(device).type != torch.device(self.mesh.device_type).type:
            self._tell(f"asks for devices {device!r}; {self.mesh.device_type!r} are played (--device)")
        key = (given, tuple(names))
        if key not in self.meshes:
            coords, rank = [], self.mesh.get_rank()
            for size in reversed(given):
                rank, c = divmod(rank, size)
                coords.append(c)
            axes = tuple(range(len(given)))
            self.meshes[key] = OutlinedMesh(
                given, tuple(names), axes, self.mesh.device_type, tuple(reversed(coords)), self.mesh.mode
            )
        return self.meshes[key]

    def _shape(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """What is played for a shape that a script asks for."""
        ours = self.mesh.world
        if math.prod(asked) == self.size:
            if asked != ours and len(asked) == len(ours):
                self._tell(f"asks for a mesh of {_times(asked)} ranks: played so, and not as {_times(ours)} (--mesh)")
            return asked
        if len(asked) == len(ours):
            self._tell(
                f"asks for a mesh of {_times(asked)} ranks; {_times(ours)} are played (--mesh). What the script "
                f"works out from its own sizes stays as it is"
            )
            return ours
        raise MeshError(
            f"{user_line()} asks for a mesh of {_times(asked)} = {math.prod(asked)} ranks, and --mesh {_times(ours)} "
            f"has {self.size}; give --mesh {len(asked)} sizes"
        )

    def _tell(self, what: str) -> None:
        said = f"{user_line()} {what}"
        if said not in self._told:
            self._told.add(said)
            self.say(said)

    def init_device_mesh(
        self,
        device_type: str,
        mesh_shape: Sequence[int],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: object = None,
    ) -> OutlinedMesh:
        """In place of torch's."""
        return self.mesh_of(mesh_shape, mesh_dim_names, device_type)

    def device_mesh(
        self,
        device_type: str,
        mesh: Ranks | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        **more: object,
    ) -> OutlinedMesh:
        """In place of DeviceMesh(device_type, ranks): all ranks in their order."""
        if mesh is None:
            raise MeshError("DeviceMesh: give the ranks of the mesh, or use init_device_mesh")
        if isinstance(mesh, FakeTensor):
            self._tell("makes a DeviceMesh of a tensor of ranks, which has no values: taken to be in order")
            return self.mesh_of(tuple(mesh.shape), mesh_dim_names, device_type)
        ranks = mesh if isinstance(mesh, torch.Tensor) else torch.utils._pytree.tree_leaves(mesh)
        shape = tuple(mesh.shape) if isinstance(mesh, torch.Tensor) else _shape_of(mesh)
        numbers = ranks.flatten().tolist() if isinstance(ranks, torch.Tensor) else ranks
        if numbers != list(range(len(numbers))):
            raise MeshError(
                f"{user_line()} makes a DeviceMesh of some ranks, or in another order, which cannot be played; "
                f"use init_device_mesh and its sub-meshes"
            )
        return self.mesh_of(shape, mesh_dim_names, device_type)

    # -- groups -----------------------------------------------------------------------------------------------------
    def group_of_mesh(self, mesh: OutlinedMesh, axis: int | str | None = None) -> Group:
        """What mesh.get_group(axis) gives."""
        if axis is not None:
            mesh = mesh[mesh.axis_names[axis] if isinstance(axis, int) else axis]  # type: ignore[assignment]
        return Group(mesh.comm, mesh.ranks)  # type: ignore[arg-type]

    def _group(self, said: object) -> Group:
        if said is None:
            return self.group
        if not isinstance(said, Group):
            raise OutlineError(f"{user_line()}: group={said!r} is none of the ranks that are played")
        return said

    def new_group(self, ranks: Sequence[int] | None = None, *args: object, **more: object) -> object:
        """A group of some ranks."""
        if ranks is None:
            return self.group
        me = self.mesh.get_rank()
        if me not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        gaps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)} or {1}
        where, name = (list(ranks).index(me),), f"ranks {ranks[0]} to {ranks[-1]}"
        comm = OutlineComm((len(ranks),), (name,), where, me, (max(map(abs, gaps)),), self.mesh.mode)
        return Group(comm, list(ranks))

    # -- names ------------------------------------------------------------------------------------------------------
    def functions(self) -> dict[str, Callable[..., Any]]:
        """torch.distributed's functions, by name."""
        calls = Collectives(self._group)
        found = {name: getattr(calls, name) for name in dir(Collectives) if not name.startswith("_")}
        found |= {name: _refusing(f"torch.distributed.{name}") for name in _REFUSED}
        return found | {
            "init_process_group": self._start,
            "destroy_process_group": lambda group=None: None,
            "is_initialized": lambda: True,
            "is_nccl_available": lambda: True,
            "is_torchelastic_launched": lambda: True,
            "get_rank": lambda group=None: self.mesh.get_rank() if group is None else self._group(group).rank(),
            "get_node_local_rank": lambda fallback_rank=None: self.mesh.get_rank() % self.local,
            "get_world_size": lambda group=None: self._group(group).size(),
            "get_backend": lambda group=None: "nccl" if "cuda" in self.mesh.device_type else "gloo",
            "get_process_group_ranks": lambda group=None: list(self._group(group).ranks),
            "get_global_rank": lambda group, group_rank: self._group(group).ranks[group_rank],
            "get_group_rank": lambda group, global_rank: list(self._group(group).ranks).index(global_rank),
            "new_group": self.new_group,
            "_get_default_group": lambda: self.group,
        }

    def _start(
        self,
        backend: object = None,
        init_method: object = None,
        timeout: object = None,
        world_size: int = -1,
        **more: object,
    ) -> None:
        if world_size not in (-1, self.size):
            self._tell(f"asks for {world_size} processes; {self.size} are played (--mesh)")

    def environment(self) -> dict[str, str]:
        """The variables that torchrun sets."""
        rank, local = self.mesh.get_rank(), self.mesh.get_rank() % self.local
        said = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self.local}
        said |= {"GROUP_RANK": rank // self.local, "MASTER_PORT": 29500}
        return {name: str(value) for name, value in said.items()} | {"MASTER_ADDR": "localhost"}

    @contextmanager
    def active(self) -> Iterator[PlayedWorld]:
        """Inside, torch.distributed is ours."""
        meshes = _mesh_class(self)
        c10d = importlib.import_module("torch.distributed.distributed_c10d")
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, self.environment()))
            for name, function in self.functions().items():
                for module in (dist, c10d):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, function))
            importlib.import_module(f"{_ROOT}.parallel")  # modules imported inside would keep what is put in place here
            for path in ("torch.distributed", "torch.distributed.device_mesh", _ROOT, f"{_ROOT}.device_mesh"):
                module = importlib.import_module(path)
                if hasattr(module, "DeviceMesh") and hasattr(module, "init_device_mesh"):
                    stack.enter_context(mock.patch.object(module, "DeviceMesh", meshes))
            for module in _holders(torch_meshes.init_device_mesh):
                stack.enter_context(mock.patch.object(module, "init_device_mesh", self.init_device_mesh))
            stack.enter_context(mock.patch.object(self.mesh.mode, "group_of", self.group_of_mesh))
            ddp = _refusing("DistributedDataParallel", "; use fully_shard, or shardwise.parallel.data_parallel")
            stack.enter_context(mock.patch.object(DistributedDataParallel, "__init__", ddp))
            yield self


def _holders(function: object) -> list[Any]:
    """The modules of torch.distributed and ours that have torch's init_device_mesh."""
    return [
        module
        for path, module in list(sys.modules.items())
        if path.startswith(("torch.distributed", _ROOT)) and vars(module).get("init_device_mesh") is function
    ]


def _mesh_class(world: PlayedWorld) -> type:
    """Stands for the class DeviceMesh: called, it gives an outlined mesh, and those are its instances."""

    class Played(type):
        def __call__(cls, device_type: str, mesh: Ranks | None = None, **more: object) -> OutlinedMesh:  # type: ignore[override]
            return world.device_mesh(device_type, mesh, **more)  # type: ignore[arg-type]

        def __instancecheck__(cls, x: object) -> bool:
            return isinstance(x, (OutlinedMesh, torch_meshes.DeviceMesh))

    def from_group(*args: object, **kwargs: object) -> NoReturn:
        raise MeshError("DeviceMesh.from_group cannot be played; use init_device_mesh and its sub-meshes")

    return Played("DeviceMesh", (), {"from_group": staticmethod(from_group)})


def _refusing(name: str, instead: str = "") -> Callable[..., NoReturn]:
    def refused(*args: object, **kwargs: object) -> NoReturn:
        raise OutlineError(f"{user_line()}: {name} cannot be played without values{instead}")

    return refused


def _shape_of(ranks: object) -> tuple[int, ...]:
    return (len(ranks), *_shape_of(ranks[0])) if isinstance(ranks, (list, tuple, range)) else ()


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
