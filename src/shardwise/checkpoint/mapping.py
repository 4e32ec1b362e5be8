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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from shardwise.checkpoint.blocks import Block, meet
from shardwise.checkpoint.files import Entry
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.storage import StorageLine
from shardwise.checkpoint.tree import flat_tree
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


@dataclass(frozen=True)
class Line:
    """One line of a table; the functions below make them."""

    files: tuple[str, ...]
    program: tuple[str, ...]  # none: dropped
    dim: int | None = None  # along which the several are joined or stacked
    sizes: tuple[int, ...] | None = None  # their shares of the dim; equal without
    over: str | None = None  # what is stacked: a name in braces
    order: tuple[int, ...] | None = None

    def inverse(self) -> Line:
        back = None if self.order is None else tuple(self.order.index(d) for d in range(len(self.order)))
        return replace(self, files=self.program, program=self.files, order=back)


def rename(files: str, program: str) -> Line:
    """Return the line of a tensor of another name.

    Args:
        files: Its name in the files; `{layer}` and the like stand for whatever is there.
        program: Its name in the program, with the same names in braces.

    Raises:
        CheckpointError: The names do not fit each other.
    """
    return _checked(Line((files,), (program,)))


def transpose(files: str, program: str | None = None, order: Sequence[int] = (1, 0)) -> Line:
    """Return the line of a tensor whose dims come in another order.

    Args:
        files: Its name in the files.
        program: Its name in the program; by default the same.
        order: Which dim of the tensor in the files each dim is; by default a matrix is transposed.

    Raises:
        CheckpointError: `order` is no order of dims, or the names do not fit each other.
    """
    if not _are(int, order) or sorted(order) != list(range(len(order))):
        raise CheckpointError(f"transpose: order = {order!r} is no order of dims, as (1, 0) is")
    return _checked(Line((files,), (files if program is None else program,), order=tuple(order)))


def join(files: Sequence[str], program: str, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Line:
    """Return the line of several tensors of the files that are one of the program.

    Args:
        files: Their names in the files, in order.
        program: The name in the program.
        dim: The dim along which they come one after the other.
        sizes: Their shares of the dim, which the way back needs where they differ.

    Raises:
        CheckpointError: There are no names, or not as many sizes as names.
    """
    if not _are(str, files) or not files:
        raise CheckpointError(f"map: {files!r} must be a list of names, of the tensors that are joined")
    if sizes is not None and (not _are(int, sizes) or len(sizes) != len(files) or min(sizes) < 1):
        raise CheckpointError(f"join: sizes = {sizes!r} for {len(files)} tensors; give a share >= 1 for each")
    return _checked(Line(tuple(files), (program,), dim, None if sizes is None else tuple(sizes)))


def split(files: str, program: Sequence[str], *, dim: int = 0, sizes: Sequence[int] | None = None) -> Line:
    """Return the line of one tensor of the files that is several of the program.

    Args:
        files: The name in the files.
        program: Their names in the program, in order.
        dim: The dim that is split.
        sizes: Their shares of the dim; equal without.

    Raises:
        CheckpointError: There are no names, or not as many sizes as names.
    """
    return join(program, files, dim=dim, sizes=sizes).inverse()


def stack(files: str, program: str, *, over: str, dim: int = 0) -> Line:
    """Return the line of numbered tensors of the files that are one tensor of the program.

    Args:
        files: Their names in the files, with the number in braces.
        program: The name in the program.
        over: What the number is called in the braces.
        dim: The new dim, whose indices they are.

    Raises:
        CheckpointError: The names do not fit each other.
    """
    return _checked(Line((files,), (program,), dim, over=over))


def drop(files: str) -> Line:
    """Return the line of tensors of the files that the program does not have. The way back leaves them out.

    Args:
        files: Their names in the files.
    """
    return Line((files,), ())


def _are(kind: type, values: object) -> bool:
    """Whether they are several of a kind, in a list or a tuple."""
    return isinstance(values, (list, tuple)) and all(type(value) is kind for value in values)


def _checked(line: Line) -> Line:
    if not _are(str, (*line.files, *line.program)):
        raise CheckpointError(f"map: {line.files} -> {line.program} must be names of tensors")
    for name in (*line.files, *line.program):
        braces = set(_braces(name)) | ({line.over} if line.over else set())
        if braces != set(_braces(line.files[0])) | set(_braces(line.program[0])):
            raise CheckpointError(f"map: {name!r} must have the same names in braces as {line.files[0]!r} in its line")
    if line.over is not None and not (line.over in _braces(line.files[0])) ^ (line.over in _braces(line.program[0])):
        raise CheckpointError(f"stack: over = {line.over!r} must stand in braces on the side of many tensors")
    return line


def _braces(pattern: str) -> list[str]:
    return [name.rstrip("*") for name in re.findall(r"\{(\w+\*?)\}", pattern)]


def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+\*?\})", pattern)
    text = ""
    for part in parts:
        if not part.startswith("{"):
            text += re.escape(part)
        else:
            name = part[1:-1]
            text += f"(?P<{name.rstrip('*')}>.*)" if name.endswith("*") else f"(?P<{name}>[^.]+)"
    return re.compile(text)


