"""A run as one HTML file that opens without a server: a timeline to zoom in, and tables."""

from __future__ import annotations

import json
import os
import zlib
from base64 import b64encode
from html import escape
from importlib.resources import files

import numpy as np

from shardwise.drawing import page_table, size_name
from shardwise.drawing.picture import hex_of
from shardwise.reports.read import Event, Run
from shardwise.reports.summary import ByCategory, Cost, Summary, first_time, last_time, summary

_MOST_EVENTS = 480_000  # of all ranks, in the timeline: the last ones
_MODULE, _COLLECTIVE, _IN_FLIGHT, _OP = 0, 1, 2, 3  # lanes
_MOST_NAMED = 32  # ranks, beside a chart


def page(run: Run) -> str:
    """The report of a run."""
    found = summary(run)
    here = files("shardwise.reports")
    script, style = (here.joinpath(name).read_text() for name in ("timeline.js", "page.css"))
    timeline = _timeline(run)
    data = json.dumps(timeline).replace("</", "<\\/")
    body = "".join([_head(found), _overview(found), _timeline_head(found["events"]), _tables(found)])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(found["folder"])}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body>{body}"
        f'<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>'
    )


def _timeline_head(events: int) -> str:
    part = f" It shows the last {_MOST_EVENTS:,} of {events:,} events." if events > _MOST_EVENTS else ""
    return (
        "<h2>Timeline</h2><p>For each rank, from top to bottom: modules, ops on distributed tensors, collectives, and "
        f"collectives that run while the program goes on.{part} Turn the wheel to zoom, drag to move, double-click to "
        "see everything; point at a bar to see what it is.</p>"
        '<div id="timeline"><canvas id="canvas"></canvas><div id="tip"></div></div>'
    )


def _head(found: Summary) -> str:
    bad = "" if found["verdict"].startswith("nothing went wrong") else " class=bad"
    return f"<h1>{escape(found['folder'])}</h1><pre{bad}>{escape(found['verdict'])}</pre>"


def _overview(found: Summary) -> str:
    moved = sum(cost["bytes"] for cost in found["by_axis"])
    lost = f", {found['lost']:,} older ones overwritten" if found["lost"] else ""
    return (
        f"<p>{len(found['ranks'])} of {found['world']} ranks, {found['seconds']:.2f} s, {found['events']:,} events"
        f"{lost}, {size_name(moved)} received.</p>"
    )


def _common_folder(found: Summary) -> str:
    """The folder of all files of the program that the tables name, with a slash; or nothing."""
    folders = [os.path.dirname(cost["name"].split("  ")[0]) for cost in (*found["by_line"], *found["ops"])]
    folders = [folder for folder in folders if folder.startswith("/")]
    return os.path.commonpath(folders).rstrip("/") + "/" if folders else ""


def _tables(found: Summary) -> str:
    parts, folder = [], _common_folder(found)
    for title, rows in (("line", found["by_line"]), ("axis", found["by_axis"]), ("module", found["by_module"])):
        where = f"<p>Files are in {escape(folder)}</p>" if folder and title == "line" else ""
        parts.append(f"<h2>Communication by {title}</h2>" + where + _costs(title, rows, folder))
    parts.append("<h2>Slow ranks</h2>")
    parts.append("<p>Which rank comes last to collectives, and how long the others waited for it.</p>")
    slow = [
        (f"rank {r['rank']}", f"{r['collectives']:,}", f"{r['last']:,}", f"{r['mean_ms']:.3f}", f"{r['most_ms']:.1f}",
         f"{r['others_waited_s']:.3f}") for r in found["slow"]
    ]  # fmt: skip
    header = ("", "collectives", "came last", "late by, mean ms", "at most ms", "others waited, s")
    parts.append(page_table(header, slow, range(1, 6)))
    parts.append("<h2>Memory by rank</h2>" + _chart(found["memory"], found["seconds"]))
    parts.append("<h2>Memory by category</h2>" + _areas(found["memory_by_category"], found["seconds"]))
    if found["ops"]:
        cells = [(op["name"].removeprefix(folder), f"{op['count']:,}", f"{op['seconds']:.3f}") for op in found["ops"]]
        said = "<p>Ops of the forward pass, including the time they communicated. The backward pass is torch's own.</p>"
        parts.append("<h2>Ops by line</h2>" + said + page_table(("line", "count", "seconds, all ranks"), cells, (1, 2)))
    laid_out = [[str(cell) for cell in row] for row in found["parameters"]]
    if laid_out:
        columns = ("parameter", "shape", "dtype", "placements", "mesh", "bytes here")
        parts.append("<h2>Layouts of parameters</h2>" + page_table(columns, laid_out, (5,)))
    return "".join(parts)


def _costs(title: str, rows: list[Cost], folder: str) -> str:
    cells = [
        (r["name"].removeprefix(folder), f"{r['count']:,}", size_name(r["bytes"]), f"{r['seconds']:.3f}") for r in rows
    ]
    return page_table((title, "count", "received", "seconds, all ranks"), cells, (1, 2, 3))


_WIDTH, _HEIGHT = 900, 200  # of a chart, in its own units: it is as wide as the page


def _chart(memory: dict[str, list[list[float]]], seconds: float) -> str:
    """Bytes over time, as lines."""
    points = [point for rows in memory.values() for point in rows]
    if not points:
        return "<p>not measured</p>"
    longest, most = max(seconds, max(p[0] for p in points)) or 1.0, max(p[1] for p in points) or 1.0
    least = min(p[1] for p in points)
    least = least if least > most / 2 else 0  # lines close together at the top would say nothing
    parts = []
    for i, (name, rows) in enumerate(memory.items()):
        line = " ".join(_point(at / longest, (y - least) / ((most - least) or 1)) for at, y in rows)
        shape = f'<polyline points="{line}" fill="none" stroke="{hex_of(i)}" stroke-width="1.5"/>'
        parts.append(f"<g>{shape}<title>{escape(name)}</title></g>")
    shown = list(memory)[:_MOST_NAMED]
    names = "".join(f"{_key(i)}{escape(name)} " for i, name in enumerate(shown))
    names += f"and {len(memory) - len(shown)} more " if len(memory) > len(shown) else ""
    return f"<p>{names}</p>" + _drawn(parts, longest, least, most)


