"""The steps of a move that are no exchange of tiles: reductions and changes of name. Each knows its gradient's step.

| step                  | partner             |
|-----------------------|---------------------|
| AllReduce             | Spread              |
| ToPartial             | TakeFirst           |
| Mean                  | itself              |
| GatherParts           | TakePart            |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.errors import MoveError
from shardwise.layout import Layout


@dataclass(frozen=True, eq=False)
class MoveStep:
    """What all steps share: the mesh axes along which ranks talk, and a layout that sizes are read from."""

    layout: Layout
    axes: tuple[int, ...]

    kind = "local"
    routed = False
    reduce_op = "sum"
    uniform = False
    fresh = False

    @property
    def partner(self) -> MoveStep:
        raise MoveError(f"{self} has no gradient")

    def pack(self, local: torch.Tensor, coords: Coords) -> Any:
        return local

    def unpack(self, received: Any, coords: Coords) -> torch.Tensor:
        return received

    def part_shapes(self, packed: Any, coords: Coords) -> Sequence[tuple[int, ...]]:
        raise NotImplementedError

    def bytes_in(self, coords: Coords) -> int:
        return 0

    def bytes_out(self, coords: Coords) -> int:
        return self.bytes_in(coords)

    @property
    def crossed(self) -> tuple[int, ...]:
        """The axes along which anything travels."""
        return self.axes

    # -- sizes ----------------------------------------------------------------------------------------------
    @property
    def ranks(self) -> int:
        """How many talk to each other."""
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

    def __str__(self) -> str:
        names = "+".join(self.layout.mesh.axis_names[a] for a in self.axes)
        return f"{self.kind if self.kind != 'local' else type(self).__name__.lower()} on {names}"


@dataclass(frozen=True, eq=False)
class AllReduce(MoveStep):
    """Partial -> Replicate."""

    reduce_op: str = "sum"
    kind = "all_reduce"
    uniform = True

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.contiguous()

    def bytes_in(self, coords: Coords) -> int:
        return 2 * (self.ranks - 1) * self.bytes_at(coords) // self.ranks

    @property
    def partner(self) -> MoveStep:
        if self.reduce_op != "sum":
            return super().partner
        return Spread(self.layout, self.axes)


class Spread(MoveStep):
    """A Replicate value enters a call that is split on these axes: nothing moves, the gradients add up."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.view_as(local)

    @property
    def partner(self) -> MoveStep:
        return AllReduce(self.layout, self.axes)


@dataclass(frozen=True, eq=False)
class ToPartial(MoveStep):
    """Replicate -> Partial: the first coordinate keeps the value, the others hold the neutral element.

    Where equal parts reduce to themselves (avg, max, min, and, or), everyone keeps it. A `fresh` value was made by the
    step before for no other use."""

    reduce_op: str = "sum"
    fresh: bool = False

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        if self._keeps(coords):
            return local.clone(memory_format=torch.contiguous_format)
        return torch.full_like(local, self._neutral, memory_format=torch.contiguous_format)

    def pack_fresh(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        """The same in the memory of `local`."""
        return local if self._keeps(coords) else local.fill_(self._neutral)

    def _keeps(self, coords: Coords) -> bool:
        return self.is_first(coords) or self.reduce_op not in ("sum", "product", "bxor")

    @property
    def _neutral(self) -> int:
        return 1 if self.reduce_op == "product" else 0

    @property
    def partner(self) -> MoveStep:
        if self.reduce_op == "sum":
            return TakeFirst(self.layout, self.axes)
        if self.reduce_op == "product":
            return OnFirst(self.layout, self.axes)
        return AllReduce(self.layout, self.axes)  # each part has a part of the gradient


class TakeFirst(MoveStep):
    """The gradient of Replicate -> Partial(sum): all parts of a sum have the gradient of the sum, so nothing moves."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.view_as(local)

    @property
    def partner(self) -> MoveStep:
        return ToPartial(self.layout, self.axes)


class OnFirst(ToPartial):
    """The gradient of Replicate -> Partial(product), before it is added up: the other coordinates hold constants."""

    @property
    def partner(self) -> MoveStep:
        return self


class Mean(MoveStep):
    """Partial(avg) -> Partial(sum): divide by the number of coordinates."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.contiguous() / self.ranks

    @property
    def partner(self) -> MoveStep:
        return self


class GatherParts(MoveStep):
    """Every coordinate's part, stacked on a new first dim: for reductions that have no partner of their own."""

    kind = "all_gather"
    uniform = True

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.contiguous()

    def unpack(self, received: Sequence[torch.Tensor], coords: Coords) -> torch.Tensor:
        return torch.stack(list(received))

    def part_shapes(self, packed: torch.Tensor, coords: Coords) -> Sequence[tuple[int, ...]]:
        return [tuple(packed.shape)] * self.ranks

    def bytes_in(self, coords: Coords) -> int:
        return (self.ranks - 1) * self.bytes_at(coords)

    @property
    def partner(self) -> MoveStep:
        return TakePart(self.layout, self.axes)


class TakePart(MoveStep):
    """The inverse of GatherParts."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local[self.others(coords).index(coords)].clone()

    @property
    def partner(self) -> MoveStep:
        return GatherParts(self.layout, self.axes)
