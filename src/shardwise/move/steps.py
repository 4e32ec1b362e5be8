"""The steps a move is made of. Each is local work around one exchange on one axis, and knows its gradient's step.

A step that gathers or slices is told the layout in which its axis is sharded (`sharded`); from it come the intervals
each coordinate holds of its parent, whatever the split is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy
import torch

from shardwise.comm.base import Coords
from shardwise.errors import MoveError
from shardwise.layout import Layout
from shardwise.layout.split import Intervals, count, is_contiguous


@dataclass(frozen=True, eq=False)
class MoveStep:
    """What all steps share: the mesh axis, and the layout before or after that sizes are read from."""

    layout: Layout
    axis: int

    kind = "local"
    reduce_op = "sum"
    uniform = False

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

    # -- sizes ----------------------------------------------------------------------------------------------
    @property
    def ranks(self) -> int:
        return self.layout.mesh.shape[self.axis]

    @property
    def dim(self) -> int:
        return self.layout.placements[self.axis].dim  # type: ignore[attr-defined]

    def bytes_at(self, coords: Coords) -> int:
        """Bytes of the local tensor of `layout`."""
        n = self.layout.dtype.itemsize
        for size in self.layout.local_shape_at(coords):
            n *= size
        return n

    def others(self, coords: Coords) -> list[Coords]:
        """The coordinates of everyone along the axis."""
        return [(*coords[: self.axis], i, *coords[self.axis + 1 :]) for i in range(self.ranks)]

    def __str__(self) -> str:
        return f"{type(self).__name__} on axis {self.layout.mesh.axis_names[self.axis]!r}"


class Slice(MoveStep):
    """Replicate -> Shard: keep what is mine. `layout` is the sharded side."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return take(local, self.dim, self.layout.row(self.axis, coords)[coords[self.axis]])

    @property
    def partner(self) -> MoveStep:
        return Gather(self.layout, self.axis)


class Gather(MoveStep):
    """Shard -> Replicate. `layout` is the sharded side."""

    kind = "all_gather"
    uniform = True

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.contiguous()

    def unpack(self, received: Sequence[torch.Tensor], coords: Coords) -> torch.Tensor:
        return put_together(received, self.dim, self.layout.row(self.axis, coords))

    def part_shapes(self, packed: torch.Tensor, coords: Coords) -> Sequence[tuple[int, ...]]:
        return _with_dim(packed.shape, self.dim, self.layout.row(self.axis, coords))

    def bytes_in(self, coords: Coords) -> int:
        mine = self.bytes_at(coords)
        return sum(self.bytes_at(c) for c in self.others(coords)) - mine

    @property
    def partner(self) -> MoveStep:
        return Slice(self.layout, self.axis)


class GatherSpread(Gather):
    """Shard -> Replicate for a call that is split on this axis: the gradients of all coordinates add up."""

    uniform = False

    @property
    def partner(self) -> MoveStep:
        return ReduceScatter(self.layout, self.axis)


class ReduceScatter(MoveStep):
    """Partial(sum) -> Shard. `layout` is the sharded side."""

    kind = "reduce_scatter"

    def pack(self, local: torch.Tensor, coords: Coords) -> list[torch.Tensor]:
        return [take(local, self.dim, part) for part in self.layout.row(self.axis, coords)]

    def part_shapes(self, packed: Sequence[torch.Tensor], coords: Coords) -> Sequence[tuple[int, ...]]:
        return [tuple(packed[coords[self.axis]].shape)] * self.ranks

    def bytes_in(self, coords: Coords) -> int:
        return (self.ranks - 1) * self.bytes_at(coords)

    @property
    def partner(self) -> MoveStep:
        return GatherSpread(self.layout, self.axis)


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
        return Spread(self.layout, self.axis)


class Spread(MoveStep):
    """A Replicate value enters a call that is split on this axis: nothing moves, the gradients add up."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.view_as(local)

    @property
    def partner(self) -> MoveStep:
        return AllReduce(self.layout, self.axis)


@dataclass(frozen=True, eq=False)
class ToPartial(MoveStep):
    """Replicate -> Partial: the first coordinate keeps the value, the others hold the neutral element.

    Where equal parts reduce to themselves (avg, max, min, and, or), everyone keeps it."""

    reduce_op: str = "sum"

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        if coords[self.axis] == 0 or self.reduce_op not in ("sum", "product", "bxor"):
            return local.clone(memory_format=torch.contiguous_format)
        neutral = 1 if self.reduce_op == "product" else 0
        return torch.full_like(local, neutral, memory_format=torch.contiguous_format)

    @property
    def partner(self) -> MoveStep:
        if self.reduce_op == "sum":
            return TakeFirst(self.layout, self.axis)
        if self.reduce_op == "product":
            return OnFirst(self.layout, self.axis)
        return AllReduce(self.layout, self.axis)  # each part has a part of the gradient


class TakeFirst(MoveStep):
    """The gradient of Replicate -> Partial(sum): all parts of a sum have the gradient of the sum, so nothing moves."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local.view_as(local)

    @property
    def partner(self) -> MoveStep:
        return ToPartial(self.layout, self.axis)


