"""Windows: every rank gets the indices of a dim it asks for, from those who hold them. Windows may overlap, so what
comes out is no layout; the gradients of an index that several ranks got add up where it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.comm.boxes import add_at, put_together, take
from shardwise.layout import Layout
from shardwise.layout.split import Intervals, count, intersect, normalize, positions
from shardwise.move.steps import MoveStep

Needs = Callable[[Coords], Intervals]


@dataclass(frozen=True, eq=False)
class Window(MoveStep):
    """Along one axis: who `has` what of dim `along`, who `needs` what. `sizes` are the local shapes before."""

    along: int
    has: Needs
    needs: Needs
    sizes: Callable[[Coords], tuple[int, ...]]

    kind = "all_to_all"

    def pack(self, local: torch.Tensor, coords: Coords) -> list[torch.Tensor]:
        mine = self.has(coords)
        sent = (intersect(mine, self.needs(other)) for other in self.others(coords))
        return [take(local, self.along, positions(mine, part)) for part in sent]

    def unpack(self, received: Sequence[torch.Tensor], coords: Coords) -> torch.Tensor:
        return put_together(received, self.along, self._parts(coords))

    def part_shapes(self, packed: Sequence[torch.Tensor], coords: Coords) -> Sequence[tuple[int, ...]]:
        return [self._shaped(packed, count(part)) for part in self._parts(coords)]

    def _parts(self, coords: Coords) -> list[Intervals]:
        """Where what comes from each coordinate stands in my window."""
        needed = self.needs(coords)
        return [positions(needed, intersect(self.has(other), needed)) for other in self.others(coords)]

    def _shaped(self, packed: Sequence[torch.Tensor], size: int) -> tuple[int, ...]:
        shape = packed[0].shape
        return (*shape[: self.along], size, *shape[self.along + 1 :])

    def bytes_in(self, coords: Coords) -> int:
        needed = self.needs(coords)
        missing = count(needed) - count(intersect(needed, self.has(coords)))
        return missing * self._row_bytes(coords)

    def _row_bytes(self, coords: Coords) -> int:
        n = self.layout.dtype.itemsize
        for dim, size in enumerate(self.sizes(coords)):
            if dim != self.along:
                n *= size
        return n

    @property
    def partner(self) -> MoveStep:
        return WindowBack(self.layout, self.axes, self.along, self.has, self.needs, self.sizes)


class WindowBack(Window):
    """The gradient of a window: what was handed out comes back and adds up."""

    def pack(self, local: torch.Tensor, coords: Coords) -> list[torch.Tensor]:
        return [take(local, self.along, part) for part in self._parts(coords)]

    def unpack(self, received: Sequence[torch.Tensor], coords: Coords) -> torch.Tensor:
        mine = self.has(coords)
        whole = received[0].new_zeros(self._shaped(received, count(mine)))
        for part, other in zip(received, self.others(coords), strict=True):
            add_at(whole, self.along, positions(mine, intersect(mine, self.needs(other))), part)
        return whole

    def part_shapes(self, packed: Sequence[torch.Tensor], coords: Coords) -> Sequence[tuple[int, ...]]:
        mine = self.has(coords)
        return [self._shaped(packed, count(intersect(mine, self.needs(other)))) for other in self.others(coords)]

    def bytes_in(self, coords: Coords) -> int:
        mine = self.has(coords)
        others = (c for c in self.others(coords) if c != coords)
        return sum(count(intersect(mine, self.needs(c))) for c in others) * self._row_bytes(coords)

    @property
    def partner(self) -> MoveStep:
        return Window(self.layout, self.axes, self.along, self.has, self.needs, self.sizes)


class Windows:
    """The steps that give every rank the indices `needs[dim](coords)` of each dim named.

    What a rank needs of a dim may depend only on its coordinates on axes that cut that dim."""

    def __init__(self, layout: Layout, needs: dict[int, Needs]) -> None:
        self.layout, self.needs = layout, needs

    @cached_property
    def steps(self) -> tuple[Window, ...]:
        out: list[Window] = []
        sizes = self.layout.local_shape_at
        for dim in self.held_whole:
            sizes = self._resized(sizes, dim, self.needs[dim])
        for dim, needs in self.needs.items():
            has: Needs = lambda coords, dim=dim: self.layout.held(dim, coords)  # type: ignore[misc]
            axes = self.layout.axes_of(dim)
            for i, axis in enumerate(axes):
                # what the inner axes will hand on must come along too
                wanted = self._along(axes[i + 1 :], needs)
                after = self._met(has, wanted, axis) if axes[i + 1 :] else wanted
                out.append(Window(self.layout, (axis,), dim, has, after, sizes))
                sizes, has = self._resized(sizes, dim, after), after
        return tuple(out)

    @property
    def held_whole(self) -> list[int]:
        """The dims whose windows every rank can take from what it holds: best before the steps."""
        return [dim for dim in self.needs if not self.layout.axes_of(dim)]

    def _along(self, axes: Sequence[int], needs: Needs) -> Needs:
        """What anyone along these axes needs."""
        if not axes:
            return needs
        inner = self._along(axes[1:], needs)
        axis, size = axes[0], self.layout.mesh.shape[axes[0]]

        def all_along(coords: Coords) -> Intervals:
            everyone = ((*coords[:axis], i, *coords[axis + 1 :]) for i in range(size))
            return normalize(piece for c in everyone for piece in inner(c))

        return all_along

    def _met(self, has: Needs, wanted: Needs, axis: int) -> Needs:
        """What is wanted, as far as someone along `axis` has it."""
        size = self.layout.mesh.shape[axis]

        def met(coords: Coords) -> Intervals:
            everyone = ((*coords[:axis], i, *coords[axis + 1 :]) for i in range(size))
            return intersect(normalize(piece for c in everyone for piece in has(c)), wanted(coords))

        return met

    @staticmethod
    def _resized(sizes: Any, dim: int, needs: Needs) -> Any:
        return lambda coords: (*sizes(coords)[:dim], count(needs(coords)), *sizes(coords)[dim + 1 :])
