"""A picture as SVG inside of HTML. It uses the colour of the text around it, so it is good on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import count

from shardwise.drawing.picture import Box, Panel, Picture, Range, hex_of

_WIDTH, _HEIGHT = 440, 250  # of the boxes of a panel, in pixels, unless many need more
_LEFT, _TOP = 64, 34  # for indices
_LEAST_WIDTH, _LEAST_HEIGHT = 34, 20  # of a box
_LETTER = 6.7
_MOST_NAMES = 1000  # pixels that columns may take so that their names have room
_ids = count()


def figure(picture: Picture) -> str:
    """The picture as HTML."""
    panels = "".join(_panel(panel) for panel in picture.panels)
    notes = "".join(f'<div style="opacity:.75;font-size:12px">{escape(note)}</div>' for note in picture.notes)
    head = f'<div style="font:13px monospace;margin-bottom:4px">{escape(picture.title)}</div>'
    row = f'<div style="display:flex;flex-wrap:wrap;gap:12px">{panels}</div>' if panels else ""
    return f'<div class="shardwise" style="margin:8px 0">{head}{row}{notes}</div>'


def page_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table as HTML; the columns in `numbers` are aligned at the right."""
    cell = "padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.3);"

    def line(tag: str, row: Sequence[str]) -> str:
        align = [f"{cell}text-align:{'right' if i in numbers else 'left'}" for i in range(len(row))]
        cells = [f'<{tag} style="{a}">{escape(x)}</{tag}>' for a, x in zip(align, row, strict=True)]
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    style = "border-collapse:collapse;font-size:12px;color:inherit"
    table = f'<table style="{style}"><thead>{line("th", header)}</thead><tbody>{body}</tbody></table>'
    return f'<div style="overflow-x:auto">{table}</div>'


def _panel(panel: Panel) -> str:
    rows, columns = panel.rows(), panel.columns()
    if not rows or not columns:
        return ""
    above, beside = (
        [_index(name, r) for r in at] for name, at in ((panel.columns_name, columns), (panel.rows_name, rows))
    )
    names = [*above, *(box.label for box in panel.boxes if box.count == 1)]
    xs = _edges(columns, _WIDTH, max(_LEAST_WIDTH, min(_MOST_NAMES // len(columns), _width(names))))
    ys = _edges(rows, _HEIGHT if panel.rows_name else 44, _LEAST_HEIGHT)
    left = max(_LEFT, _width(beside)) if panel.rows_name else 8
    top = _TOP + (16 if panel.title else 0)
    width, height = left + max(xs.values()) + 6, top + max(ys.values()) + 6
    name = f"shardwise-pending-{next(_ids)}"
    parts = [_hatch(name)]
    if panel.title:
        parts.append(_text(left, 12, panel.title, weight="bold"))
    for c, said in zip(columns, above, strict=True):
        parts.append(_text(left + _middle(xs, c), top - 6, _fit(said, xs[c[1]] - xs[c[0]]), "middle"))
    if panel.rows_name:
        parts += [_text(left - 6, top + _middle(ys, r) + 4, said, "end") for r, said in zip(rows, beside, strict=True)]
    parts += [_box(box, left, top, xs, ys, name) for box in panel.boxes]
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    style = "max-width:100%;height:auto;font:11px monospace"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}" role="img">{"".join(parts)}</svg>'


def _edges(stripes: Sequence[Range], pixels: int, least: int) -> dict[int, float]:
    """Where each edge lies, in pixels: in proportion to the indices, but no stripe too thin to be seen."""
    total = sum(stop - start for start, stop in stripes)
    room = max(0, pixels - least * len(stripes))
    at, out = 0.0, dict[int, float]()
    for start, stop in stripes:
        out.setdefault(start, at)
        at += least + room * (stop - start) / max(1, total)
        out[stop] = at
    return out


def _middle(edges: dict[int, float], stripe: Range) -> float:
    return (edges[stripe[0]] + edges[stripe[1]]) / 2


def _index(name: str, indices: Range) -> str:
    """Indices, after the name of the mesh axis that they are of."""
    first, last = indices[0], indices[1] - 1
    said = str(first) if first == last else f"{first}-{last}"
    return said if name in ("", "Row", "Col") else f"{name} {said}"


def _width(labels: Sequence[str]) -> int:
    """What the longest of some labels takes."""
    return math.ceil(max(map(len, labels)) * _LETTER) + 12


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="currentColor"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _hatch(name: str) -> str:
    """The pattern of values that are not reduced yet."""
    line = '<path d="M0 8L8 0M-2 2L2 -2M6 10L10 6" stroke="currentColor" stroke-width="1" stroke-opacity=".45"/>'
    return f'<defs><pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">{line}</pattern></defs>'


def _box(box: Box, left: float, top: float, xs: dict[int, float], ys: dict[int, float], hatch: str) -> str:
    x, y = left + xs[box.columns[0]], top + ys[box.rows[0]]
    width, height = left + xs[box.columns[1]] - x, top + ys[box.rows[1]] - y
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    if box.is_gap:
        said = box.label if len(box.label) * _LETTER + 2 <= width else "..."
        label = _text(x + width / 2, y + height / 2 + 4, said, "middle")
        return f'<rect {place} fill="none" stroke="currentColor" stroke-dasharray="3 3" stroke-opacity=".5"/>{label}'
    fill = hex_of(box.ranks[0])
    title = f"<title>{escape(box.words + (': ' + box.note if box.note else ''))}</title>"
    rect = f'<rect {place} fill="{fill}" fill-opacity=".5" stroke="currentColor" stroke-opacity=".6">{title}</rect>'
    over = f'<rect {place} fill="url(#{hatch})" pointer-events="none"/>' if box.is_pending else ""
    return rect + over + _text(x + width / 2, y + height / 2 + 4, _fit(box.label, width), "middle")


def _fit(label: str, width: float) -> str:
    most = math.floor((width - 2) / _LETTER)
    return label if len(label) <= most else f"{label[: max(1, most - 1)]}…"
