"""The steps of a move. Each runs on what the ranks hold, knows what it costs, and knows the step of its gradient.

This file has the steps that exchange no tiles: reductions, and steps that only change what values stand for.

| step                  | partner             |
|-----------------------|---------------------|
| AllReduce             | Spread              |
| ToPartial             | TakeFirst           |
| Mean                  | itself              |
| GatherParts           | TakePart            |
| Pad                   | Unpad               |
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardwise.comm.base import Comm, Coords
from shardwise.errors import MoveError
from shardwise.layout import Layout
from shardwise.layout.region import Region, within
from shardwise.move.pack import pick, place
from shardwise.protocols import Holder, LocalValue

Begun = tuple[Any, Callable[[], Any]]  # the local value that will be filled, and the function that waits for it


class Step(ABC):
    """One step of a move."""

    kind = "local"  # the collective it is: what the ledger shows
    where: str  # along which axes, as the ledger shows it
    reuses_memory = False  # whether its result is its argument, or shares memory with it
    is_plain = True  # whether the gradient is the partner step alone

    @abstractmethod
    def run(self, comm: object, local: object) -> Any:
        """The local value after this step, outside of autograd."""

    def start(self, comm: object, local: LocalValue, owned: bool) -> Begun | None:
        """Begin the step without waiting for it; None where that cannot be done. `owned` values may be overwritten."""
        return None

    @property
    def partner(self) -> Step:
        """The step that the gradient takes."""
        raise MoveError(f"{self} has no gradient")

    def comm_after(self, comm: Holder) -> Holder:
        """The backend that holds the result."""
        return comm

    @abstractmethod
    def bytes_received(self, comm: object) -> int:
        """Bytes that the ranks of this process receive."""

    def bytes_here(self) -> int:
        """The same, for a caller that has no backend at hand: the step knows its own."""
        return self.bytes_received(None)

    digest: int = 0  # equal on all ranks; steps that move something else have, very likely, another one

    def describe(self) -> str:
        """What moves."""
        return ""


@dataclass(frozen=True, eq=False)
class MeshStep(Step):
    """A step on one mesh: the axes along which ranks talk, and a layout that sizes are read from."""

    layout: Layout
    axes: tuple[int, ...]

    reduce_op = "sum"

    def run(self, comm: Comm, local: LocalValue) -> LocalValue:
        return comm.each(self.apply, local, self.axes)

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        """What one rank does in a step that needs nothing from other ranks."""
        raise NotImplementedError

    # -- what it costs --------------------------------------------------------------------------------------
    @property
    def crossed(self) -> tuple[int, ...]:
        """The axes along which anything travels."""
        return self.axes

    def bytes_in(self, coords: Coords) -> int:
        """Bytes that the rank at `coords` receives."""
        return 0

    def bytes_out(self, coords: Coords) -> int:
        return self.bytes_in(coords)

    def bytes_received(self, comm: Comm) -> int:
        return sum(map(self.bytes_in, comm.coords_here()))

    def bytes_here(self) -> int:
        return self.bytes_received(self.layout.mesh.comm)

    def buffer_bytes(self, coords: Coords) -> int:
        """The most bytes of packed parts, out and in, that are alive at once."""
        return 0

    def result_bytes(self, coords: Coords) -> int:
        """Bytes of the new local tensor that it makes."""
        if self.reuses_memory:
            return 0
        return math.prod(self.result.local_shape_at(coords)) * self.result.dtype.itemsize

    @property
    def result(self) -> Layout:
        """The layout whose local tensors it makes."""
        return self.layout

    @property
    def ranks(self) -> int:
        """How many ranks take part in one collective."""
        return math.prod(self.layout.mesh.shape[a] for a in self.axes)

    def bytes_at(self, coords: Coords) -> int:
        """Bytes of the local tensor of `layout`."""
        return math.prod(self.layout.local_shape_at(coords)) * self.layout.dtype.itemsize

    def others(self, coords: Coords) -> list[Coords]:
        """The coordinates of everyone along the axes."""
        shape = self.layout.mesh.shape
        ranges = [range(shape[a]) if a in self.axes else (c,) for a, c in enumerate(coords)]
        return list(itertools.product(*ranges))

    def is_first(self, coords: Coords) -> bool:
        return all(coords[a] == 0 for a in self.axes)

    @property
    def digest(self) -> int:  # type: ignore[override]
        return hash((self.layout.digest, self.axes))

    def describe(self) -> str:
        return repr(self.layout)

    @property
    def where(self) -> str:  # type: ignore[override]
        return "+".join(self.layout.mesh.axis_names[a] for a in self.axes)

    def __str__(self) -> str:
        return f"{self.kind if self.kind != 'local' else type(self).__name__.lower()} on {self.where}"


Steps = tuple[MeshStep, ...]


@dataclass(frozen=True, eq=False)
class AllReduce(MeshStep):
    """Partial -> Replicate."""

    reduce_op: str = "sum"
    kind = "all_reduce"

    @cached_property
    def is_plain(self) -> bool:  # type: ignore[override]
        return self.reduce_op == "sum"

    def run(self, comm: Comm, local: LocalValue) -> LocalValue:
        return comm.all_reduce(local, self.axes, self.reduce_op)

    def start(self, comm: Comm, local: LocalValue, owned: bool) -> Begun | None:
        return comm.start_all_reduce(local, self.axes, self.reduce_op, owned)

    def bytes_in(self, coords: Coords) -> int:
        return 2 * (self.ranks - 1) * self.bytes_at(coords) // self.ranks

    @cached_property
    def partner(self) -> MeshStep:
        if self.reduce_op != "sum":
            raise MoveError(f"{self} has no gradient")
        return Spread(self.layout, self.axes)


class Spread(MeshStep):
    """A Replicate value enters a call that is split on these axes: nothing moves, the gradients add up."""

    reuses_memory = True

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.view_as(local)

    @cached_property
    def partner(self) -> MeshStep:
        return AllReduce(self.layout, self.axes)


@dataclass(frozen=True, eq=False)
class ToPartial(MeshStep):
    """Replicate -> Partial: the first coordinate keeps the value, the others hold the neutral element.

    Where equal parts reduce to themselves (avg, max, min, and, or), every coordinate keeps the value. A `fresh` value
    was made by the step before and is used by nothing else."""

    reduce_op: str = "sum"
    fresh: bool = False

    def run(self, comm: Comm, local: LocalValue) -> LocalValue:
        in_place = self.fresh and not comm.simulated  # where no two ranks share a value
        return comm.each(self.apply_in_place if in_place else self.apply, local, self.axes)

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        if self._keeps(coords):
            return local.clone(memory_format=torch.contiguous_format)
        return torch.full_like(local, self._neutral, memory_format=torch.contiguous_format)

    @property
    def reuses_memory(self) -> bool:
        return self.fresh

    def apply_in_place(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        """The same in the memory of `local`."""
        return local if self._keeps(coords) else local.fill_(self._neutral)

    def _keeps(self, coords: Coords) -> bool:
        return self.is_first(coords) or self.reduce_op not in ("sum", "product", "bxor")

    @property
    def _neutral(self) -> int:
        return 1 if self.reduce_op == "product" else 0

    @cached_property
    def partner(self) -> MeshStep:
        if self.reduce_op == "sum":
            return TakeFirst(self.layout, self.axes)
        if self.reduce_op == "product":
            return OnFirst(self.layout, self.axes)
        return AllReduce(self.layout, self.axes)  # each part has a part of the gradient


class TakeFirst(MeshStep):
    """The gradient of Replicate -> Partial(sum): all parts of a sum have the gradient of the sum, so nothing moves."""

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.view_as(local)

    @cached_property
    def partner(self) -> MeshStep:
        return ToPartial(self.layout, self.axes)


class OnFirst(ToPartial):
    """The gradient of Replicate -> Partial(product), before it is added up. Only the first coordinate has one: the
    others hold constants."""

    @property
    def partner(self) -> MeshStep:
        return self


class Mean(MeshStep):
    """Partial(avg) -> Partial(sum): divide by the number of coordinates."""

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.contiguous() / self.ranks

    @property
    def partner(self) -> MeshStep:
        return self


class GatherParts(MeshStep):
    """Every coordinate's part, stacked on a new first dim: for reductions that have no partner of their own."""

    kind = "all_gather"

    def run(self, comm: Comm, local: LocalValue) -> LocalValue:
        return comm.stack(local, self.axes)

    def bytes_in(self, coords: Coords) -> int:
        return (self.ranks - 1) * self.bytes_at(coords)

    @cached_property
    def partner(self) -> MeshStep:
        return TakePart(self.layout, self.axes)


