"""What one mesh axis does to a tensor: ``Replicate()``, ``Shard(dim, ...)`` or ``Partial(op)``. Immutable values.

A placement equals the one of torch.distributed.tensor that says the same, and has its hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.layout.split import Intervals, chunk_bounds, chunk_pieces, compose, count, normalize, sizes_to_pieces
from shardwise.protocols import MeshLike

_ALIASES = {"prod": "product"}  # the name that torch.Tensor has for it
_MOST_SIZES = 64  # that a placement lists in words
REDUCE_OPS = ("sum", "avg", "product", "max", "min", "band", "bor", "bxor")

Pieces = tuple[tuple[Intervals, ...], ...]  # [outer coordinate on the same dim][coordinate] -> intervals in the parent


class Placement:
    """Base of the three placements."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether the axis cuts a dim.

        Args:
            dim: This dim; by default any.
        """
        return False

    def is_replicate(self) -> bool:
        """Return whether every rank along the axis holds the same."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return whether a reduction over the axis is pending.

        Args:
            reduce_op: This reduction; by default any.
        """
        return False

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self!r} is immutable; make a new placement instead of setting {name!r}")

    def _equals_foreign(self, other: object) -> bool:
        """Whether a placement that is not ours says the same."""
        return not isinstance(other, Placement) and _is_placement(other) and as_placement(other) == self


class Replicate(Placement):
    """Every rank along the axis holds the same values."""

    __slots__ = ()

    def is_replicate(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replicate) or self._equals_foreign(other)

    def __hash__(self) -> int:
        return hash(-1)

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicate, ()


class Shard(Placement):
    """The axis cuts one dim of the tensor: each rank along it holds some of the indices.

    ``Shard(dim)`` cuts like ``torch.chunk``; ``sizes`` gives the size of each rank's part. ``pieces`` is the general
    form. It has, for each coordinate of the axes that cut the same dim before this one, and for each coordinate of this
    axis, the intervals that this coordinate holds, counted within what was left by the axes before.

    >>> Shard(0, sizes=(3, 0, 2)).pieces
    ((((0, 3),), (), ((3, 5),)),)
    """

    __slots__ = ("dim", "pieces", "_hash")
    dim: int
    pieces: Pieces | None

    def __init__(self, dim: int, sizes: Sequence[Any] | None = None, *, pieces: object = None) -> None:
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise LayoutError(f"Shard: dim must be an int, got {dim!r} ({type(dim).__name__})")
        if sizes is not None:
            if pieces is not None:
                raise LayoutError("Shard: give sizes or pieces, not both")
            pieces = _pieces_of_sizes(sizes)
        elif pieces is not None:
            pieces = _checked_pieces(pieces)
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "pieces", pieces)
        object.__setattr__(self, "_hash", hash(dim if pieces is None else ("Shard", dim, pieces)))

    @property
    def sizes(self) -> tuple[Any, ...] | None:
        """Each coordinate's count, or None for a chunk split or one whose parts are not in order."""
        if self.pieces is None:
            return None
        rows = tuple(tuple(sum(b - a for a, b in part) for part in row) for row in self.pieces)
        if tuple(sizes_to_pieces(row) for row in rows) != self.pieces:
            return None
        return rows[0] if len(rows) == 1 else rows

    def at(self, dim: int) -> Shard:
        """Return the same split on another dim.

        Args:
            dim: The dim, counted from the front.
        """
        return self if dim == self.dim else Shard(dim, pieces=self.pieces)

    def row(self, n: int, parts: int, outer: int) -> tuple[Intervals, ...]:
        """Return the intervals that each coordinate of the axis holds, counted within what is cut.

        Args:
            n: How many indices are cut: those that the axes before leave of the dim.
            parts: How many ranks there are along the axis.
            outer: Which part of the dim this is, of those that the axes before make.
        """
        if self.pieces is None:
            return chunk_pieces(n, parts)
        return self.pieces[outer if len(self.pieces) > 1 else 0]

    def part(self, n: int, parts: int, outer: int, i: int) -> Intervals:
        """Return the intervals that one coordinate holds: `row(n, parts, outer)[i]` without the others.

        Args:
            n, parts, outer: As for `row`.
            i: The coordinate.
        """
        if self.pieces is None:
            start, stop = chunk_bounds(n, parts, i)
            return ((start, stop),) if start < stop else ()
        return self.row(n, parts, outer)[i]

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Return how many indices a coordinate gets where they are cut like ``torch.chunk``, and the first of them.

        Args:
            curr_local_size: How many indices are cut.
            num_chunks: How many ranks there are along the axis.
            rank: The coordinate.
        """
        start, stop = chunk_bounds(curr_local_size, num_chunks, rank)
        return stop - start, start

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Shard):
            return self.dim == other.dim and self.pieces == other.pieces
        return self._equals_foreign(other)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def _detail(self) -> str:
        if self.pieces is None:
            return ""
        sizes, parts = self.sizes, sum(map(len, self.pieces))
        if sizes is not None:
            return f", sizes={sizes if parts <= _MOST_SIZES else f'<{parts:,} sizes>'}"
        count = sum(len(part) for row in self.pieces for part in row)
        return f", pieces={self.pieces if count <= 16 else f'<{count:,} intervals>'}"

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim}{self._detail()})"

    def __str__(self) -> str:
        return f"S({self.dim}{self._detail()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_shard, (self.dim, self.pieces)


class StridedShard(Placement):
    """The indices of a dim are cut into `split_factor` chunks, and the axis deals out each of them.

    What a coordinate gets depends on the tensor's size, so a layout turns it into the Shard that says it. A coordinate
    holds its part of every chunk: the parts of two axes that cut a dim in the order opposite to the mesh's, or those of
    several matrices that are stored as one.
    """

    __slots__ = ("dim", "split_factor")
    dim: int
    split_factor: int

    def __init__(self, dim: int, *, split_factor: int) -> None:
        for name, value, least in (("dim", dim, None), ("split_factor", split_factor, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
                raise LayoutError(f"_StridedShard: {name} must be an int{' >= 1' if least else ''}, got {value!r}")
            object.__setattr__(self, name, value)

    def at(self, dim: int) -> StridedShard:
        """The same on another dim."""
        return self if dim == self.dim else StridedShard(dim, split_factor=self.split_factor)

    def row(self, n: int, parts: int) -> tuple[Intervals, ...]:
        """The intervals of all coordinates within a parent of `n` indices."""
        chunks = chunk_pieces(n, self.split_factor)
        cut = [[compose(chunk, part) for part in chunk_pieces(count(chunk), parts)] for chunk in chunks]
        return tuple(normalize(interval for row in cut for interval in row[i]) for i in range(parts))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StridedShard):
            return (self.dim, self.split_factor) == (other.dim, other.split_factor)
        return self._equals_foreign(other)

    def __hash__(self) -> int:
        return hash((self.dim, self.split_factor))

    def __repr__(self) -> str:
        return f"_StridedShard(dim={self.dim}, sf={self.split_factor})"

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_strided, (self.dim, self.split_factor)


class Partial(Placement):
    """Each rank along the axis holds a part; the value of the tensor is the reduction of the parts by `reduce_op`."""

    __slots__ = ("reduce_op",)
    reduce_op: str
    ALL_REDUCE_OPS = REDUCE_OPS
    LINEAR_REDUCE_OPS = ("sum", "avg")

    def __init__(self, reduce_op: str = "sum") -> None:
        reduce_op = _ALIASES.get(reduce_op, reduce_op) if isinstance(reduce_op, str) else reduce_op
        if reduce_op not in REDUCE_OPS:
            raise LayoutError(f"Partial: reduce_op must be one of {', '.join(REDUCE_OPS)}, got {reduce_op!r}")
        object.__setattr__(self, "reduce_op", reduce_op)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or _ALIASES.get(reduce_op, reduce_op) == self.reduce_op

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Partial):
            return self.reduce_op == other.reduce_op
        return self._equals_foreign(other)

    def __hash__(self) -> int:
        return 1 + hash(self.reduce_op)

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Partial, (self.reduce_op,)


REPLICATE = Replicate()


def _rebuild_shard(dim: int, pieces: object) -> Shard:
    return Shard(dim, pieces=pieces)


def _rebuild_strided(dim: int, split_factor: int) -> StridedShard:
    return StridedShard(dim, split_factor=split_factor)


def _pieces_of_sizes(sizes: object) -> Pieces:
    if not isinstance(sizes, (tuple, list)):
        raise LayoutError(f"Shard: sizes must be a sequence of ints, one per rank of the axis, got {sizes!r}")
    rows = sizes if sizes and isinstance(sizes[0], (tuple, list)) else (sizes,)
    for row in rows:
        if not isinstance(row, (tuple, list)):
            raise LayoutError(
                f"Shard: sizes must be ints, or one row of ints for each outer part, got {row!r} in {tuple(sizes)}"
            )
        for size in row:
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise LayoutError(f"Shard: sizes must be ints >= 0, got {size!r} in {tuple(sizes)}")
    return tuple(sizes_to_pieces(tuple(row)) for row in rows)


def _checked_pieces(pieces: Any) -> Pieces:
    try:
        ends = [end for row in pieces for part in row for start, stop in part for end in (start, stop)]
        if not all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in ends):
            raise TypeError("an end is no index")
        return tuple(tuple(normalize(part) for part in row) for row in pieces)
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"Shard: pieces must be rows of parts of (start, stop) intervals, as ((((0, 2), (4, 6)), ((2, 4),)),), "
            f"got {pieces!r}"
        ) from error


def _is_placement(value: object) -> bool:
    """Whether it is a placement, ours or torch's."""
    return hasattr(value, "is_shard") and hasattr(value, "is_replicate") and not isinstance(value, type)


