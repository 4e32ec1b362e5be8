"""Many boxes of global indices as arrays: which of them meet, overlap, or leave a hole. Pure integers, by sweeps.

Thousands of boxes cost milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


class Boxes(NamedTuple):
    """Many boxes: row i is the box from starts[i] up to, not including, ends[i]."""

    starts: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(boxes: Iterable[Box], ndim: int | None = None) -> Boxes:
        boxes = list(boxes)
        width = ndim if ndim is not None else len(boxes[0][0]) if boxes else 0
        starts = np.array([b[0] for b in boxes], dtype=np.int64).reshape(len(boxes), width)
        return Boxes(starts, starts + np.array([b[1] for b in boxes], dtype=np.int64).reshape(len(boxes), width))

    @property
    def volumes(self) -> np.ndarray:
        return (self.ends - self.starts).clip(min=0).prod(axis=1)

    def take(self, rows: Any) -> Boxes:
        return Boxes(self.starts[rows], self.ends[rows])

    def meet(self, other: Boxes) -> Boxes:
        """Row by row, what both share."""
        return Boxes(np.maximum(self.starts, other.starts), np.minimum(self.ends, other.ends))

    def __len__(self) -> int:
        return len(self.starts)


def expand(counts: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row i the numbers first[i], first[i] + 1, ... (counts[i] of them): the rows, and the numbers."""
    rows = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return rows, np.arange(len(rows)) - np.repeat(before - first, counts)