class OnFirst(ToPartial):
    """The gradient of Replicate -> Partial(product), before it is added up: the other coordinates hold constants."""

    @property
    def partner(self) -> MoveStep:
        return self


class Mean(MoveStep):
    """Partial(avg) -> Partial(sum): divide by the number of coordinates."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local / self.ranks

    @property
    def partner(self) -> MoveStep:
        return self


@dataclass(frozen=True, eq=False)
class AllToAll(MoveStep):
    """Shard(a) -> Shard(b) on one axis. `layout` is the source, `target` the result."""

    target: Layout
    kind = "all_to_all"

    def pack(self, local: torch.Tensor, coords: Coords) -> list[torch.Tensor]:
        return [take(local, self._to, part) for part in self.target.row(self.axis, coords)]

    def unpack(self, received: Sequence[torch.Tensor], coords: Coords) -> torch.Tensor:
        return put_together(received, self.dim, self.layout.row(self.axis, coords))

    def part_shapes(self, packed: Sequence[torch.Tensor], coords: Coords) -> Sequence[tuple[int, ...]]:
        return _with_dim(packed[coords[self.axis]].shape, self.dim, self.layout.row(self.axis, coords))

    @cached_property
    def _to(self) -> int:
        return self.target.placements[self.axis].dim  # type: ignore[attr-defined]

    def bytes_in(self, coords: Coords) -> int:
        n = self.layout.dtype.itemsize
        for size in self.target.local_shape_at(coords):
            n *= size
        whole = count(self.layout.held(self.dim, coords, self.axis))
        mine = count(self.layout.row(self.axis, coords)[coords[self.axis]])
        return n * (whole - mine) // whole if whole else 0

    @property
    def partner(self) -> MoveStep:
        return AllToAll(self.target, self.axis, self.layout)


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
        return TakePart(self.layout, self.axis)


class TakePart(MoveStep):
    """The inverse of GatherParts."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local[coords[self.axis]].clone()

    @property
    def partner(self) -> MoveStep:
        return GatherParts(self.layout, self.axis)


# -- index sets on tensors ---------------------------------------------------------------------------------
def _with_dim(shape: Sequence[int], dim: int, row: Sequence[Intervals]) -> list[tuple[int, ...]]:
    return [(*shape[:dim], count(part), *shape[dim + 1 :]) for part in row]


@lru_cache(maxsize=256)
def _indices(intervals: Intervals) -> numpy.ndarray:
    return numpy.concatenate([numpy.arange(a, b) for a, b in intervals])


def _index(intervals: Intervals, like: torch.Tensor) -> torch.Tensor:
    """An index tensor, made anew: one kept could come from a fake or inference mode."""
    return torch.as_tensor(_indices(intervals), device=like.device)


def take(x: torch.Tensor, dim: int, intervals: Intervals) -> torch.Tensor:
    """A contiguous copy of the indices of `dim` in `intervals`."""
    if is_contiguous(intervals):
        a, b = intervals[0] if intervals else (0, 0)
        return x.narrow(dim, a, b - a).clone(memory_format=torch.contiguous_format)
    return x.index_select(dim, _index(intervals, x))


def put_together(parts: Sequence[torch.Tensor], dim: int, row: Sequence[Intervals]) -> torch.Tensor:
    """The whole of `dim` from the part each coordinate holds."""
    whole = torch.cat(list(parts), dim)
    order = tuple(interval for part in row for interval in part)
    if all(a[1] <= b[0] for a, b in zip(order, order[1:], strict=False)):
        return whole
    out = torch.empty_like(whole)
    out.index_copy_(dim, _index(order, whole), whole)
    return out


def add_at(x: torch.Tensor, dim: int, intervals: Intervals, part: torch.Tensor) -> None:
    """Add `part` to the indices of `dim` in `intervals`, in place."""
    if is_contiguous(intervals):
        a, b = intervals[0] if intervals else (0, 0)
        x.narrow(dim, a, b - a).add_(part)
    else:
        x.index_add_(dim, _index(intervals, x), part)
