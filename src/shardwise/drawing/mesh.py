"""The picture of a mesh: its ranks at their coordinates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from shardwise.drawing.picture import Box, Panel, Picture, shown_of

_MOST_STRIPES = 12
_MOST_PANELS = 6


def mesh_picture(title: str, shape: Sequence[int], names: Sequence[str], ranks: Sequence[int]) -> Picture:
    """The ranks of a mesh (the last axis fastest): the last two axes as rows and columns, the others as panels."""
    outer, rows = shape[:-2], shape[-2] if len(shape) > 1 else 1
    columns, panels = shape[-1], []
    for number, coords in enumerate(itertools.product(*map(range, outer))):
        if number >= _MOST_PANELS:
            break
        boxes = [
            _box(row, column, ranks, (number * rows, rows, columns))
            for row in shown_of(rows, _MOST_STRIPES)
            for column in shown_of(columns, _MOST_STRIPES)
        ]
        where = ", ".join(f"{name}={c}" for name, c in zip(names, coords, strict=False))
        panels.append(Panel(boxes, where, _name(names[-2], "Row") if len(shape) > 1 else "", _name(names[-1], "Col")))
    left_out = math.prod(outer) - len(panels)
    return Picture(title, panels, (f"... and {left_out:,} more slices",) if left_out else ())


def _name(axis: str, side: str) -> str:
    """What coordinates stand behind: the name of their axis, if it has more than a number."""
    return side if axis.isdigit() else axis


def _box(row: int | None, column: int | None, ranks: Sequence[int], place: tuple[int, int, int]) -> Box:
    first_row, rows, columns = place
    across, down = _side(row, rows), _side(column, columns)
    if row is None or column is None:
        return Box(across, down, (), 0, "...")
    return Box(across, down, (ranks[(first_row + row) * columns + column],), 1)


def _side(index: int | None, count: int) -> tuple[int, int]:
    if index is not None:
        return index, index + 1
    last = max(1, _MOST_STRIPES // 4)
    return _MOST_STRIPES - last - 1, count - last
