"""The picture of a layout: one box for each rectangle of indices, with the ranks that hold it.

The work grows with what is shown, not with the ranks there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from shardwise.drawing import Box, Panel, Picture, figure, markup
from shardwise.drawing.picture import Range, shown_of
from shardwise.layout.holders import Spot, holders_of
from shardwise.layout.layout import Layout

_MOST_STRIPES = 12  # of one dim
_MOST_PANELS = 6
_MOST_RANKS = 6  # that are listed for a box

Stripe = tuple[Range, Spot | None, str]  # indices, where its holders stand (None: several are left out), a note


def picture_of(layout: Layout, title: str | None = None) -> Picture:
    """The picture of a layout.

    Args:
        layout: The layout.
        title: What stands above; by default shape, placements and mesh.
    """
    if title is None:
        places = ", ".join(said if len(said) < 80 else f"{said[:70]}...)" for said in map(str, layout.placements))
        title = f"shape {layout.shape}, placements [{places}], {layout.mesh!r}"
    if 0 in layout.shape:
        return Picture(title, (), ("no elements",))
    stripes = [_stripes(layout, dim) for dim in range(layout.ndim)]
    outer, inner = stripes[:-2], stripes[-2:]
    panels, left_out = [], 0
    combinations = math.prod(len(found) for found in outer)
    for number, chosen in enumerate(itertools.product(*outer)):
        if number >= _MOST_PANELS:
            left_out = combinations - number
            break
        panels.append(_panel(layout, chosen, inner))
    notes = [f"... and {left_out:,} more slices"] if left_out else []
    return Picture(title, panels, (*notes, *_notes(layout)))


def _stripes(layout: Layout, dim: int) -> list[Stripe]:
    """The runs of indices of a dim, each with the coordinates of those who hold it."""
    n = layout.shape[dim]
    found = [(run, spot) for spot, held in holders_of(layout, dim, ((0, n),), {}) for run in held]
    found.sort(key=lambda pair: pair[0])
    out: list[Stripe] = []
    for i in shown_of(len(found), _MOST_STRIPES):
        if i is not None:
            out.append((found[i][0], found[i][1], ""))
        else:
            last = len(found) - max(1, _MOST_STRIPES // 4)
            out.append(((out[-1][0][1], found[last][0][0]), None, f"... {last - len(out):,} more"))
    return out


def _panel(layout: Layout, chosen: Sequence[Stripe], inner: Sequence[Sequence[Stripe]]) -> Panel:
    one: list[Stripe] = [((0, 1), (), "")]
    columns = inner[-1] if inner else one
    rows = inner[0] if len(inner) == 2 else one
    boxes = [_box(layout, chosen, row, column) for row, column in itertools.product(rows, columns)]
    title = ""
    if chosen:
        sides = [f"{start}:{stop}" for (start, stop), _, _ in chosen]
        title = f"[{', '.join(sides)}, :, :]"
    names = ("Row", "Col") if layout.ndim >= 2 else ("", "Row" if layout.ndim else "value")
    return Panel(boxes, title, *names)


def _box(layout: Layout, outer: Sequence[Stripe], row: Stripe, column: Stripe) -> Box:
    stripes = [*outer, row, column]
    if any(spot is None for _, spot, _ in stripes):
        return Box(row[0], column[0], (), 0, next(note for _, spot, note in stripes if spot is None))
    fixed = {axis: coord for _, spot, _ in stripes for axis, coord in spot or ()}
    mesh = layout.mesh
    free = [axis for axis in range(len(mesh.shape)) if axis not in fixed]
    count = math.prod(mesh.shape[axis] for axis in free)
    ranks = []
    for coords in itertools.islice(itertools.product(*(range(mesh.shape[a]) for a in free)), _MOST_RANKS):
        at = fixed | dict(zip(free, coords, strict=True))
        index = 0
        for axis, k in enumerate(mesh.shape):
            index = index * k + at[axis]
        ranks.append(mesh.ranks[index])
    parts = math.prod(mesh.shape[a] for a in free if layout.placements[a].is_partial())
    note = f"each holds one of {parts} parts of it" if parts > 1 else ""
    return Box(row[0], column[0], tuple(ranks), count, note, parts > 1)


def _notes(layout: Layout) -> list[str]:
    """Who holds nothing, and what is not reduced yet."""
    notes = []
    mesh = layout.mesh
    pending = [a for a, p in enumerate(layout.placements) if p.is_partial() and mesh.shape[a] > 1]
    if pending:
        said = ", ".join(f"{layout.placements[a]} on {mesh.axis_names[a]!r}" for a in pending)
        notes.append(f"not reduced yet (Σ): {said}")
    holding = math.prod(mesh.shape[a] for a, p in enumerate(layout.placements) if not p.is_shard())
    for dim in range(layout.ndim):
        holding *= len({spot for spot, _ in holders_of(layout, dim, ((0, layout.shape[dim]),), {})})
    idle = len(mesh.ranks) - holding
    if idle:
        some = [rank for rank in mesh.ranks[:4096] if not all(layout.local_shape(rank))]
        notes.append(f"holding nothing: {_names(some, idle)}")
    return notes


def _names(ranks: Sequence[int], count: int) -> str:
    listed = ", ".join(map(str, ranks[:8]))
    if count > 8:
        return f"ranks {listed} ... ({count:,} of them)"
    return f"{'rank' if count == 1 else 'ranks'} {listed}"


def _html(layout: Layout) -> str:
    return figure(picture_of(layout))


def _text(layout: Layout) -> str:
    return markup(picture_of(layout))


Layout._repr_html_, Layout.__rich__ = _html, _text  # type: ignore[method-assign, assignment]
