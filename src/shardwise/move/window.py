"""Windows: every rank gets the indices of a dim that it asks for, from the ranks that hold them. Windows may overlap,
so the result has no layout. If several ranks got an index, their gradients add up on the rank it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from shardwise.comm.base import Coords
from shardwise.layout import Layout, Region
from shardwise.layout.on_mesh import cached_on_mesh
from shardwise.layout.region import region_shape, within
from shardwise.layout.split import Intervals, count, intersect, normalize
from shardwise.move.exchange import RoutedStep
from shardwise.move.schedule import Pieces, Route, Routes, Shape
from shardwise.move.steps import MeshStep

Needs = Callable[[Coords], Intervals]


@dataclass(frozen=True, eq=False)
class Window(RoutedStep):
    """An exchange along one axis: which indices of dim `along` each coordinate `has` and `needs`. `sizes` are the local
    shapes before."""

    along: int
    has: Needs
    needs: Needs
    sizes: Callable[[Coords], Shape]

    kind = "all_to_all"

    def held(self, coords: Coords) -> Region:
        return self._region(coords, self.has(coords))

    def needed(self, coords: Coords) -> Region:
        return self._region(coords, self.needs(coords))

    def _region(self, coords: Coords, side: Intervals) -> Region:
        """The region of some indices of the dim and all indices that the rank has of the other dims."""
        return tuple(side if dim == self.along else ((0, n),) if n else () for dim, n in enumerate(self.sizes(coords)))

    def routes(self, member: Coords) -> Routes:
        has, needs, others = self.has(member), self.needs(member), self.others(member)
        sent = {other: intersect(has, self.needs(other)) for other in others}
        taken = {other: intersect(self.has(other), needs) for other in others}
        return self._routes(
            member,
            {other: [part] for other, part in sent.items() if part},
            [((other,), part) for other, part in taken.items() if part],
        )

    def _routes(
        self, member: Coords, sends: dict[Coords, list[Intervals]], takes: list[tuple[tuple[Coords, ...], Intervals]]
    ) -> Routes:
        """Routes that have these indices of the dim."""
        before, after = self.held(member), self.needed(member)
        held, needed = (region_shape(before),), (region_shape(after),)
        inside = lambda whole, part: (0, within(whole, self._region(member, part)))  # noqa: E731
        return Routes(
            {other: Pieces.of([inside(before, part) for part in parts], held) for other, parts in sends.items()},
            [Route(sources, Pieces.of([inside(after, part)], needed)) for sources, part in takes],
            held,
            needed,
        )

    def bytes_in(self, coords: Coords) -> int:
        needed = self.needs(coords)
        return (count(needed) - count(intersect(needed, self.has(coords)))) * self._row_bytes(coords)

    def _row_bytes(self, coords: Coords) -> int:
        n = self.layout.dtype.itemsize
        for dim, size in enumerate(self.sizes(coords)):
            if dim != self.along:
                n *= size
        return n

    @cached_property
    def partner(self) -> MeshStep:
        return WindowBack(self.layout, self.axes, self.along, self.has, self.needs, self.sizes)


class WindowBack(Window):
    """The gradient of a window: the gradients of what was sent come back and add up."""

    zeros = True  # for indices that no rank asked for

    def held(self, coords: Coords) -> Region:
        return super().needed(coords)

    def needed(self, coords: Coords) -> Region:
        return super().held(coords)

    def part_number(self, coords: Coords) -> int:
        return 1  # windows overlap: all are added to zeros

    @property
    def reduces(self) -> tuple[int, ...]:
        return self.axes

    def routes(self, member: Coords) -> Routes:
        sends = {
            other: [cell for cell, takers in self._cells(other) if member in takers] for other in self.others(member)
        }
        return self._routes(member, sends, [(takers, cell) for cell, takers in self._cells(member)])

    def _cells(self, coords: Coords) -> list[tuple[Intervals, tuple[Coords, ...]]]:
        """What a rank has, cut into cells such that all elements of a cell went to the same ranks. Cells that no rank
        got are left out."""
        has, others = self.has(coords), self.others(coords)
        asked = {other: intersect(has, self.needs(other)) for other in others}
        edges = sorted({edge for part in asked.values() for interval in part for edge in interval})
        cells: list[tuple[Intervals, tuple[Coords, ...]]] = []
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            takers = tuple(other for other in others if intersect(asked[other], ((low, high),)))
            if takers:
                cells.append((((low, high),), takers))
        return cells

    def bytes_in(self, coords: Coords) -> int:
        mine = self.has(coords)
        others = (c for c in self.others(coords) if c != coords)
        return sum(count(intersect(mine, self.needs(c))) for c in others) * self._row_bytes(coords)

    @cached_property
    def partner(self) -> MeshStep:
        return Window(self.layout, self.axes, self.along, self.has, self.needs, self.sizes)


@partial(cached_on_mesh, "windows", 256)
def windows_of(layout: Layout, needs: tuple[tuple[int, Needs], ...]) -> Windows:
    """The windows of a layout, kept for the next call that asks for the same."""
    return Windows(layout, dict(needs))


class Windows:
    """The steps that give every rank the indices `needs[dim](coords)` of each dim named.

    What a rank needs of a dim may depend only on its coordinates on axes that cut that dim."""

    def __init__(self, layout: Layout, needs: dict[int, Needs]) -> None:
        self.layout, self.needs = layout, needs

    @cached_property
    def steps(self) -> tuple[Window, ...]:
        out: list[Window] = []
        sizes: Callable[[Coords], Shape] = self.layout.local_shape_at
        for dim in self.held_whole:
            sizes = self._resized(sizes, dim, self.needs[dim])
        for dim, needs in self.needs.items():
            has: Needs = lambda coords, dim=dim: self.layout.held(dim, coords)  # type: ignore[misc]
            axes = self.layout.axes_of(dim)
            for i, axis in enumerate(axes):
                # includes what the inner axes will pass on
                wanted = self._along(axes[i + 1 :], needs)
                after = self._met(has, wanted, axis) if axes[i + 1 :] else wanted
                out.append(Window(self.layout, (axis,), dim, has, after, sizes))
                sizes, has = self._resized(sizes, dim, after), after
        return tuple(out)

    @property
    def held_whole(self) -> list[int]:
        """The dims whose windows every rank can take from what it holds already, which is done before the steps."""
        return [dim for dim in self.needs if not self.layout.axes_of(dim)]

    def _along(self, axes: Sequence[int], needs: Needs) -> Needs:
        """What all ranks along these axes need together."""
        if not axes:
            return needs
        inner = self._along(axes[1:], needs)
        axis, size = axes[0], self.layout.mesh.shape[axes[0]]

        def all_along(coords: Coords) -> Intervals:
            everyone = ((*coords[:axis], i, *coords[axis + 1 :]) for i in range(size))
            return normalize(piece for c in everyone for piece in inner(c))

        return all_along

    def _met(self, has: Needs, wanted: Needs, axis: int) -> Needs:
        """What is wanted, as far as some coordinate of `axis` has it."""
        size = self.layout.mesh.shape[axis]

        def met(coords: Coords) -> Intervals:
            everyone = ((*coords[:axis], i, *coords[axis + 1 :]) for i in range(size))
            return intersect(normalize(piece for c in everyone for piece in has(c)), wanted(coords))

        return met

    @staticmethod
    def _resized(sizes: Callable[[Coords], Shape], dim: int, needs: Needs) -> Callable[[Coords], Shape]:
        return lambda coords: (*sizes(coords)[:dim], count(needs(coords)), *sizes(coords)[dim + 1 :])