def as_placement(value: Any, name: str = "placement") -> Placement:
    """Our placement for `value`, which is ours already or one of torch's."""
    if isinstance(value, Placement):
        return value
    if _is_placement(value):
        if value.is_replicate():
            return REPLICATE
        if value.is_partial():
            return Partial(str(getattr(value, "reduce_op", "sum")))
        if hasattr(value, "split_factor"):
            return StridedShard(value.dim, split_factor=int(value.split_factor))
        if hasattr(value, "dim"):
            return Shard(value.dim)
    raise LayoutError(f"{name} = {value!r} is not a placement; use Replicate(), Shard(dim) or Partial(op)")


def as_placements(values: Iterable[Any] | Any) -> tuple[Placement, ...]:
    """A tuple of our placements; a single placement counts as a sequence of one."""
    if type(values) in (list, tuple):
        for value in values:
            if not isinstance(value, Placement):
                break
        else:
            return tuple(values)
    if isinstance(values, Placement) or hasattr(values, "is_replicate"):
        values = (values,)
    if isinstance(values, str) or not isinstance(values, Iterable):
        needed = "placements is needed for redistribute! " if values is None else ""  # all others have a default
        raise LayoutError(
            f"{needed}placements = {values!r} ({type(values).__name__}): expected a sequence of placements, "
            f"one per mesh axis, as [Shard(0), Replicate()]"
        )
    return tuple(as_placement(value, f"placements[{axis}]") for axis, value in enumerate(values))


def placements_on(mesh: MeshLike, placements: Iterable[Any] | None) -> tuple[Placement, ...]:
    """As `as_placements`; where none are given, Replicate on every axis of the mesh."""
    return (REPLICATE,) * len(mesh.shape) if placements is None else as_placements(placements)


def check_reductions(placements: Sequence[Placement], dtype: torch.dtype) -> None:
    """Raise where a Partial's reduction makes no sense for the dtype."""
    for axis, p in enumerate(placements):
        if isinstance(p, Partial):
            if p.reduce_op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
                raise LayoutError(
                    f"placements[{axis}] = {p!r}: an average of {dtype} is not a {dtype}; use a float dtype"
                )
            if p.reduce_op in ("max", "min") and dtype.is_complex:
                raise LayoutError(f"placements[{axis}] = {p!r}: {dtype} has no order; use a real dtype")
            if p.reduce_op in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
                raise LayoutError(
                    f"placements[{axis}] = {p!r}: bitwise reductions need an integer or bool dtype, got {dtype}"
                )
