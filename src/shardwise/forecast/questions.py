"""Questions about reports: the largest batch that fits, many meshes side by side, two reports, ranks of other kinds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from shardwise.errors import MeshError
from shardwise.forecast.hardware import Hardware
from shardwise.forecast.kinds import coordinates_of_kinds
from shardwise.forecast.playing import estimate
from shardwise.forecast.progress import Bar
from shardwise.forecast.report import Report, Shown, words_of
from shardwise.mesh import OutlinedMesh

Build = Callable[..., Callable[[], Any]]  # build(mesh, **settings) -> step


def every_kind(
    build: Build,
    mesh: OutlinedMesh,
    *,
    hardware: str | Path | Hardware = "h100-sxm",
    most: int = 64,
    tokens: int | None = None,
    bar: Bar | None = None,
    **settings: object,
) -> Report:
    """Play one rank of each kind: ranks that hold the same shapes are one kind. The report is that of the worst one.

    Args:
        build: Called as build(mesh, **settings) inside of ``with mesh:``; gives the step.
        mesh: An outlined mesh.
        hardware: As for `estimate`.
        most: At most so many kinds are played.
        tokens: As for `estimate`.
        bar: A progress bar that is shown already; by default a new one.

    Returns:
        The report of the kind with the highest peak of memory; `.kinds` has the rank and the peak of each.
    """
    _checked(mesh, "every_kind: mesh")

    def played(on: OutlinedMesh, bar: Bar) -> Report:
        bar.playing(f"rank {on.get_rank()} of {on.size():,}")
        return estimate(build(on, **settings), hardware=hardware, mesh=on, tokens=tokens, told=bar.told)

    with ExitStack() as stack:
        shown = bar or stack.enter_context(Bar(2))
        with mesh:
            reports = [played(mesh, shown)]
        for coords in itertools.islice(coordinates_of_kinds(mesh), most):
            if coords != mesh.played:
                with mesh.playing(coords) as other:
                    reports.append(played(other, shown))
    worst = max(reports, key=lambda report: report.memory.peak)
    worst.kinds = [(report.rank, report.memory.peak) for report in reports]
    return worst


def largest(
    build: Build,
    mesh: OutlinedMesh,
    *,
    setting: str = "batch",
    limit: float | None = None,
    hardware: str | Path | Hardware = "h100-sxm",
    start: int = 1,
    **settings: object,
) -> tuple[int, Report | None]:
    """The largest value of a setting with which a step fits.

    Args:
        build: Called as build(mesh, batch=..., **settings) inside of ``with mesh:``; gives the step.
        mesh: An outlined mesh.
        setting: Which setting to grow.
        limit: Bytes that the tensors may take at the peak; by default what fits into the device (`report.fits`).
        hardware: As for `estimate`.
        start: The smallest value, and the step in which it grows.

    Returns:
        The value and its report; (0, None) where not even the smallest fits.
    """
    _checked(mesh, "largest: mesh")
    if start < 1:
        raise ValueError(f"largest: start must be an int >= 1, got {start}")
    if isinstance(limit, bool) or not isinstance(limit, (int, float, type(None))):
        raise ValueError(f"largest: limit must be a number of bytes or None, got {limit!r}")
    fits = lambda report: report.fits if limit is None else report.memory.peak <= limit

    def tried(value: int) -> Report:
        bar.playing(f"{setting}={value * start}")
        with mesh.playing(mesh.played) as fresh:
            step = build(fresh, **{setting: value * start}, **settings)
            return estimate(step, hardware=hardware, mesh=fresh, told=bar.told)

    best: tuple[int, Report | None] = (0, None)
    low, high = 0, 1
    with Bar(2) as bar:
        while fits(report := tried(high)) and high < 1 << 20:
            best, low, high = (high * start, report), high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            report = tried(middle)
            if fits(report):
                best, low = (middle * start, report), middle
            else:
                high = middle
    return best


def sweep(
    build: Build,
    meshes: Iterable[OutlinedMesh],
    *,
    hardware: str | Path | Hardware = "h100-sxm",
    tokens: Callable[..., int] | None = None,
    quiet: bool = False,
    **settings: Sequence[Any],
) -> Sweep:
    """Estimate every combination of meshes and settings.

    Args:
        build: Called as build(mesh, **settings) inside of ``with mesh:``; gives the step.
        meshes: Outlined meshes.
        hardware: As for `estimate`.
        tokens: Called as tokens(**settings): how many tokens all ranks process in a step.
        quiet: Whether to show no progress bar. (Where stderr is no terminal, none is shown.)
        settings: The values to try of each setting: batch=(1, 2), checkpointing=(False, True).

    Returns:
        Rows that print as a table; those which nothing beats in both memory and time are marked.
    """
    meshes = [_checked(mesh, "sweep: meshes[*]") for mesh in _listed(meshes, "meshes")]
    tried = {name: _listed(values, name) for name, values in settings.items()}
    cases = list(itertools.product(meshes, *([(name, v) for v in values] for name, values in tried.items())))
    rows: list[tuple[dict[str, Any], Report]] = []
    console = Console(stderr=True)
    for mesh, *chosen in track(cases, "estimating", console=console, disable=quiet or not console.is_terminal):
        said = dict(chosen)
        with mesh.playing(mesh.played) as fresh:
            count = None if tokens is None else tokens(**said)
            report = estimate(build(fresh, **said), hardware=hardware, mesh=fresh, tokens=count)
        rows.append(({"mesh": "x".join(map(str, mesh.world)), **said}, report))
    return Sweep(rows)


def _checked(mesh: object, what: str) -> OutlinedMesh:
    if not isinstance(mesh, OutlinedMesh):
        raise MeshError(f"{what} must be what shardwise.outline(...) gives, got {mesh!r}")
    return mesh


def _listed(values: object, name: str) -> list[Any]:
    if isinstance(values, (str, OutlinedMesh)) or not isinstance(values, Iterable):
        raise ValueError(f"sweep: {name} must be a list of what to try, as {name}=[{values!r}]; got {values!r}")
    return list(values)


class Sweep:
    """What `sweep` found: `rows` of (settings, report). Prints as a table."""

    def __init__(self, rows: Sequence[tuple[dict[str, Any], Report]]) -> None:
        self.rows = list(rows)

    @property
    def best(self) -> list[tuple[dict[str, Any], Report]]:
        """The rows that fit and that no other one beats in both memory and time (per token, if tokens are known)."""
        fitting = [row for row in self.rows if row[1].fits]
        return [row for row in fitting if not any(_beats(other[1], row[1]) for other in fitting)]

    def table(self) -> Shown:
        """The rows as a rich table."""
        names = list(self.rows[0][0]) if self.rows else []
        out = Shown(*names, "peak GB", "fits", "step ms", "tokens/s", "MFU", "best")
        best = [id(report) for _, report in self.best]
        for said, report in self.rows:
            speed = report.tokens_per_second
            out.add_row(
                *(str(said[name]) for name in names),
                f"{report.memory.peak / 1e9:,.2f}", "yes" if report.fits else "no",
                f"{report.time.total * 1e3:,.2f}", "" if speed is None else f"{speed:,.0f}", f"{report.mfu:.1%}",
                "*" if id(report) in best else "",
            )  # fmt: skip
        return out

    def __repr__(self) -> str:
        return str(self.table())


def _pace(report: Report) -> float:
    return report.time.total / (report.tokens or 1)


def _beats(one: Report, other: Report) -> bool:
    a, b = (one.memory.peak, _pace(one)), (other.memory.peak, _pace(other))
    return a != b and a[0] <= b[0] and a[1] <= b[1]


def compare(one: Report, other: Report) -> Shown:
    """Two reports side by side, as a rich table that `print` shows, too."""
    for report in (one, other):
        if not isinstance(report, Report):
            raise TypeError(f"compare: give two reports of `estimate`; got {report!r}")
    out = Shown("figure", f"first: {one.mesh}", f"second: {other.mesh}", "change")
    for name, figure in one.figures.items():
        there = other.figures.get(name)
        if there is not None:
            change = f"{there.value / figure.value - 1:+.1%}" if figure.value else ""
            out.add_row(name, words_of(name, figure.value), words_of(name, there.value), change)
    for name, size in one.memory.categories.items():
        there_size = other.memory.categories[name]
        if size or there_size:
            change = f"{there_size / size - 1:+.1%}" if size else ""
            out.add_row(f"{name} (bytes)", words_of("bytes", size), words_of("bytes", there_size), change)
    return out
