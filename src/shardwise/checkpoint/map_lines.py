"""The lines of a `Map`: each says how tensors of files are tensors of a program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import CheckpointError


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
    """Whether `values` is a list or a tuple of objects of this type."""
    return isinstance(values, (list, tuple)) and all(type(value) is kind for value in values)


def _checked(line: Line) -> Line:
    if not _are(str, (*line.files, *line.program)):
        raise CheckpointError(f"map: {line.files} -> {line.program} must be names of tensors")
    for name in (*line.files, *line.program):
        braces = set(braces_in(name)) | ({line.over} if line.over else set())
        if braces != set(braces_in(line.files[0])) | set(braces_in(line.program[0])):
            raise CheckpointError(f"map: {name!r} must have the same names in braces as {line.files[0]!r} in its line")
    sides = [line.over in braces_in(names[0]) for names in (line.files, line.program)]
    if line.over is not None and sum(sides) != 1:
        raise CheckpointError(f"stack: over = {line.over!r} must stand in braces on the side of many tensors")
    return line


# -- patterns: names with braces in them ---------------------------------------------------------------------
def braces_in(pattern: str) -> list[str]:
    """What stands in the braces of a pattern, without stars."""
    return [name.rstrip("*") for name in re.findall(r"\{(\w+\*?)\}", pattern)]


def regex_of(pattern: str) -> re.Pattern[str]:
    """A regular expression for the names that fit a pattern; its groups are called as the braces are."""
    parts = re.split(r"(\{\w+\*?\})", pattern)
    text = ""
    for part in parts:
        if not part.startswith("{"):
            text += re.escape(part)
        else:
            name = part[1:-1]
            text += f"(?P<{name.rstrip('*')}>.*)" if name.endswith("*") else f"(?P<{name}>[^.]+)"
    return re.compile(text)


def filled(pattern: str, found: Mapping[str, str]) -> str:
    """The name that a pattern gives with these texts in its braces."""
    return re.sub(r"\{(\w+)\*?\}", lambda m: found[m[1]], pattern)
