"""Types of arguments that public functions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh

MeshArgument: TypeAlias = DeviceMesh | SimulatedMesh | Mesh
"""A mesh as a program gives it."""


class PlacementLike(Protocol):
    """A placement of ours, or one of torch.distributed.tensor's."""

    def is_shard(self, dim: int | None = None) -> bool: ...
    def is_replicate(self) -> bool: ...
    def is_partial(self, reduce_op: str | None = None) -> bool: ...


Placements: TypeAlias = Sequence[PlacementLike]
"""One placement per axis of a mesh."""
