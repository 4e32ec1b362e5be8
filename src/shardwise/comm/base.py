"""The interface of a backend: run a local function, run collectives, look at local values.

A *local value* is what the ranks of this process hold of one tensor: a plain tensor on a process group, a
`RankTensor` in simulation. Only backends know which of the two it is; the layers above pass it along.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shardwise.protocols import LocalValue, Structure

Coords = tuple[int, ...]


class Comm(ABC):
    """A backend, bound to the axes of one mesh."""

    simulated: bool
    outside = False  # whether no rank of the mesh is in this process
    outlined = False  # whether it stands for one rank of a mesh without values
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def making(self) -> AbstractContextManager[Any]:
        """The context in which new tensors of this rank are made: on a mesh without values they have no values
        either."""
        return nullcontext()

    @abstractmethod
    def per_rank(self, of: Callable[[Coords], Any]) -> Any:
        """`of(coords)` for the ranks of this process, in the form `bind` passes on as a plain value."""

    @abstractmethod
    def bind(self, func: Callable[..., Any], axes: Sequence[int] = ()) -> Callable[..., Any]:
        """`func` as a function of local values. On `axes` each coordinate gets a value of its own."""

    def bind_program(self, func: Callable[..., Any], axes: Sequence[int] = ()) -> Callable[..., Any]:
        """`bind` for a function of the program, which may write into tensors that it was not given."""
        return self.bind(func, axes)

    @abstractmethod
    def each(
        self, func: Callable[[torch.Tensor, Coords], torch.Tensor], local: LocalValue, axes: Sequence[int]
    ) -> LocalValue:
        """`func(value, coords)` for the ranks of this process; every coordinate of `axes` gets a value of its own."""

    @abstractmethod
    def all_reduce(self, local: LocalValue, axes: Sequence[int], reduce_op: str) -> LocalValue:
        """The reduction of the parts of all ranks along the axes."""

    def start_all_reduce(
        self, local: LocalValue, axes: Sequence[int], reduce_op: str, owned: bool
    ) -> tuple[LocalValue, Callable[[], object]] | None:
        """Begin an all-reduce. Returns the value that it fills (`local` itself, if that is `owned` and can be
        overwritten) and the function that waits for it; None where it cannot be begun without waiting."""
        return None

    @abstractmethod
    def stack(self, local: LocalValue, axes: Sequence[int]) -> LocalValue:
        """The values of all ranks along the axes, which have the same shape, stacked on a new first dim."""

    @abstractmethod
    def values(self, local: LocalValue) -> tuple[torch.Tensor, ...]:
        """The distinct plain tensors inside a local value."""

    @abstractmethod
    def structure(self, local: LocalValue) -> Structure:
        """Which rank holds which of `values(local)`: what `assemble` needs, without the tensors."""

    @abstractmethod
    def assemble(self, structure: Structure, values: Sequence[torch.Tensor | None]) -> LocalValue:
        """The local value of that structure with these tensors."""

    @abstractmethod
    def pick(self, structure: Structure, local: LocalValue) -> tuple[torch.Tensor, ...]:
        """For each distinct tensor of that structure, what its first holder has in `local`."""

    def pick_gradients(self, structure: Structure, local: LocalValue) -> tuple[torch.Tensor, ...]:
        """`pick` for gradients that go back to autograd: no two share memory, since a leaf may add to its gradient in
        place."""
        return self.pick(structure, local)

    def to_program(self, value: torch.Tensor) -> torch.Tensor:
        """Give a whole value to the program. Refused where this rank is outside of the mesh."""
        return value

    def rebuild(self, local: LocalValue, values: Sequence[torch.Tensor | None]) -> LocalValue:
        """A local value like `local` with other tensors, in the order of `values(local)`."""
        return self.assemble(self.structure(local), values)

    @abstractmethod
    def coords_here(self) -> Sequence[Coords]:
        """The coordinates of the ranks of this process."""

    @abstractmethod
    def first(self, local: LocalValue) -> torch.Tensor:
        """The plain tensor of the first rank of this process."""

    def whole(self, local: LocalValue) -> Structure:
        """The structure in which the program gets a Replicate value: one tensor, or one per group of a simulated
        sub-mesh."""
        return self.structure(local)

    def is_shared(self, value: torch.Tensor) -> bool:
        """Whether the ranks of each group hold one tensor, of the same shape in all groups."""
        return False

    def agreed(self, local: LocalValue, what: str) -> torch.Tensor:
        """The plain tensor of the first rank of this process, for a value that decides something for the whole mesh,
        such as the sizes that ranks found. LayoutError, which names `what` the value is, where the groups of a
        simulated sub-mesh hold different ones."""
        return self.first(local)

    def same(self, one: LocalValue, other: LocalValue) -> bool:
        """Whether two local values are the same tensors."""
        return one is other

    @abstractmethod
    def shared(self, value: torch.Tensor) -> LocalValue:
        """The local value in which every rank holds `value`."""

    @abstractmethod
    def at(self, local: LocalValue, coords: Coords) -> torch.Tensor:
        """The plain tensor of the rank of this process at `coords`."""

    @abstractmethod
    def adopt(self, local: torch.Tensor, axes: Sequence[int]) -> LocalValue:
        """A tensor the user holds, as a local value whose ranks share no tensor along `axes`."""

    @abstractmethod
    def all_kinds(self, local: LocalValue) -> dict[Coords, tuple[str, tuple[int, ...]]]:
        """The dtype and local shape of every rank of the mesh (one small exchange)."""

    @abstractmethod
    def first_of_replicas(self, local: LocalValue, axes: Sequence[int]) -> LocalValue:
        """The value of the first coordinate on each of `axes`, for everyone along it."""