def _filled(pattern: str, found: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\*?\}", lambda m: found[m[1]], pattern)


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
        self._patterns = [[_regex(name) for name in line.files] for line in self.lines]

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
            if line.over in _braces(line.files[0]):
                self._stacked(out, line, found, members)
            else:
                self._unstacked(out, line, found, members[0, 0])
        elif len(line.files) > 1:
            self._joined(out, line, found, members)
        elif len(line.program) > 1:
            self._split(out, line, found, members[0, 0])
        else:
            name = _filled(line.program[0], found)
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
        missing = [_filled(name, found) for i, name in enumerate(line.files) if (i, 0) not in members]
        if missing:
            raise CheckpointError(
                f"map: {missing[0]!r} is missing, which {_filled(line.program[0], found)!r} is made of"
            )
        parts = [members[i, 0] for i in range(len(line.files))]
        dim = _dim(line, parts[0].name, len(parts[0].shape))
        _check_alike(parts, dim)
        at, pieces = 0, []
        for part in parts:
            offsets = tuple(at if d == dim else 0 for d in range(len(part.shape)))
            pieces.append(Piece(part.name, _all_of(part.shape), None, None, None, offsets))
            at += part.shape[dim]
        shape = tuple(at if d == dim else n for d, n in enumerate(parts[0].shape))
        name = _filled(line.program[0], found)
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
            name = _filled(pattern, found)
            self._put(out, name, Mapped(Entry(name, whole.dtype, sizes), (piece,)))
            at += size

    def _stacked(
        self, out: dict[str, Mapped], line: Line, found: dict[str, str], members: dict[tuple[int, int], Entry]
    ) -> None:
        name, numbers = _filled(line.program[0], found), sorted(i for _, i in members)
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
            pieces.append(Piece(part.name, _all_of(part.shape), None, None, dim, offsets))
        self._put(out, name, Mapped(Entry(name, parts[0].dtype, shape), tuple(pieces)))

    def _unstacked(self, out: dict[str, Mapped], line: Line, found: dict[str, str], whole: Entry) -> None:
        dim = _dim(line, whole.name, len(whole.shape))
        rest = tuple(n for d, n in enumerate(whole.shape) if d != dim)
        for i in range(whole.shape[dim]):
            offsets = tuple(i if d == dim else 0 for d in range(len(whole.shape)))
            sizes = tuple(1 if d == dim else n for d, n in enumerate(whole.shape))
            piece = Piece(whole.name, Tile(offsets, sizes), dim, None, None, (0,) * len(rest))
            name = _filled(line.program[0], found | {str(line.over): str(i)})
            self._put(out, name, Mapped(Entry(name, whole.dtype, rest), (piece,)))


