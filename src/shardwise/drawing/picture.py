"""What a picture is made of: panels (2-D slices of a tensor, or of a mesh) with boxes in them."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.drawing.words import rank_names

Range = tuple[int, int]


@dataclass(frozen=True)
class Box:
    """A rectangle of indices and who holds it.

    Attributes:
        rows, columns: Its indices, the last not included.
        ranks: The first of its holders; nobody where it stands for boxes that are not shown.
        count: How many holders there are.
        note: What else is to be said of it.
        is_pending: Whether its holders hold parts of a value that is not reduced yet.
    """

    rows: Range
    columns: Range
    ranks: tuple[int, ...]
    count: int
    note: str = ""
    is_pending: bool = False

    @property
    def is_gap(self) -> bool:
        return not self.count

    @property
    def label(self) -> str:
        """Its holders, in few letters."""
        if self.is_gap:
            return self.note
        shown = ", ".join(map(str, self.ranks[:4])) + (f" ...({self.count})" if self.count > 4 else "")
        return f"Σ {shown}" if self.is_pending else shown

    @property
    def words(self) -> str:
        """Its holders, in words."""
        if self.is_gap:
            return self.note
        return rank_names(self.ranks, self.count)


@dataclass(frozen=True)
class Panel:
    """Boxes in a plane. `rows_name` and `columns_name` say what the indices are of; empty where there is one row."""

    boxes: Sequence[Box]
    title: str = ""
    rows_name: str = "Row"
    columns_name: str = "Col"

    def rows(self) -> list[Range]:
        """The stripes between the edges of boxes, from above."""
        return _stripes([box.rows for box in self.boxes])

    def columns(self) -> list[Range]:
        """The same from the left."""
        return _stripes([box.columns for box in self.boxes])

    def cells(self) -> list[list[Box | None]]:
        """For each row stripe and column stripe, the box that covers it."""
        rows, columns = self.rows(), self.columns()
        row_at = {r[0]: i for i, r in enumerate(rows)}
        column_at = {c[0]: i for i, c in enumerate(columns)}
        out: list[list[Box | None]] = [[None] * len(columns) for _ in rows]
        for box in self.boxes:
            for i in range(row_at[box.rows[0]], len(rows)):
                if rows[i][0] >= box.rows[1]:
                    break
                for j in range(column_at[box.columns[0]], len(columns)):
                    if columns[j][0] >= box.columns[1]:
                        break
                    out[i][j] = box
        return out


@dataclass(frozen=True)
class Picture:
    """Panels with a title above and notes below."""

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = field(default_factory=tuple)


def _stripes(ranges: Sequence[Range]) -> list[Range]:
    edges = sorted({edge for r in ranges for edge in r})
    inside = [False] * len(edges)
    at = {edge: i for i, edge in enumerate(edges)}
    for start, stop in ranges:
        for i in range(at[start], at[stop]):
            inside[i] = True
    return [(edges[i], edges[i + 1]) for i in range(len(edges) - 1) if inside[i]]


def shown_of(count: int, most: int) -> list[int | None]:
    """Which of so many things are shown: all, or the first and the last with None between them.

    >>> shown_of(3, 5), shown_of(100, 5)
    ([0, 1, 2], [0, 1, 2, None, 99])
    """
    if count <= most:
        return list(range(count))
    last = max(1, most // 4)
    first = most - last - 1
    return [*range(first), None, *range(count - last, count)]


def colour_of(rank: int) -> tuple[int, int, int]:
    """The colour of a rank: red, green, blue, each below 256. Neighbours differ."""
    red, green, blue = colorsys.hls_to_rgb((rank * 0.381966 + 0.58) % 1.0, 0.55, 0.62)
    return round(red * 255), round(green * 255), round(blue * 255)


def hex_of(rank: int) -> str:
    """The colour of a rank as HTML and rich write it."""
    red, green, blue = colour_of(rank)
    return f"#{red:02x}{green:02x}{blue:02x}"
