"""A layout: mesh + one placement per axis + global shape, stride, dtype, device. Immutable and interned.

Two equal layouts are the same object, so they compare and hash by identity, and a plan keyed by layouts costs one
dictionary look-up. What a rank holds follows from the placements: the axes that cut one dim nest in mesh order, each
dealing out what its parent holds.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch

from shardwise.errors import LayoutError
from shardwise.layout.checks import check_placements, check_sizes, checked_values
from shardwise.layout.placement import REPLICATE, Placement, Shard, as_placements
from shardwise.layout.region import Region
from shardwise.layout.shapes import contiguous_stride
from shardwise.layout.split import Intervals, compose, count, normalize
from shardwise.layout.tiles import Tile
from shardwise.protocols import MeshLike

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Layout] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Layout:
    """Where every element of a tensor lives. Make one with `Layout.make`."""

    __slots__ = (
        *("mesh", "placements", "shape", "stride", "dtype", "device", "is_plain", "is_partial"),
        *("_sets", "_digest", "__weakref__"),
    )
    mesh: Any  # has .shape (ints), .axis_names, .coords(rank) and .ranks
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    _repr_html_: Callable[[], str]  # `picture.py`
    __rich__: Callable[[], str]
    _sets: dict[Any, Intervals]  # what `held` has found
    _digest: int | None
    is_plain: bool  # every axis of more than one coordinate is Replicate
    is_partial: bool  # a reduction is pending on some axis

    @staticmethod
    def make(
        mesh: MeshLike,
        placements: Iterable[Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> Layout:
        """Return the one layout with these values.

        Args:
            mesh: The ranks.
            placements: One per mesh axis.
            shape: The global shape.
            dtype: The dtype.
            stride: The global strides; by default those of a contiguous tensor.
            device: By default that of the mesh.

        Raises:
            LayoutError: The values do not fit each other.
        """
        shape = tuple(shape)
        stride = contiguous_stride(shape) if stride is None else tuple(stride)
        device = mesh.device if device is None else device
        given = as_placements(placements)
        found = _interned.get((id(mesh), given, shape, stride, dtype, device))
        if found is not None:  # checked before; to check irregular pieces takes long
            return found
        placements = check_placements(mesh, given, shape)
        key = (id(mesh), placements, shape, stride, dtype, device)  # a layout keeps its mesh, its key must not
        with _lock:
            found = _interned.get(key)
            if found is None:
                check_sizes(shape, stride)
                found = Layout.__new__(Layout)
                found.mesh, found.placements, found.shape = mesh, placements, shape
                found.stride, found.dtype, found.device = stride, dtype, device
                found.is_plain = all(p.is_replicate() or k == 1 for p, k in zip(placements, mesh.shape, strict=True))
                found.is_partial = any(p.is_partial() for p in placements)
                found._sets, found._digest = {}, None
                _interned[key] = found
        return found

    def replace(self, **changes: Any) -> Layout:
        """Return the layout with some values changed.

        Args:
            **changes: New values, by the names of the arguments of `make`. A new shape gets a contiguous stride unless
                one is given.
        """
        if "shape" in changes and "stride" not in changes:
            changes["stride"] = None
        values = {name: getattr(self, name) for name in ("mesh", "placements", "shape", "dtype", "stride", "device")}
        return Layout.make(**(values | changes))

    def placed(self, changes: Mapping[int, Placement]) -> Layout:
        """Return the layout with other placements on some axes.

        Args:
            changes: The new placements, by axis.
        """
        places = tuple(changes.get(axis, p) for axis, p in enumerate(self.placements))
        return self if places == self.placements else self.replace(placements=places)

    def replicated(self, **changes: Any) -> Layout:
        """Return the layout in which every rank holds the whole tensor.

        Args:
            **changes: Other new values, as of `replace`.
        """
        return self.replace(placements=(REPLICATE,) * len(self.placements), **changes)

    # -- who holds what -------------------------------------------------------------------------------------
    @property
    def ndim(self) -> int:
        """How many dims the tensor has."""
        return len(self.shape)

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that cut a dim, outermost first.

        Args:
            dim: A dim of the tensor, counted from the front.
        """
        return tuple(axis for axis, p in enumerate(self.placements) if p.is_shard(dim))

    def is_cut(self, dim: int) -> bool:
        """Return whether ranks hold different indices of a dim. An axis of one rank cuts nothing.

        Args:
            dim: A dim of the tensor, counted from the front.
        """
        return any(self.mesh.shape[axis] > 1 for axis in self.axes_of(dim))

    def held(self, dim: int, coords: Sequence[int], axes: int | None = None) -> Intervals:
        """Return the indices of a dim that a rank holds, as intervals.

        Args:
            dim: A dim of the tensor, counted from the front.
            coords: Where the rank stands in the mesh.
            axes: Consider only the first `axes` mesh axes; by default all.
        """
        cutting = tuple(a for a in self.axes_of(dim) if axes is None or a < axes)
        key = (dim, tuple((a, coords[a]) for a in cutting))
        found = self._sets.get(key)
        if found is None:
            found = self._sets[key] = self._held(dim, coords, cutting)
        return found

    def _held(self, dim: int, coords: Sequence[int], cutting: tuple[int, ...]) -> Intervals:
        held: Intervals = normalize([(0, self.shape[dim])])
        outer = 0
        for axis in cutting:
            parts = self.mesh.shape[axis]
            part = self.placements[axis].part(count(held), parts, outer, coords[axis])  # type: ignore[attr-defined]
            held = compose(held, part)
            outer = outer * parts + coords[axis]
        return held

    def row(self, axis: int, coords: Sequence[int]) -> tuple[Intervals, ...]:
        """Return the intervals that each coordinate of a cutting axis holds, counted within what the axes before leave.

        Args:
            axis: A mesh axis that cuts a dim.
            coords: Where a rank stands: its coordinates on the axes before say which part is cut.
        """
        shard = self.placements[axis]
        dim = shard.dim  # type: ignore[attr-defined]
        outer = 0
        for a in self.axes_of(dim):
            if a < axis:
                outer = outer * self.mesh.shape[a] + coords[a]
        return shard.row(count(self.held(dim, coords, axis)), self.mesh.shape[axis], outer)  # type: ignore[attr-defined]

    def local_shape_at(self, coords: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what a rank holds.

        Args:
            coords: Where the rank stands in the mesh.
        """
        cut = {p.dim for p in self.placements if isinstance(p, Shard)}
        return tuple(count(self.held(d, coords)) if d in cut else n for d, n in enumerate(self.shape))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what a rank holds.

        Args:
            rank: A rank of the mesh, by its number in the world.
        """
        return self.local_shape_at(self.mesh.coords(rank))

    def offset_at(self, dim: int, coords: Sequence[int]) -> int:
        """Return the first index of a dim that a rank holds; 0 where it holds none.

        Args:
            dim: A dim of the tensor, counted from the front.
            coords: Where the rank stands in the mesh.
        """
        held = self.held(dim, coords)
        return held[0][0] if held else 0

    def tiles(self, rank: int) -> tuple[Tile, ...]:
        """Return the boxes of global indices that a rank holds; where an axis is Partial, it has a part of each.

        Args:
            rank: A rank of the mesh, by its number in the world.
        """
        return self.tiles_at(self.mesh.coords(rank))

    def tiles_at(self, coords: Sequence[int]) -> tuple[Tile, ...]:
        """Return the boxes of global indices that a rank holds.

        Args:
            coords: Where the rank stands in the mesh.
        """
        boxes = itertools.product(*self.region(coords))
        return tuple(Tile(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes)

    def region(self, coords: Sequence[int]) -> Region:
        """Return the indices of every dim that a rank holds.

        Args:
            coords: Where the rank stands in the mesh.
        """
        return tuple(self.held(dim, coords) for dim in range(self.ndim))

    def holders(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that hold an element.

        Args:
            index: The global index of the element, an int per dim.

        Raises:
            LayoutError: The index is outside of the shape.
        """
        whole = isinstance(index, Sequence) and len(index) == self.ndim
        if not whole or not all(isinstance(i, int) and 0 <= i < n for i, n in zip(index, self.shape, strict=True)):
            raise LayoutError(
                f"index {index!r} is outside of shape {self.shape}; give {self.ndim} ints, 0 <= index[d] < shape[d]"
            )
        return tuple(
            rank
            for rank in self.mesh.ranks
            if all(any(a <= i < b for a, b in self.held(dim, self.mesh.coords(rank))) for dim, i in enumerate(index))
        )

    def __repr__(self) -> str:
        places = ", ".join(said if len(said) < 160 else f"{said[:150]}...)" for said in map(str, self.placements))
        return f"Layout({self.shape} {str(self.dtype).removeprefix('torch.')} [{places}] on {self.mesh!r})"

    @property
    def digest(self) -> int:
        """A number that is equal for equal layouts in all processes, and another one for layouts that differ."""
        if self._digest is None:
            cuts = [p.pieces if isinstance(p, Shard) else None for p in self.placements]
            facts = self.shape, str(self.dtype), self.placements, cuts, self.mesh.shape, self.mesh.axis_names
            self._digest = crc32(repr(facts).encode())
        return self._digest

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_layout, (self.mesh, self.placements, self.shape, self.dtype, self.stride, self.device)


def living_layouts() -> list[Layout]:
    """Every layout that is in use now."""
    return list(_interned.values())


def _rebuild_layout(
    mesh: object, placements: Iterable[object], shape: object, dtype: object, stride: object, device: object
) -> Layout:
    """Rebuild a pickled layout. The values come from outside, so they are checked."""
    if not isinstance(mesh, MeshLike):
        raise LayoutError(f"layout: mesh must be a mesh, got {mesh!r} ({type(mesh).__name__})")
    return Layout.make(mesh, placements, *checked_values(shape, dtype, stride, device))
