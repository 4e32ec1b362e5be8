"""Tiles: boxes of global indices. A single one, many as arrays, and which of many meet, overlap or leave a hole.

Pure integers, by sweeps: thousands of tiles cost milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Tile(NamedTuple):
    """A box of global indices that one rank holds."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


TileLike = tuple[Sequence[int], Sequence[int]]  # a Tile, or its offsets and sizes in other sequences


class Tiles(NamedTuple):
    """Many tiles: row i is the tile from starts[i] up to, not including, ends[i]."""

    starts: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(tiles: Iterable[TileLike], ndim: int | None = None) -> Tiles:
        tiles = list(tiles)
        width = ndim if ndim is not None else len(tiles[0][0]) if tiles else 0
        starts = np.array([b[0] for b in tiles], dtype=np.int64).reshape(len(tiles), width)
        return Tiles(starts, starts + np.array([b[1] for b in tiles], dtype=np.int64).reshape(len(tiles), width))

    @property
    def volumes(self) -> np.ndarray:
        return (self.ends - self.starts).clip(min=0).prod(axis=1)

    def take(self, rows: Any) -> Tiles:
        return Tiles(self.starts[rows], self.ends[rows])

    def meet(self, other: Tiles) -> Tiles:
        """The intersections, row by row."""
        return Tiles(np.maximum(self.starts, other.starts), np.minimum(self.ends, other.ends))

    def __len__(self) -> int:
        return len(self.starts)


def as_tuples(rows: np.ndarray) -> list[tuple[int, ...]]:
    """The rows of an array as tuples, without a temporary list per row."""
    return list(zip(*rows.T.tolist())) if rows.shape[1] else [()] * len(rows)


def expand(counts: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row i the numbers first[i], first[i] + 1, ... (counts[i] of them): the rows, and the numbers."""
    rows = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return rows, np.arange(len(rows)) - np.repeat(before - first, counts)


def meetings(one: Tiles, other: Tiles) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of all pairs of tiles that share an element."""
    found = list(_meetings(one, other))
    if len(found) == 1:
        return found[0]
    nothing = np.zeros(0, dtype=np.int64)
    return tuple(np.concatenate([nothing, *(pair[i] for pair in found)]) for i in (0, 1))  # type: ignore[return-value]


_FEW = 4_000  # pairs: to look at all of them is quicker than to lay a grid
_MOST_AT_ONCE = 4_000_000  # candidate pairs, so that tiles that all overlap do not fill the memory


def _meetings(one: Tiles, other: Tiles) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Lay a coarse grid over the tiles, about one tile per cell, and compare the tiles that reach into the same cell. A
    pair is counted in the cell of its first common element only, so that it is found once."""
    if len(one) * len(other) <= _FEW:
        low, high = np.maximum(one.starts[:, None], other.starts), np.minimum(one.ends[:, None], other.ends)
        i, j = np.nonzero((low < high).all(axis=2))
        yield i, j
        return
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


def _grid(one: Tiles, other: Tiles) -> list[np.ndarray]:
    """The lines of the grid in each dim, at places where many tiles start; about as many cells as tiles."""
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


def _in_cells(tiles: Tiles, lines: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every cell a tile reaches into: the tile's number, the cell's number; and each tile's first cell per dim."""
    rows = np.nonzero(tiles.volumes)[0]
    cells = np.zeros(len(rows), dtype=np.int64)
    low = np.empty(tiles.starts.shape, dtype=np.int64)
    for dim, line in enumerate(lines):
        low[:, dim] = np.searchsorted(line, tiles.starts[:, dim], side="right") - 1
        high = np.searchsorted(line, tiles.ends[:, dim], side="left") - 1
        at, number = expand((high - low[:, dim])[rows] + 1, low[rows, dim])
        rows, cells = rows[at], cells[at] * len(line) + number
    return rows, cells, low


def _cell_number(low: np.ndarray, lines: list[np.ndarray]) -> np.ndarray:
    number = np.zeros(len(low), dtype=np.int64)
    for dim, line in enumerate(lines):
        number = number * len(line) + low[:, dim]
    return number


def first_overlap(tiles: Tiles) -> tuple[int, int] | None:
    """Two of the tiles that share an element, if any do."""
    if _neighbours_alone(tiles):
        return None
    twins = _first_twins(tiles)
    if twins is not None:
        return twins
    for one, other in _meetings(tiles, tiles):
        clash = np.nonzero(one < other)[0]
        if len(clash):
            return int(one[clash[0]]), int(other[clash[0]])
    return None


def _first_twins(tiles: Tiles) -> tuple[int, int] | None:
    """Two equal tiles: many of them would meet in far too many pairs."""
    full = np.nonzero(tiles.volumes)[0]
    columns = np.concatenate([tiles.starts, tiles.ends], axis=1)[full]
    order = np.lexsort(columns.T)
    same = np.nonzero((columns[order[1:]] == columns[order[:-1]]).all(axis=1))[0]
    if not len(same):
        return None
    one, other = sorted(full[order[same[0] : same[0] + 2]].tolist())
    return one, other


def _neighbours_alone(tiles: Tiles) -> bool:
    """A quick check: True where the tiles follow each other in some dim, so that none overlap."""
    full = tiles.take(tiles.volumes > 0)
    for dim in range(tiles.starts.shape[1]):
        order = np.argsort(full.starts[:, dim], kind="stable")
        if (full.ends[order, dim][:-1] <= full.starts[order, dim][1:]).all():
            return True
    return len(full) < 2


def first_hole(tiles: Tiles, shape: Sequence[int]) -> TileLike | None:
    """A tile of the shape that none of the (disjoint) tiles covers, if there is one."""
    whole = int(np.prod(shape, dtype=np.int64))
    if int(tiles.volumes.sum()) == whole:
        return None
    if not len(shape):
        return (), ()
    full = tiles.take(tiles.volumes > 0)
    cuts = np.unique(np.concatenate([full.starts[:, 0], full.ends[:, 0], [0, shape[0]]]))
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist()):
        here = full.take((full.starts[:, 0] <= low) & (full.ends[:, 0] >= high))
        hole = first_hole(Tiles(here.starts[:, 1:], here.ends[:, 1:]), shape[1:])
        if hole is not None:
            return (low, *hole[0]), (high - low, *hole[1])
    return None


def cells_of(tiles: Tiles) -> Tiles:
    """The tiles cut along every edge of the tiles they overlap with; each cell once."""
    one, other = meetings(tiles, tiles)
    out: set[tuple[tuple[int, int], ...]] = set()
    for i in range(len(tiles)):
        near = tiles.take(other[one == i])
        sides = []
        for dim, (low, high) in enumerate(zip(tiles.starts[i].tolist(), tiles.ends[i].tolist())):
            cuts = {low, high, *near.starts[:, dim].tolist(), *near.ends[:, dim].tolist()}
            inside = sorted(c for c in cuts if low <= c <= high)
            sides.append(list(zip(inside[:-1], inside[1:])))
        grid: list[tuple[tuple[int, int], ...]] = [()]
        for side in sides:
            grid = [(*cell, interval) for cell in grid for interval in side]
        out.update(grid)
    cells = Tiles.of([(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in sorted(out)])
    return cells if first_overlap(cells) is None else cells_of(cells)  # neighbours may have cut one place differently
