"""A picture as text: plain, or in colours by the markup of rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.drawing.picture import Box, Panel, Picture, Range, hex_of

Cell = tuple[str, Box | None]
Paint = Callable[[str, Box | None], str]
_DOTS = "..."
_MOST_COLUMNS = 80
_MOST_LINES = 40  # unless one slice alone takes more


def plain(picture: Picture) -> str:
    """The picture as plain text."""
    return _drawn(picture, lambda text, box: text, lambda text: text)


def markup(picture: Picture) -> str:
    """The picture in the markup of rich: each rank in a colour of its own."""
    return _drawn(picture, _painted, lambda text: text.replace("[", r"\["))


def _painted(text: str, box: Box | None) -> str:
    text = text.replace("[", r"\[")
    if box is None or box.is_gap:
        return text
    return f"[black on {hex_of(box.ranks[0])}]{text}[/]"


def _drawn(picture: Picture, paint: Paint, words: Callable[[str], str]) -> str:
    lines = [words(picture.title)]
    for shown, panel in enumerate(picture.panels):
        drawn = [words(panel.title)] if panel.title else []
        drawn += _table(panel, paint)
        if shown and len(lines) + len(drawn) > _MOST_LINES:
            lines.append(f"... {len(picture.panels) - shown} more slices: `_repr_html_()`, or a notebook, shows them")
            break
        lines += drawn
    return "\n".join([*lines, *map(words, picture.notes)])


def _table(panel: Panel, paint: Paint) -> list[str]:
    rows, columns, cells = panel.rows(), panel.columns(), panel.cells()
    titles = [_title(panel.columns_name, c) for c in columns]
    table: list[list[Cell]] = [[("", None), *((title, None) for title in titles)]]
    for row, boxes in zip(rows, cells, strict=True):
        name = _title(panel.rows_name, row) if panel.rows_name else ""
        table.append([(name, None), *(_cell(box) for box in boxes)])
    if not panel.rows_name:
        table = [line[1:] for line in table]
    table, widths = _fitting(table)
    table.insert(1, [("-" * width, None) for width in widths])
    return [_line(line, widths, paint) for line in table]


def _fitting(table: list[list[Cell]]) -> tuple[list[list[Cell]], list[int]]:
    """The columns that a terminal has room for, and how wide they are: where it has not for all, dots stand for those
    before the last one."""
    widths = [max(len(text) for text, _ in column) for column in zip(*table, strict=True)]
    room = _MOST_COLUMNS - len(_DOTS) - 2 - widths[-1]
    shown = next((n for n in range(len(widths)) if sum(widths[: n + 1]) + 2 * (n + 1) > room), len(widths))
    if sum(widths) + 2 * (len(widths) - 1) <= _MOST_COLUMNS or shown >= len(widths) - 1:
        return table, widths
    shown = max(1, shown)
    return [[*line[:shown], (_DOTS, None), line[-1]] for line in table], [*widths[:shown], len(_DOTS), widths[-1]]


def _cell(box: Box | None) -> Cell:
    if box is None:
        return "", None
    return f"Σ {box.words}" if box.is_pending else box.words, box


def _line(cells: Sequence[Cell], widths: Sequence[int], paint: Paint) -> str:
    drawn = [paint(text.ljust(width), box) for (text, box), width in zip(cells, widths, strict=True)]
    if cells[-1][1] is None or not drawn[-1].startswith("["):
        return "  ".join(drawn).rstrip()
    return "  ".join(drawn)


def _title(name: str, indices: Range) -> str:
    first, last = indices[0], indices[1] - 1
    numbers = str(first) if first == last else f"{first}-{last}"
    return f"{name} {numbers}" if name != "value" else name
