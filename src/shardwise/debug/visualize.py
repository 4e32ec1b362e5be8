"""A picture of who holds what: one cell for each rectangle of indices, with the ranks that hold it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from shardwise.errors import LayoutError, check_type
from shardwise.layout import Layout
from shardwise.tensor import DTensor

Range = tuple[int, int]
_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green", "bright_blue")


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which rectangle of a tensor. Only the first rank of the mesh prints.

    Args:
        dtensor: A distributed tensor of at most 2 dims.
        header: A line to print first.
        use_rich: Whether to print a table in colours.

    Raises:
        LayoutError: It is no DTensor, or has more than 2 dims.
    """
    if not isinstance(dtensor, DTensor):
        raise LayoutError(f"visualize_sharding: expected a DTensor, got {type(dtensor).__name__}")
    check_type(header, str, "visualize_sharding: header")
    check_type(use_rich, bool, "visualize_sharding: use_rich")
    layout = dtensor.layout
    if layout.ndim > 2:
        raise LayoutError(
            f"visualize_sharding: a tensor of {layout.ndim} dims {layout.shape} has no picture; "
            f"select or flatten it to 2 dims, or print layout.tiles(rank)"
        )
    if not layout.mesh.comm.simulated and any(layout.mesh.comm.coords):
        return
    if header:
        print(header)
    places = ", ".join(map(str, layout.placements))
    print(f"shape {layout.shape}, placements [{places}], {layout.mesh!r}")
    if 0 in layout.shape:
        print("no elements")
        return
    rows, columns, cells = grid(layout)
    titles = [_title("Col", r) if layout.ndim == 2 else _title("Row", r) if layout.ndim else "value" for r in columns]
    names = [_title("Row", r) if layout.ndim == 2 else "" for r in rows]
    text = [[_holders(ranks) for ranks in row] for row in cells]
    if use_rich:
        Console().print(_rich_table(titles, names, text))
    else:
        print(_plain_table(titles, names, text))
    idle = [rank for rank in layout.mesh.ranks if not all(layout.local_shape(rank))]
    if idle:
        print(f"holding nothing: {_holders(idle)}")


def grid(layout: Layout) -> tuple[list[Range], list[Range], list[list[list[int]]]]:
    """The rectangles of a layout, cut wherever a rank's part begins or ends: row ranges, column ranges, and the ranks
    that hold each (row, column). A tensor of one dim is one row; one of no dims a single cell."""
    regions = [layout.region(layout.mesh.coords(rank)) for rank in layout.mesh.ranks]
    edges = [sorted({edge for side in sides for interval in side for edge in interval}) for sides in zip(*regions)]
    skipped = 2 - layout.ndim
    rows, columns = [[(0, 1)]] * skipped + [list(itertools.pairwise(e)) for e in edges]
    cells = [[list(layout.holders((r[0], c[0])[skipped:])) for c in columns] for r in rows]
    return rows, columns, cells


def _title(name: str, indices: Range) -> str:
    first, last = indices[0], indices[1] - 1
    return f"{name} {first}" if first == last else f"{name} {first}-{last}"


def _holders(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _plain_table(titles: list[str], names: list[str], cells: list[list[str]]) -> str:
    lines = [["", *titles], *([name, *row] for name, row in zip(names, cells, strict=True))]
    if not any(names):
        lines = [line[1:] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _rich_table(titles: list[str], names: list[str], cells: list[list[str]]) -> Table:
    """The same, each set of holders in a colour of its own."""
    table = Table("", *titles, show_lines=True)
    distinct = list(dict.fromkeys(text for row in cells for text in row))
    colour = {text: _COLOURS[i % len(_COLOURS)] for i, text in enumerate(distinct)}
    for name, row in zip(names, cells, strict=True):
        table.add_row(name, *(f"[{colour[text]}]{text}[/]" for text in row))
    return table