class TakePart(MeshStep):
    """The inverse of GatherParts."""

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local[self.others(coords).index(coords)].clone()

    @cached_property
    def partner(self) -> MeshStep:
        return GatherParts(self.layout, self.axes)


# -- Shard -> Partial(sum) without communication: every tile, with zeros around it, is a part of the sum -----
@dataclass(frozen=True, eq=False)
class Pad(MeshStep):
    """`tile` is cut where `layout` is a pending sum."""

    tile: Layout

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        out = local.new_zeros(self.layout.local_shape_at(coords))
        place(out, _within(self.layout, self.tile, coords), local)
        return out

    @cached_property
    def partner(self) -> MeshStep:
        return Unpad(self.tile, self.axes, self.layout)


class Padded(Pad):
    """A Pad after an exchange that made its result among the zeros already: nothing is left to do."""

    reuses_memory = True

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local


@dataclass(frozen=True, eq=False)
class Unpad(MeshStep):
    """The gradient of Pad: all parts of a sum have the gradient of the sum, so a rank takes the gradient at its
    tile."""

    padded: Layout

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return pick(local, _within(self.padded, self.layout, coords)).clone(memory_format=torch.contiguous_format)

    @cached_property
    def partner(self) -> MeshStep:
        return Pad(self.padded, self.axes, self.layout)


def _within(padded: Layout, tile: Layout, coords: Coords) -> Region:
    return within(padded.region(coords), tile.region(coords))
