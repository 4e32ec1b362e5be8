"""Time the same call on several peers, side by side, on a noisy machine."""

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

Call = Callable[[], object]


@dataclass(frozen=True)
class Missing:
    """What stands in the table when a peer cannot do something."""

    error: str

    def __str__(self):
        return f"n/a ({self.error})"


Seconds = float | Missing


def shown(things: Iterable, what: str, here: bool = True) -> Iterable:
    """What is measured one after the other, with a bar where stderr is a terminal. It is drawn between two things only,
    so that no thread takes time from what is measured."""
    off = not here or not sys.stderr.isatty()
    return track(list(things), what, console=Console(stderr=True), transient=True, auto_refresh=False, disable=off)


def attempt(make: Callable[[], Call]) -> Call | Missing:
    """A call that has run once without an error, or what it raised."""
    try:
        call = make()
        call()
    except Exception as error:
        return Missing(type(error).__name__)
    return call


def warm(makers: dict[str, Callable[[], Call]], *, repeats: int, slice_seconds: float) -> dict[str, Seconds]:
    """Seconds a call, the best of `repeats` slices. The peers take turns, so that a slow moment hits all of them."""
    calls = {peer: attempt(make) for peer, make in makers.items()}
    result: dict[str, Seconds] = {peer: call for peer, call in calls.items() if isinstance(call, Missing)}
    calls = {peer: call for peer, call in calls.items() if not isinstance(call, Missing)}
    loops = {}
    for peer, call in calls.items():
        for _ in range(10):
            call()
        once = min(_seconds(call, 3) for _ in range(3))
        loops[peer] = max(1, round(slice_seconds / once))
    for _ in range(repeats):
        for peer, call in calls.items():
            result[peer] = min(result.get(peer, math.inf), _seconds(call, loops[peer]))
    return {peer: result[peer] for peer in makers}


def first_calls(
    makers: dict[str, Callable[[int], Call]], sizes: list[int], *, limit_seconds: float
) -> dict[str, Seconds]:
    """The median time of the first call at each new size, after one size to warm up.

    `makers[peer](size)` prepares the operands and returns the call. A peer that has used up `limit_seconds` gets no
    further size.
    """
    times: dict[str, list[float]] = {peer: [] for peer in makers}
    missing: dict[str, Seconds] = {}
    for number, size in enumerate(sizes):
        for peer, make in makers.items():
            if peer in missing or (number > 1 and sum(times[peer]) > limit_seconds):
                continue
            try:
                seconds = _seconds(make(size), 1)
            except Exception as error:
                missing[peer] = Missing(type(error).__name__)
                continue
            if number > 0:
                times[peer].append(seconds)
    return {peer: missing.get(peer) or statistics.median(times[peer]) for peer in makers}


def _seconds(call: Call, loops: int) -> float:
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(loops):
            call()
        return (time.perf_counter() - start) / loops
    finally:
        gc.enable()


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def ratios(rows: dict[str, dict[str, Seconds]], peer: str, base: str) -> list[float]:
    """Time of `peer` over time of `base`, for the rows where both have one."""
    pairs = [(row[peer], row[base]) for row in rows.values()]
    return [a / b for a, b in pairs if not isinstance(a, Missing) and not isinstance(b, Missing)]


def comparison(title: str, rows: dict[str, dict[str, Seconds]], *, unit: str, base: str | None) -> Table:
    """A row for each measurement: the time of every peer and, with a base, its ratio to it."""
    scale, digits = {"us": (1e6, 1), "ms": (1e3, 2)}[unit]
    peers = list(next(iter(rows.values())))
    compared = [peer for peer in peers if base and peer != base]
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for peer in peers:
        table.add_column(f"{peer} ({unit})", justify="right")
    for peer in compared:
        table.add_column(f"{peer} / {base}", justify="right")
    for name, row in rows.items():
        cells = [str(t) if isinstance(t, Missing) else f"{t * scale:.{digits}f}" for t in row.values()]
        cells += [_ratio_text(row[peer], row[base]) for peer in compared]
        # The last peer is ours: red where another library's tensor is faster.
        table.add_row(name, *cells, style="red" if len(peers) > 2 and _slower(row[peers[-1]], row[peers[-2]]) else None)
    if compared and len(rows) > 1:
        table.add_section()
        found = [ratios(rows, peer, base) for peer in compared]
        means = [f"{geometric_mean(values):.2f}x" if values else "" for values in found]
        table.add_row("geometric mean", *[""] * len(peers), *means, style="bold")
    return table


def _ratio_text(time: Seconds, base: Seconds) -> str:
    return "" if isinstance(time, Missing) or isinstance(base, Missing) else f"{time / base:.2f}x"


def _slower(ours: Seconds, theirs: Seconds) -> bool:
    return not isinstance(ours, Missing) and not isinstance(theirs, Missing) and ours > theirs
