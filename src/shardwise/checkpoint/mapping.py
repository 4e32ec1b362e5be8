"""`Map`: one table between the names in files and those of a program, good in both directions.

A line of the table says how tensors of the one side are tensors of the other: renamed, joined along a dim, stacked,
transposed. All of these only say where an index goes, so a load reads each byte once and a cut stays a cut; the inverse
of a table is the same table read from right to left.

    table = Map([
        join(["h.{i}.q", "h.{i}.k", "h.{i}.v"], "layers.{i}.qkv", sizes=(4, 1, 1)),
        stack("h.{i}.experts.{e}.w", "layers.{i}.experts", over="e"),
        transpose("h.{i}.out", "layers.{i}.out"),
        rename("h.{i}.{rest*}", "layers.{i}.{rest*}"),
    ])
    checkpoint.load(path, model, map=table)

`{i}` stands for one part of a name between dots, `{rest*}` for any text. The first line that fits a name counts; names
that no line fits stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise.checkpoint.files import Entry
from shardwise.checkpoint.map_lines import Line, braces_in, filled, regex_of
from shardwise.errors import CheckpointError
from shardwise.layout.tiles import Tile


class Piece(NamedTuple):
    """A box of a tensor on the one side that is a box of a tensor on the other."""

    name: str
    box: Tile
    drop: int | None  # a dim of one index that goes
    order: tuple[int, ...] | None  # the dims in their new order
    add: int | None  # where a new dim of one index comes
    at: tuple[int, ...]  # where it begins on the other side

    def tile(self, part: Tile) -> Tile:
        """Where a part of the box is on the other side."""
        offsets = [a - b for a, b in zip(part.offsets, self.box.offsets)]
        sizes = list(part.sizes)
        for numbers, one in ((offsets, 0), (sizes, 1)):
            if self.drop is not None:
                del numbers[self.drop]
            if self.order is not None:
                numbers[:] = [numbers[d] for d in self.order]
            if self.add is not None:
                numbers.insert(self.add, one)
        return Tile(tuple(a + b for a, b in zip(offsets, self.at)), tuple(sizes))

    def value(self, values: torch.Tensor) -> torch.Tensor:
        """The values of a part of the box, as the other side has them."""
        if self.drop is not None:
            values = values.squeeze(self.drop)
        if self.order is not None:
            values = values.permute(self.order)
        return values if self.add is None else values.unsqueeze(self.add)


class Mapped(NamedTuple):
    """A tensor of the other side, and what it is made of."""

    entry: Entry
    pieces: tuple[Piece, ...]


class Map:
    """A table between the names of files and those of a program.

    Args:
        lines: What `rename`, `join`, `split`, `stack`, `transpose` and `drop` make; the first that fits a name counts.
        dtype: What floating-point tensors are converted to on the way; None leaves them. A tensor without dims (as the
            count of steps of an optimizer) is converted only if the program's has this dtype.
    """

    def __init__(self, lines: Sequence[Line] = (), *, dtype: torch.dtype | None = None) -> None:
        if not isinstance(lines, (list, tuple)) or not all(isinstance(line, Line) for line in lines):
            raise CheckpointError(f"Map: lines must be a list of what rename, join, ... make; got {lines!r}")
        self.lines, self.dtype = tuple(lines), dtype
        self._patterns = [[regex_of(name) for name in line.files] for line in self.lines]

    @staticmethod
    def cast(dtype: torch.dtype) -> Map:
        """Return the table by which names stay and floating-point tensors get another dtype.

        Args:
            dtype: The dtype in the program.
        """
        return Map(dtype=dtype)

    @property
    def inverse(self) -> Map:
        """The table from the program's names to those of files. What was dropped stays away."""
        return Map([line.inverse() for line in self.lines if line.program])

    def apply(self, entries: Mapping[str, Entry]) -> dict[str, Mapped]:
        """Return what the tensors of files are for the program.

        Args:
            entries: The tensors of the files, by name.

        Raises:
            CheckpointError: Tensors that belong together are not all there, or do not fit each other.
        """
        groups: dict[tuple[int, tuple[tuple[str, str], ...]], dict[tuple[int, int], Entry]] = {}
        out: dict[str, Mapped] = {}
        for name, entry in entries.items():
            at = self._find(name)
            if at is None:
                self._put(out, name, _whole(entry, name, None))
                continue
            number, which, found = at
            line = self.lines[number]
            index = int(found.pop(line.over)) if line.over is not None and line.over in found else 0
            groups.setdefault((number, tuple(sorted(found.items()))), {})[which, index] = entry
        for (number, found_items), members in groups.items():
            self._line(out, self.lines[number], dict(found_items), members)
        return out

    def _find(self, name: str) -> tuple[int, int, dict[str, str]] | None:
        for number, patterns in enumerate(self._patterns):
            for which, pattern in enumerate(patterns):
                match = pattern.fullmatch(name)
                if match:
                    return number, which, match.groupdict()
        return None

    def _line(
        self, out: dict[str, Mapped], line: Line, found: dict[str, str], members: dict[tuple[int, int], Entry]
    ) -> None:
        if not line.program:
            return
        if line.over is not None:
            if line.over in braces_in(line.files[0]):
                self._stacked(out, line, found, members)
            else:
                self._unstacked(out, line, found, members[0, 0])
        elif len(line.files) > 1:
            self._joined(out, line, found, members)
        elif len(line.program) > 1:
            self._split(out, line, found, members[0, 0])
        else:
            name = filled(line.program[0], found)
            self._put(out, name, _whole(members[0, 0], name, line.order))

    def _put(self, out: dict[str, Mapped], name: str, made: Mapped) -> None:
        if name in out:
            raise CheckpointError(f"map: two tensors would be called {name!r}: {made.pieces[0].name!r} is one of them")
        entry = made.entry._replace(name=name)
        if self.dtype is not None and entry.dtype.is_floating_point and entry.shape:
            entry = entry._replace(dtype=self.dtype)
        out[name] = Mapped(entry, made.pieces)

    def _joined(
        self, out: dict[str, Mapped], line: Line, found: dict[str, str], members: dict[tuple[int, int], Entry]
    ) -> None:
        missing = [filled(name, found) for i, name in enumerate(line.files) if (i, 0) not in members]
        if missing:
            raise CheckpointError(
                f"map: {missing[0]!r} is missing, which {filled(line.program[0], found)!r} is made of"
            )
        parts = [members[i, 0] for i in range(len(line.files))]
        dim = _dim(line, parts[0].name, len(parts[0].shape))
        _check_alike(parts, dim)
        at, pieces = 0, []
        for part in parts:
            offsets = tuple(at if d == dim else 0 for d in range(len(part.shape)))
            pieces.append(Piece(part.name, all_of(part.shape), None, None, None, offsets))
            at += part.shape[dim]
        shape = tuple(at if d == dim else n for d, n in enumerate(parts[0].shape))
        name = filled(line.program[0], found)
        self._put(out, name, Mapped(Entry(name, parts[0].dtype, shape), tuple(pieces)))

    def _split(self, out: dict[str, Mapped], line: Line, found: dict[str, str], whole: Entry) -> None:
        dim, shares = _dim(line, whole.name, len(whole.shape)), line.sizes or (1,) * len(line.program)
        n = whole.shape[dim]
        if n % sum(shares):
            raise CheckpointError(
                f"map: dim {dim} of {whole.name!r} has {n} indices, which shares {shares} do not divide"
            )
        at = 0
        for pattern, share in zip(line.program, shares):
            size = n // sum(shares) * share
            offsets = tuple(at if d == dim else 0 for d in range(len(whole.shape)))
            sizes = tuple(size if d == dim else m for d, m in enumerate(whole.shape))
            piece = Piece(whole.name, Tile(offsets, sizes), None, None, None, (0,) * len(sizes))
            name = filled(pattern, found)
            self._put(out, name, Mapped(Entry(name, whole.dtype, sizes), (piece,)))
            at += size

    def _stacked(
        self, out: dict[str, Mapped], line: Line, found: dict[str, str], members: dict[tuple[int, int], Entry]
    ) -> None:
        name, numbers = filled(line.program[0], found), sorted(i for _, i in members)
        if numbers != list(range(len(numbers))):
            gap = next(i for i, n in enumerate(numbers) if i != n)
            raise CheckpointError(f"map: number {gap} of {line.files[0]!r} is missing, which {name!r} is made of")
        parts = [members[0, i] for i in numbers]
        dim = _dim(line, parts[0].name, len(parts[0].shape) + 1)
        _check_alike(parts, None)
        shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])
        pieces = []
        for i, part in enumerate(parts):
            offsets = tuple(i if d == dim else 0 for d in range(len(shape)))
            pieces.append(Piece(part.name, all_of(part.shape), None, None, dim, offsets))
        self._put(out, name, Mapped(Entry(name, parts[0].dtype, shape), tuple(pieces)))

    def _unstacked(self, out: dict[str, Mapped], line: Line, found: dict[str, str], whole: Entry) -> None:
        dim = _dim(line, whole.name, len(whole.shape))
        rest = tuple(n for d, n in enumerate(whole.shape) if d != dim)
        for i in range(whole.shape[dim]):
            offsets = tuple(i if d == dim else 0 for d in range(len(whole.shape)))
            sizes = tuple(1 if d == dim else n for d, n in enumerate(whole.shape))
            piece = Piece(whole.name, Tile(offsets, sizes), dim, None, None, (0,) * len(rest))
            name = filled(line.program[0], found | {str(line.over): str(i)})
            self._put(out, name, Mapped(Entry(name, whole.dtype, rest), (piece,)))