def _dim(line: Line, name: str, ndim: int) -> int:
    """The dim of a line, counted from the beginning."""
    dim = line.dim or 0
    if not -ndim <= dim < ndim:
        raise CheckpointError(f"map: there is no dim {dim} to join, split or stack {name!r} along: {ndim} dims")
    return dim % ndim


def _all_of(shape: Sequence[int]) -> Tile:
    return Tile((0,) * len(shape), tuple(shape))


def _whole(entry: Entry, name: str, order: tuple[int, ...] | None) -> Mapped:
    shape = entry.shape
    if order is not None:
        if len(order) != len(shape):
            raise CheckpointError(f"map: {entry.name!r} of shape {shape} has no dims {order} to put in order")
        shape = tuple(shape[d] for d in order)
    piece = Piece(entry.name, _all_of(entry.shape), None, order, None, (0,) * len(shape))
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


class MappedSource(Source):
    """A source as a table says it: its tensors are those of the program."""

    def __init__(self, inner: Source, table: Map) -> None:
        self.inner, self.path, self.step, self.random = inner, inner.path, inner.step, inner.random
        self.dtype = table.dtype
        self.mapped = table.apply(inner.entries)
        self.entries = {name: made.entry for name, made in self.mapped.items()}
        same = self.entries.keys() == inner.entries.keys()
        self.tree = inner.tree if same else flat_tree(list(self.entries), inner.values)
        self._found: dict[str, list[tuple[Piece, int, Block]]] = {}

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self.inner.bytes_read

    def _parts(self, name: str) -> list[tuple[Piece, int, Block]]:
        """The blocks of files that a tensor is made of, with their tiles in it."""
        if name not in self._found:
            found = []
            for piece in self.mapped[name].pieces:
                for i, block in enumerate(self.inner.blocks(piece.name)):
                    part = meet(block.tile, piece.box)
                    if part is not None:
                        found.append((piece, i, Block(piece.tile(part), block.start, block.stop)))
            self._found[name] = found
        return self._found[name]

    def blocks(self, name: str) -> Sequence[Block]:
        return [block for _, _, block in self._parts(name)]

    def order(self, name: str) -> tuple[str, int]:
        return self.inner.order(self.mapped[name].pieces[0].name)

    def reads_in_place(self, name: str) -> bool:
        entry, pieces = self.mapped[name]
        piece, inner = pieces[0], self.inner.entries[pieces[0].name]
        as_it_is = piece[2:5] == (None, None, None) and piece.box == _all_of(inner.shape)
        return len(pieces) == 1 and as_it_is and entry.dtype == inner.dtype and self.inner.reads_in_place(piece.name)

    def cast(self, name: str, dtype: torch.dtype) -> bool:
        entry = self.entries[name]
        if dtype != self.dtype or entry.shape or not entry.dtype.is_floating_point:
            return False
        self.entries[name] = entry._replace(dtype=dtype)
        self.mapped[name] = self.mapped[name]._replace(entry=self.entries[name])
        return True

    def checksum(self, name: str, i: int) -> int | None:
        piece, number, _ = self._parts(name)[i]
        return self.inner.checksum(piece.name, number) if self.reads_in_place(name) else None

    def expect(self, name: str, first: int, count: int) -> None:
        for piece, number, _ in self._parts(name)[first : first + count]:
            self.inner.expect(piece.name, number, 1)

    def line(self) -> StorageLine:
        return self.inner.line()

    def read_block(self, name: str, i: int, room: torch.Tensor) -> torch.Tensor:
        piece, number, _ = self._parts(name)[i]
        values, tile = self.inner.read_block(piece.name, number, room), self.inner.blocks(piece.name)[number].tile
        part = meet(tile, piece.box)
        assert part is not None
        for dim, (a, b, n) in enumerate(zip(tile.offsets, part.offsets, part.sizes, strict=True)):
            values = values.narrow(dim, b - a, n)
        return piece.value(values).to(self.entries[name].dtype)

    def read_run(self, name: str, first: int, count: int, room: torch.Tensor) -> None:
        self.inner.read_run(self.mapped[name].pieces[0].name, first, count, room)

    def close(self) -> None:
        self.inner.close()
