"""The backend of a mesh that this rank is not in: of tensors on it, this rank knows the layout and holds no values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise.comm.base import Coords
from shardwise.comm.process_group import PlainComm
from shardwise.errors import MeshError
from shardwise.layout import Layout


def held_of(layout: Layout, values: Sequence[object] = ()) -> torch.Tensor:
    """What a rank outside of the mesh holds of a tensor that is computed from `values`: an empty tensor with their
    graph."""
    made = torch.zeros(() if not layout.shape else 0, dtype=layout.dtype, device=layout.device)
    if not torch.is_grad_enabled() or not (layout.dtype.is_floating_point or layout.dtype.is_complex):
        return made
    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            made = made + value.sum().to(layout.dtype)
    return made


class OutsideComm(PlainComm):
    """Local values are empty tensors that carry the autograd graph, so that this rank takes part in moves to and from
    the mesh, and in their gradients. Calls on them do nothing (`engine/nothing_here.py`); a request for a value is
    refused."""

    outside = True

    def __init__(self, device_mesh: Any) -> None:
        self.shape = tuple(device_mesh.shape)
        self.axis_names = tuple(device_mesh.mesh_dim_names or map(str, range(len(self.shape))))
        self.ranks = device_mesh.mesh.flatten().tolist()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise MeshError(
            f"rank {dist.get_rank()} is outside of the mesh of ranks {self.ranks} and holds nothing of this tensor: "
            f"ask for its values on those ranks only, or redistribute it to a mesh that this rank is in"
        )

    def to_program(self, value: torch.Tensor) -> torch.Tensor:
        self._refuse()

    def coords_here(self) -> Sequence[Coords]:
        return ()

    def per_rank(self, of: Callable[[Coords], Any]) -> Any:
        return None

    def bind(self, func: Callable[..., Any], axes: Sequence[int] = ()) -> Callable[..., Any]:
        return self._refuse

    def each(self, func: Callable[..., Any], local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        self._refuse()

    def all_reduce(self, local: torch.Tensor, axes: Sequence[int], reduce_op: str) -> torch.Tensor:
        self._refuse()

    def stack(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        self._refuse()

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        nothing = value.reshape(-1)[:0]
        return nothing if value.dim() else nothing.sum().to(value.dtype)

    def at(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        self._refuse()

    def all_kinds(self, local: torch.Tensor) -> dict[Coords, tuple[str, tuple[int, ...]]]:
        self._refuse()

    def first_of_replicas(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return local