def _dim(line: Line, name: str, ndim: int) -> int:
    """The dim of a line, counted from the beginning."""
    dim = line.dim or 0
    if not -ndim <= dim < ndim:
        raise CheckpointError(f"map: there is no dim {dim} to join, split or stack {name!r} along: {ndim} dims")
    return dim % ndim


def all_of(shape: Sequence[int]) -> Tile:
    """The tile that is a whole tensor."""
    return Tile((0,) * len(shape), tuple(shape))


def _whole(entry: Entry, name: str, order: tuple[int, ...] | None) -> Mapped:
    shape = entry.shape
    if order is not None:
        if len(order) != len(shape):
            raise CheckpointError(f"map: {entry.name!r} of shape {shape} has no dims {order} to put in order")
        shape = tuple(shape[d] for d in order)
    piece = Piece(entry.name, all_of(entry.shape), None, order, None, (0,) * len(shape))
    return Mapped(Entry(name, entry.dtype, shape), (piece,))


def _check_alike(parts: Sequence[Entry], dim: int | None) -> None:
    def kind(part: Entry) -> tuple[torch.dtype, list[int]]:
        return part.dtype, [n for d, n in enumerate(part.shape) if d != dim]

    for part in parts:
        if kind(part) != kind(parts[0]) or (dim is not None and dim >= len(part.shape)):
            raise CheckpointError(
                f"map: {parts[0].name!r} ({parts[0].dtype}, {parts[0].shape}) and {part.name!r} ({part.dtype}, "
                f"{part.shape}) cannot be one tensor"
            )
