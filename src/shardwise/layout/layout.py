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

from shardwise.errors import DimError, LayoutError, out_of_range
from shardwise.layout.placement import Partial, Placement, Shard, StridedShard, as_placements
from shardwise.layout.region import Region, contiguous_stride
from shardwise.layout.split import Intervals, chunk_pieces, chunk_size, compose, count, intersect, normalize, positions
from shardwise.layout.tiles import Tile
from shardwise.protocols import MeshLike

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Layout] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without holes, with the dims in memory in the order they have under the strides `like`.

    >>> dense_stride((2, 3, 4), like=(20, 1, 5))
    (12, 1, 3)
    """
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether these strides leave no holes and repeat nothing; dims of one index do not count.

    >>> is_dense((2, 1, 3), (1, 9, 2)), is_dense((2, 3), (6, 2)), is_dense((2, 3), (0, 1))
    (True, False, False)
    """
    step = 1
    for s, n in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if n and s != step:
            return False
        step *= n
    return True


class Layout:
    """Where every element of a tensor lives. Make one with `Layout.make`."""

    __slots__ = (
        *("mesh", "placements", "shape", "stride", "dtype", "device", "is_plain"),
        *("_sets", "_digest", "__weakref__"),
    )
    mesh: Any  # has .shape (ints), .axis_names, .coords(rank) and .ranks
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any
    _repr_html_: Callable[[], str]  # `picture.py`
    __rich__: Callable[[], str]
    _sets: dict[Any, Intervals]  # what `held` has found
    _digest: int | None
    is_plain: bool  # every axis of more than one coordinate is Replicate

    @staticmethod
    def make(
        mesh: MeshLike,
        placements: Iterable[Any],
        shape: Sequence[int],
        dtype: Any,
        stride: Sequence[int] | None = None,
        device: Any = None,
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
                _check_sizes(shape, stride)
                found = Layout.__new__(Layout)
                found.mesh, found.placements, found.shape = mesh, placements, shape
                found.stride, found.dtype, found.device = stride, dtype, device
                found.is_plain = all(p.is_replicate() or k == 1 for p, k in zip(placements, mesh.shape, strict=True))
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

    # -- who holds what -------------------------------------------------------------------------------------
    @property
    def ndim(self) -> int:
        """How many dims the tensor has."""
        return len(self.shape)

    @property
    def is_partial(self) -> bool:
        """Whether a reduction is pending on some axis."""
        return any(p.is_partial() for p in self.placements)

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
            axes: Look at that many mesh axes only, from the first on; by default at all.
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
        """A number that is the same in all processes; layouts that cut differently, or something else, have others."""
        if self._digest is None:
            cuts = [p.pieces if isinstance(p, Shard) else None for p in self.placements]
            facts = self.shape, str(self.dtype), self.placements, cuts, self.mesh.shape, self.mesh.axis_names
            self._digest = crc32(repr(facts).encode())
        return self._digest

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_layout, (self.mesh, self.placements, self.shape, self.dtype, self.stride, self.device)


def _rebuild_layout(
    mesh: object, placements: Iterable[object], shape: object, dtype: object, stride: object, device: object
) -> Layout:
    """A pickled layout again, from values that may be anything."""
    if not isinstance(mesh, MeshLike):
        raise LayoutError(f"layout: mesh must be a mesh, got {mesh!r} ({type(mesh).__name__})")
    return Layout.make(mesh, placements, *checked_values(shape, dtype, stride, device))


def checked_values(
    shape: object, dtype: object, stride: object, device: object
) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...], torch.device]:
    """What a layout says of the global tensor, from a file or another process; LayoutError where it makes no sense."""
    shape, stride = _checked_ints("shape", shape), _checked_ints("stride", stride)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"layout: dtype must be a torch.dtype, got {dtype!r}")
    if not isinstance(device, torch.device):
        raise LayoutError(f"layout: device must be a torch.device, got {device!r}")
    return shape, dtype, stride, device


def _checked_ints(name: str, sizes: object) -> tuple[int, ...]:
    if not isinstance(sizes, (tuple, list)) or not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise LayoutError(f"layout: {name} must be ints from 0 to 2**63 - 1, got {sizes!r}")
    return tuple(sizes)