def _areas(memory: ByCategory, seconds: float) -> str:
    """Bytes over time, one category on top of the other."""
    rows = memory["rows"]
    if not rows:
        return "<p>not measured: no module was called</p>"
    longest, most = max(seconds, rows[-1][0]) or 1.0, max(sum(row[1:]) for row in rows) or 1.0
    always = min(row[-1] for row in rows)  # of the rest: on a CPU, the program itself
    always = always if always > most / 2 else 0
    span = (most - always) or 1.0
    below, parts, names = [0.0] * len(rows), [], []
    for i, category in enumerate(memory["categories"]):
        less = always if i == len(rows[0]) - 2 else 0
        above = [y + row[i + 1] - less for y, row in zip(below, rows)]
        edge = [*_steps(rows, above, longest), *_steps(rows, below, longest)[::-1]]
        corners = " ".join(_point(at / longest, y / span) for at, y in edge)
        shape = f'<polygon points="{corners}" fill="{hex_of(i)}" stroke="{hex_of(i)}"/>'
        parts.append(f"<g>{shape}<title>{category}</title></g>")
        names.append(f"{_key(i)}{category} (up to {size_name(int(max(row[i + 1] for row in rows)))})")
        below = above
    said = f"Rank {memory['rank']}, which used most: {', '.join(names)}. "
    rest = "The rest is activations and buffers, and on a CPU the program itself. It is measured in some steps only."
    rest += f" Not drawn are the {size_name(int(always))} of it that are there all the time." if always else ""
    return f"<p>{said}{rest}</p>" + _drawn(parts, longest, 0, most - always)


def _point(x: float, y: float) -> str:
    """A point of a chart; both sides are 0 to 1."""
    return f"{x * _WIDTH:.1f},{_HEIGHT - y * (_HEIGHT - 2):.1f}"


def _drawn(parts: list[str], longest: float, least: float, most: float) -> str:
    """The chart with what its sides mean: bytes from the least to the most, seconds from the first event on."""
    base = f'<path d="M0 {_HEIGHT}H{_WIDTH}M0 2H{_WIDTH}" stroke="currentColor" stroke-opacity=".4"/>'
    drawn = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{"".join([*parts, base])}</svg>'
    # the words stand outside of what is stretched, and stay readable on a narrow page
    low = f"{size_name(int(least))}, " if least else ""
    times = f"<div><span>{low}0 s</span><span>{longest:.1f} s</span></div>"
    return f'<div class="chart"><div>{size_name(int(most))}</div>{drawn}{times}</div>'


def _steps(rows: list[list[float]], values: list[float], longest: float) -> list[tuple[float, float]]:
    """Each value from its own time to the next one's, the last one to the end: nobody knows what was in between."""
    times = [row[0] for row in rows]
    ends = [*times[1:], longest]
    return [(at, value) for begin, end, value in zip(times, ends, values) for at in (begin, end)]


def _key(i: int) -> str:
    """The colour of a line or an area, in front of its name."""
    return f'<span class="key" style="background:{hex_of(i)}"></span>'


# -- the timeline's numbers ------------------------------------------------------------------------------
def _timeline(run: Run) -> dict[str, object]:
    """Sites (what can happen where), and for each rank three arrays: the site, the time since the last, how long."""
    start, stop, sites, ranks = first_time(run), last_time(run), dict[tuple[object, ...], int](), []
    unit = max(1e-6, (stop - start) / 2**31)
    each = max(1, _MOST_EVENTS // max(1, len(run.ranks)))
    for number, rank in sorted(run.ranks.items()):
        shown, rows = rank.all_events[-each:], []
        begun = {(e.clock, e.count): e for e in shown if e.clock and not e.wait}
        for event in shown:
            left = event.left if event.left is not None else stop
            lane = _MODULE if event.is_module else _OP if event.kind == "op" else _COLLECTIVE
            rows.append((_site(sites, event, lane), event.entered, left))
            first = begun.get((event.clock, event.count)) if event.wait else None
            if first is not None:
                rows.append((_site(sites, first, _IN_FLIGHT), first.entered, left))
        table = np.array(sorted(rows, key=lambda row: row[1]), dtype=np.float64).reshape(-1, 3)
        begins = np.floor((table[:, 1] - start) / unit)
        arrays = table[:, 0], np.diff(begins, prepend=0.0), (table[:, 2] - table[:, 1]) / unit
        kinds = ("<u2", "<u4", "<u4")
        packed = [_packed(np.clip(a, 0, 2**32 - 1).astype(kind)) for a, kind in zip(arrays, kinds, strict=True)]
        ranks.append({"rank": number, "arrays": packed})
    return {"unit": unit, "length": (stop - start) / unit, "sites": list(sites), "ranks": ranks}


def _site(sites: dict[tuple[object, ...], int], event: Event, lane: int) -> int:
    words = (event.op, event.kind, event.axis, event.layouts, event.source, event.module)
    key = (lane, *words, event.bytes, event.backward, event.wait)
    return sites.setdefault(key, min(len(sites), 2**16 - 1))


def _packed(array: np.ndarray) -> str:
    """For the page, which unpacks it by `DecompressionStream`."""
    return b64encode(zlib.compress(array.tobytes(), 6)).decode()
