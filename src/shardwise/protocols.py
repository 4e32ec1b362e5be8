"""Types of what crosses a layer, below all layers.

A step of a move is typed in `comm/base.py` (`Step`), what a rule answers in `strategy/spec.py` (`Spec`).
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

LocalValue: TypeAlias = torch.Tensor
"""What the ranks of this process hold of one tensor: a plain tensor on a process group, a `RankTensor` in simulation.

Only backends know which of the two; everything above passes it along."""

Structure: TypeAlias = Any
"""Which rank holds which of the tensors of a local value: what `Comm.structure` tells."""

Ctx: TypeAlias = Any
"""The `ctx` of a torch.autograd.Function: it has whatever was put there."""


Op: TypeAlias = Any
"""An overload of torch.ops, or a function of torch."""

Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of a call."""

Kwargs: TypeAlias = dict[str, Any]
"""Its named arguments."""

Result: TypeAlias = Any
"""Whatever a call gives: tensors, nested in anything, numbers."""


Item: TypeAlias = Any
"""Whatever a program passes around: a tensor, a number, a container of them, an object of its own."""


class VmapInfo(Protocol):
    """What torch tells a Function that a vmap maps over."""

    batch_size: int


Tensors: TypeAlias = tuple[torch.Tensor, ...]


class Holder(Protocol):
    """Whoever holds what a move moves: a backend, or the ranks of a group with a list of tiles each."""

    simulated: bool  # whether all ranks are in this process
    outside: bool  # whether no rank is in this process

    def values(self, local: Any, /) -> Tensors: ...  # the distinct plain tensors of a local value
    def structure(self, local: Any, /) -> Structure: ...
    def assemble(self, structure: Structure, values: Any, /) -> Any: ...  # a local value of plain tensors
    def pick_gradients(self, structure: Structure, local: Any, /) -> Tensors: ...


Coords: TypeAlias = tuple[int, ...]
"""Where a rank stands on a mesh: one index per axis."""


@runtime_checkable
class MeshLike(Protocol):
    """What a layout knows of a mesh."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # the number of ranks along each axis
    @property
    def axis_names(self) -> tuple[str, ...]: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...  # the global ranks, in the order of their coordinates
    @property
    def device(self) -> torch.device: ...  # where local tensors live
    @property
    def comm(self) -> Any: ...  # the backend: a `comm.base.Comm`, which stands above this file
    def coords(self, rank: int) -> Coords: ...  # of a global rank