# -- checks ------------------------------------------------------------------------------------------------
def _check_sizes(shape: tuple[Any, ...], stride: tuple[Any, ...]) -> None:
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise LayoutError(f"shape = {shape}: sizes must be ints >= 0")
    if len(stride) != len(shape):
        raise LayoutError(f"stride = {stride}: {len(stride)} strides for a shape of {len(shape)} dims {shape}")


def check_placements(
    mesh: MeshLike, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """The placements in canonical form: dims counted from the front, explicit splits that equal chunks as chunks."""
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"`placements` must have the same length as `device_mesh.ndim`! Found placements length: "
            f"{len(placements)}, and device_mesh.ndim: {len(mesh.shape)}. Given were "
            f"({', '.join(map(repr, placements))}) for a mesh of shape {tuple(mesh.shape)}"
        )
    _check_reductions_commute(mesh, placements)
    if not any(
        (isinstance(p, Shard) and (p.pieces is not None or p.dim < 0 or p.dim >= len(shape)))
        or isinstance(p, StridedShard)
        for p in placements
    ):
        return placements
    out: list[Placement] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, StridedShard)):
            dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
            if not 0 <= dim < len(shape):
                raise DimError(
                    f"placements[{axis}] = {placement!r}: dim {placement.dim} is out of range for a tensor of shape "
                    f"{shape}; "
                    + (f"use {-len(shape)} to {len(shape) - 1}" if shape else "it has no dim to shard")
                    + f". {out_of_range(placement.dim, len(shape))}"
                )
            placement = placement.at(dim)
            if isinstance(placement, StridedShard):
                parents = parent_sets(mesh, out, dim, shape[dim])
                rows = [placement.row(count(parent), mesh.shape[axis]) for parent in parents]
                placement = Shard(dim, pieces=rows)
            if placement.pieces is not None:
                placement = _check_pieces(mesh, tuple(out), axis, placement, shape)
        out.append(placement)
    return tuple(out)


def _check_reductions_commute(mesh: MeshLike, placements: tuple[Placement, ...]) -> None:
    """The order in which axes are reduced must not matter: sums and averages mix, others only with themselves."""
    ops = {p.reduce_op: axis for axis, p in enumerate(placements) if isinstance(p, Partial) and mesh.shape[axis] > 1}
    if len(ops) > 1 and not ops.keys() <= {"sum", "avg"}:
        pair = ", ".join(f"placements[{axis}] = {placements[axis]!r}" for axis in sorted(ops.values()))
        raise LayoutError(
            f"{pair}: these reductions do not commute, so the value would depend on their order; reduce one first"
        )


def _check_pieces(
    mesh: MeshLike, outer: tuple[Placement, ...], axis: int, shard: Shard, shape: tuple[int, ...]
) -> Shard:
    """Each row must deal out exactly what its parent holds; equal to a chunk split, it becomes one."""
    parts = mesh.shape[axis]
    parents = parent_sets(mesh, outer, shard.dim, shape[shard.dim])
    pieces = shard.pieces
    assert pieces is not None
    if len(pieces) == 1 and len(parents) > 1:
        pieces = pieces * len(parents)
    if len(pieces) != len(parents):
        raise LayoutError(
            f"placements[{axis}] = {shard!r}: {len(pieces)} rows of sizes, but the axes before it cut dim {shard.dim} "
            f"into {len(parents)} parts; give {len(parents)} rows, or one for all"
        )
    for parent, row in zip(parents, pieces, strict=True):
        if len(row) != parts:
            raise LayoutError(
                f"placements[{axis}] = {shard!r}: {len(row)} sizes for a mesh axis of {parts} ranks; give {parts}"
            )
        n, given = count(parent), sum(map(count, row))
        if given != n:
            raise LayoutError(
                f"placements[{axis}] = {shard!r}: the sizes {tuple(map(count, row))} add up to {given}, but there are "
                f"{n} indices of dim {shard.dim} of shape {shape} to deal out"
            )
        if normalize(part for r in row for part in r) != normalize([(0, n)]):
            raise LayoutError(
                f"placements[{axis}] = {shard!r}: the pieces overlap or leave holes; they must deal out each of "
                f"the {n} indices [0, {n}) of dim {shard.dim} of shape {shape} once"
            )
    if all(row == chunk_pieces(count(parent), parts) for parent, row in zip(parents, pieces, strict=True)):
        return Shard(shard.dim)
    return Shard(shard.dim, pieces=pieces)