def meetings(one: Boxes, other: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of all pairs of boxes that share an element."""
    found = list(_meetings(one, other))
    if len(found) == 1:
        return found[0]
    nothing = np.zeros(0, dtype=np.int64)
    return tuple(np.concatenate([nothing, *(pair[i] for pair in found)]) for i in (0, 1))  # type: ignore[return-value]


_MOST_AT_ONCE = 4_000_000  # candidate pairs, so that boxes that all overlap do not fill the memory


def _meetings(one: Boxes, other: Boxes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A coarse grid is laid over the boxes, about one box a cell; boxes are compared where they are in the same cell.
    A pair counts in the cell of the first element both have, so it is found once."""
    lines = _grid(one, other)
    row, cell, low = _in_cells(one, lines)
    other_row, other_cell, other_low = _in_cells(other, lines)
    order = np.argsort(other_cell, kind="stable")
    other_row, sorted_cell = other_row[order], other_cell[order]
    first = np.searchsorted(sorted_cell, cell, side="left")
    counts = np.searchsorted(sorted_cell, cell, side="right") - first
    blocks = np.cumsum(counts) // _MOST_AT_ONCE
    for block in np.unique(blocks):
        here = np.nonzero(blocks == block)[0]
        at, place = expand(counts[here], first[here])
        at = here[at]
        i, j = row[at], other_row[place]
        shared = np.maximum(low[i], other_low[j])
        meet = cell[at] == shared[:, -1] if shared.shape[1] == 1 else cell[at] == _cell_number(shared, lines)
        i, j = i[meet], j[meet]
        both = (np.maximum(one.starts[i], other.starts[j]) < np.minimum(one.ends[i], other.ends[j])).all(axis=1)
        yield i[both], j[both]


def _grid(one: Boxes, other: Boxes) -> list[np.ndarray]:
    """The lines of the grid in each dim, where many boxes start; as many cells as boxes, about."""
    starts = np.concatenate([one.starts, other.starts])
    distinct = [np.unique(starts[:, dim]) for dim in range(starts.shape[1])]
    lines, budget = list(distinct), max(len(one), len(other), 1)
    for done, dim in enumerate(sorted(range(len(distinct)), key=lambda d: len(distinct[d]))):
        most = max(1, math.ceil(budget ** (1 / (len(distinct) - done))))
        if len(distinct[dim]) > most:
            column = np.sort(starts[:, dim])
            lines[dim] = np.unique(column[np.arange(most) * len(column) // most])
        budget = max(1, budget // max(1, len(lines[dim])))
    return lines


def _in_cells(boxes: Boxes, lines: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every cell a box reaches into: the box's number, the cell's number; and for each box its first cell a dim."""
    rows = np.nonzero(boxes.volumes)[0]
    cells = np.zeros(len(rows), dtype=np.int64)
    low = np.empty(boxes.starts.shape, dtype=np.int64)
    for dim, line in enumerate(lines):
        low[:, dim] = np.searchsorted(line, boxes.starts[:, dim], side="right") - 1
        high = np.searchsorted(line, boxes.ends[:, dim], side="left") - 1
        at, number = expand((high - low[:, dim])[rows] + 1, low[rows, dim])
        rows, cells = rows[at], cells[at] * len(line) + number
    return rows, cells, low


def _cell_number(low: np.ndarray, lines: list[np.ndarray]) -> np.ndarray:
    number = np.zeros(len(low), dtype=np.int64)
    for dim, line in enumerate(lines):
        number = number * len(line) + low[:, dim]
    return number


def first_overlap(boxes: Boxes) -> tuple[int, int] | None:
    """Two of the boxes that share an element, if any do."""
    if _neighbours_alone(boxes):
        return None
    twins = _first_twins(boxes)
    if twins is not None:
        return twins
    for one, other in _meetings(boxes, boxes):
        clash = np.nonzero(one < other)[0]
        if len(clash):
            return int(one[clash[0]]), int(other[clash[0]])
    return None


def _first_twins(boxes: Boxes) -> tuple[int, int] | None:
    """Two equal boxes: many of them would meet in far too many pairs."""
    full = np.nonzero(boxes.volumes)[0]
    columns = np.concatenate([boxes.starts, boxes.ends], axis=1)[full]
    order = np.lexsort(columns.T)
    same = np.nonzero((columns[order[1:]] == columns[order[:-1]]).all(axis=1))[0]
    if not len(same):
        return None
    one, other = sorted(full[order[same[0] : same[0] + 2]].tolist())
    return one, other


def _neighbours_alone(boxes: Boxes) -> bool:
    """A quick yes where the boxes follow each other in some dim."""
    full = boxes.take(boxes.volumes > 0)
    for dim in range(boxes.starts.shape[1]):
        order = np.argsort(full.starts[:, dim], kind="stable")
        if (full.ends[order, dim][:-1] <= full.starts[order, dim][1:]).all():
            return True
    return len(full) < 2


def first_hole(boxes: Boxes, shape: Sequence[int]) -> Box | None:
    """A box of the shape that none of the (disjoint) boxes covers, if there is one."""
    whole = int(np.prod(shape, dtype=np.int64))
    if int(boxes.volumes.sum()) == whole:
        return None
    if not len(shape):
        return (), ()
    full = boxes.take(boxes.volumes > 0)
    cuts = np.unique(np.concatenate([full.starts[:, 0], full.ends[:, 0], [0, shape[0]]]))
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist()):
        here = full.take((full.starts[:, 0] <= low) & (full.ends[:, 0] >= high))
        hole = first_hole(Boxes(here.starts[:, 1:], here.ends[:, 1:]), shape[1:])
        if hole is not None:
            return (low, *hole[0]), (high - low, *hole[1])
    return None


def cells_of(boxes: Boxes) -> Boxes:
    """The boxes cut along every edge of the boxes they overlap with; each cell once."""
    one, other = meetings(boxes, boxes)
    out: set[tuple[tuple[int, int], ...]] = set()
    for i in range(len(boxes)):
        near = boxes.take(other[one == i])
        sides = []
        for dim, (low, high) in enumerate(zip(boxes.starts[i].tolist(), boxes.ends[i].tolist())):
            cuts = {low, high, *near.starts[:, dim].tolist(), *near.ends[:, dim].tolist()}
            inside = sorted(c for c in cuts if low <= c <= high)
            sides.append(list(zip(inside[:-1], inside[1:])))
        grid: list[tuple[tuple[int, int], ...]] = [()]
        for side in sides:
            grid = [(*cell, interval) for cell in grid for interval in side]
        out.update(grid)
    return _without_coarser(Boxes.of([(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in sorted(out)]))


def _without_coarser(cells: Boxes) -> Boxes:
    """Neighbours cut the same place differently fine: go on until no two cells overlap."""
    return cells if first_overlap(cells) is None else cells_of(cells)