def parent_sets(mesh: MeshLike, outer: Sequence[Placement], dim: int, n: int) -> list[Intervals]:
    """For each coordinate of the axes in `outer` that cut `dim` (in mesh order), the indices it holds."""
    sets = [normalize([(0, n)])]
    for axis, placement in enumerate(outer):
        if placement.is_shard(dim):
            parts = mesh.shape[axis]
            sets = [
                compose(held, part)
                for i, held in enumerate(sets)
                for part in placement.row(count(held), parts, i)  # type: ignore[attr-defined]
            ]
    return sets


# -- from a table of sets back to one placement per axis ----------------------------------------------------
def living_layouts() -> list[Layout]:
    """Every layout that somebody uses now."""
    return list(_interned.values())


def shards_from_table(
    axis_sizes: Sequence[int], n: int, table: Callable[[tuple[int, ...]], Intervals], dim: int
) -> tuple[Shard, ...]:
    """The nested Shards on `dim` under which the coordinate tuple c of these axes holds the indices table(c).

    The sets must be disjoint and cover [0, n). This is how a view op says where the pieces went.
    """
    leaves: dict[tuple[int, ...], Intervals] = {c: table(c) for c in itertools.product(*(range(k) for k in axis_sizes))}
    unions = leaves
    levels = [leaves]
    for _ in axis_sizes:
        merged: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for c, held in unions.items():
            merged.setdefault(c[:-1], []).extend(held)
        unions = {c: normalize(parts) for c, parts in merged.items()}
        levels.append(unions)
    levels.reverse()  # levels[t] is keyed by the first t coordinates
    if levels[0][()] != normalize([(0, n)]):
        raise LayoutError(f"the parts cover {levels[0][()]} of the {n} indices of dim {dim}")
    shards = []
    for t, parts in enumerate(axis_sizes):
        rows, regular = [], True
        for c, parent in levels[t].items():
            row = tuple(positions(parent, levels[t + 1][(*c, i)]) for i in range(parts))
            regular = regular and row == chunk_pieces(count(parent), parts)
            rows.append(row)
        shards.append(Shard(dim) if regular else Shard(dim, pieces=tuple(rows)))
    return tuple(shards)


# -- who holds what of a set of indices: the work grows with the holders found, not with the ranks there are ----
Spot = tuple[tuple[int, int], ...]  # (axis, coordinate) for each axis that cuts the dim


def holders_of(layout: Layout, dim: int, wanted: Intervals, pinned: Mapping[int, int]) -> list[tuple[Spot, Intervals]]:
    """The coordinates, on the axes that cut `dim`, of those who hold some of `wanted`, and what they hold of it.

    On the axes in `pinned` only that coordinate is looked at.
    """
    found: list[tuple[Spot, int, Intervals]] = [((), 0, normalize([(0, layout.shape[dim])]))]
    for axis in layout.axes_of(dim):
        parts = layout.mesh.shape[axis]
        shard = layout.placements[axis]
        inner = []
        for spot, outer, held in found:
            n = count(held)
            asked = positions(held, intersect(held, wanted))
            for i in (pinned[axis],) if axis in pinned else _asked(shard, asked, n, parts, outer):
                part = shard.part(n, parts, outer, i)  # type: ignore[attr-defined]
                inner.append(((*spot, (axis, i)), outer * parts + i, compose(held, part)))
        found = inner
    pairs = [(spot, intersect(held, wanted)) for spot, _, held in found]
    return [(spot, common) for spot, common in pairs if common]


def _asked(shard: object, asked: Intervals, n: int, parts: int, outer: int) -> list[int]:
    """The coordinates that may hold some of the positions `asked` of a parent of `n`."""
    if shard.pieces is not None:  # type: ignore[attr-defined]
        row = shard.row(n, parts, outer)  # type: ignore[attr-defined]
        return [i for i, part in enumerate(row) if intersect(part, asked)]
    size = chunk_size(n, parts)
    return sorted({i for a, b in asked for i in range(a // size, (b - 1) // size + 1)})
