"""What `estimate` answers: memory, bytes and time of one rank, as tables, JSON and a Chrome trace."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table

from shardwise.comm.record import Entry
from shardwise.forecast.hardware import Figure, Hardware
from shardwise.forecast.memory import Memory
from shardwise.forecast.timing import Time
from shardwise.mesh import OutlinedMesh


@dataclass(frozen=True)
class Check:
    """A report beside a real run.

    Attributes:
        entries_differ: Communications whose bytes differ: (collective, axis) -> (estimated, real).
        peak_error: The estimated peak over the measured one, less 1; None where none was given.
    """

    entries_differ: dict[tuple[str, str], tuple[int, int]]
    peak_error: float | None

    @property
    def good(self) -> bool:
        """Whether all bytes are equal and the peak is within 6 %."""
        return not self.entries_differ and (self.peak_error is None or abs(self.peak_error) <= 0.06)

    def __str__(self) -> str:
        rows = [
            f"{kind} on {axis}: estimated {a:,} bytes, real {b:,}"
            for (kind, axis), (a, b) in self.entries_differ.items()
        ]
        said = rows or ["bytes: equal, every collective on every axis"]
        if self.peak_error is not None:
            said.append(f"peak memory: {self.peak_error:+.1%} of the measured one")
        return "\n".join(said)


class Shown(Table):
    """A table that `print` shows, too."""

    def __str__(self) -> str:
        return shown(self)


def shown(*parts: RenderableType) -> str:
    """What a console prints, as text; as wide as the terminal is."""
    out = io.StringIO()
    Console(width=min(160, get_terminal_size((150, 24)).columns), file=out).print(Group(*parts))
    return out.getvalue()


class Report:
    """What one step costs on one rank. Prints as tables.

    Attributes:
        rank: The rank that was played.
        memory: `.peak` in bytes, `.categories`, `.lines`, `.modules` at the peak, `.over_time`.
        bytes: Received by the rank, by (collective, axis): exact.
        entries: Every communication, as a ledger has them.
        time: `.total`, `.compute`, `.communication`, `.exposed` in seconds.
        hardware: What it was estimated for.
        tokens: How many tokens all ranks process in a step, if it was said.
    """

    def __init__(
        self,
        mesh: OutlinedMesh,
        hardware: Hardware,
        memory: Memory,
        entries: Iterable[Entry],
        time: Time,
        tokens: int | None,
    ) -> None:
        self.mesh, self.axes = repr(mesh), dict(zip(mesh.world_names, mesh.world, strict=True))
        self.rank, self.ranks = mesh.get_rank(), math.prod(mesh.world)
        self.hardware, self.memory, self.time, self.tokens = hardware, memory, time, tokens
        self.entries = list(entries)
        self.kinds: list[tuple[int, int]] = []  # of other kinds of ranks: their first rank, and its peak

    @property
    def bytes(self) -> dict[tuple[str, str], int]:
        found: Counter[tuple[str, str]] = Counter()
        for entry in self.entries:
            found[entry.kind, entry.axis] += entry.bytes
        return dict(found)

    @property
    def bytes_by_line(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for entry in self.entries:
            found[entry.source] += entry.bytes
        return dict(found.most_common())

    @property
    def fits(self) -> bool:
        """Whether CUDA's caching allocator gets along with what is left of the device's memory for it."""
        return self.memory.fits(self.hardware.memory.value - self.beside.value)

    @cached_property
    def beside(self) -> Figure:
        """Bytes that the device holds beside the tensors: the CUDA context, and the buffers of NCCL."""
        groups: dict[str, set[str]] = {}
        for entry in self.entries:
            groups.setdefault(entry.axis, set()).add(entry.kind)
        return self.hardware.bytes_beside(groups)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together."""
        return None if self.tokens is None or not self.time.total else self.tokens / self.time.total

    @property
    def mfu(self) -> float:
        """The share of the bfloat16 peak that the products of forward and backward take, without recomputed ones."""
        peak = self.hardware.flops.get("bfloat16") or self.hardware.flops["float32"]
        return self.time.flops / (self.time.total * peak.value) if self.time.total else 0.0

    @property
    def figures(self) -> dict[str, Figure]:
        """The numbers of the report, each with its basis."""
        sizes = "storages of the played rank, rounded as CUDA's allocator does"
        times = f"{self.hardware.name}: measured sizes, else roofline; links by axis; two queues"
        found = {
            "peak memory (bytes)": Figure(self.memory.peak, "exact", sizes),
            "reserved memory (bytes)": Figure(self.memory.reserved, "assumed", "rules of CUDA's allocator, one stream"),
            "beside the tensors (bytes)": self.beside,
            "received (bytes)": Figure(sum(self.bytes.values()), "exact", "moves planned from layouts"),
            "step (s)": Figure(self.time.total, self.time.basis, times),
            "compute (s)": Figure(self.time.compute, self.time.basis, times),
            "host (s)": Figure(self.time.host, self.hardware.host.basis, "to start all ops, ahead of the device"),
            "communication (s)": Figure(self.time.communication, self.time.basis, times),
            "exposed communication (s)": Figure(self.time.exposed, self.time.basis, times),
            "products (flop)": Figure(self.time.flops, "exact", "counted from shapes"),
            "recomputed (flop)": Figure(self.time.recomputed, "exact", "counted from shapes"),
            "MFU": Figure(self.mfu, self.time.basis, "products of forward and backward over time and bfloat16 peak"),
        }
        if self.tokens_per_second is not None:
            found["tokens per second"] = Figure(self.tokens_per_second, self.time.basis, "all ranks")
        return found

    def check(self, ledger: Iterable[Entry], measured_peak: int | None = None) -> Check:
        """Compare with a real run.

        Args:
            ledger: The `debug.ledger()` of one step on the rank that was played.
            measured_peak: Its `torch.cuda.max_memory_allocated()`, in bytes.
        """
        real: Counter[tuple[str, str]] = Counter()
        for entry in ledger:
            if entry.op != "random":
                real[entry.kind, entry.axis] += entry.bytes
        mine = self.bytes
        differ = {k: (mine.get(k, 0), real.get(k, 0)) for k in {*mine, *real} if mine.get(k, 0) != real.get(k, 0)}
        return Check(differ, None if not measured_peak else self.memory.peak / measured_peak - 1)

    # -- to look at -------------------------------------------------------------------------------------------------
    def tables(self) -> list[RenderableType]:
        """The report as rich tables."""
        head = Table("figure", "value", "basis", "from", title=f"rank {self.rank} of {self.ranks:,} on {self.mesh}")
        for name, figure in self.figures.items():
            head.add_row(name, words_of(name, figure.value), figure.basis, figure.source)
        fits = "yes" if self.fits else "no"
        limit = self.hardware.memory
        head.add_row(f"fits into {limit.value / 1e9:,.0f} GB", fits, limit.basis, self.hardware.name)
        for rank, peak in self.kinds:
            head.add_row(f"peak of rank {rank}'s kind", _sized(peak), "exact", "played too")
        memory = Table("memory at the peak", "size", "share")
        for name, size in self.memory.categories.items():
            if size:
                memory.add_row(name, _sized(size), f"{size / max(self.memory.peak, 1):.1%}")
        moved = Table("collective", "axis", "count", "received")
        counts = Counter((e.kind, e.axis) for e in self.entries)
        for (kind, axis), size in sorted(self.bytes.items(), key=lambda item: -item[1]):
            moved.add_row(kind, axis, str(counts[kind, axis]), _sized(size))
        modules: Counter[str] = Counter()
        for name, size in self.memory.modules.items():
            modules[_NUMBERED.sub(".*", name)] += size  # layers of a list are one row
        largest = [
            _largest("memory by module", modules),
            _largest("memory by line", self.memory.lines),
            _largest("received by line", Counter(self.bytes_by_line)),
        ]
        over_time = f"memory over time, {_sized(self.memory.peak)} at the most:\n{_profile(self.memory.over_time)}"
        return [head, memory, over_time, *largest[:2], moved, *largest[2:]]

    def __repr__(self) -> str:
        return shown(*self.tables())

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "mesh": self.axes, "rank": self.rank, "ranks": self.ranks,
            "hardware": self.hardware.name, "fits": self.fits,
            "figures": {name: vars(figure) for name, figure in self.figures.items()},
            "memory": {
                "peak": self.memory.peak, "categories": self.memory.categories, "lines": dict(self.memory.lines),
                "modules": dict(self.memory.modules), "over_time": self.memory.over_time,
            },
            "bytes": [{"collective": kind, "axis": axis, "bytes": n} for (kind, axis), n in self.bytes.items()],
            "bytes_by_line": self.bytes_by_line,
            "kinds": self.kinds,
        }  # fmt: skip

    def trace(self) -> dict[str, Any]:
        """A Chrome trace (chrome://tracing, Perfetto): two queues and the memory over time."""
        queues = {"compute": 0, "communication": 1}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": self.rank, "tid": number, "args": {"name": queue}}
            for queue, number in queues.items()
        ]
        moments: list[float] = []
        for span in self.time.spans:
            if span.queue == "compute":
                moments.append(span.start)
            events.append(
                {"ph": "X", "name": span.name, "pid": self.rank, "tid": queues[span.queue], "ts": span.start * 1e6,
                 "dur": span.seconds * 1e6, "args": {"line": span.line}}
            )  # fmt: skip
        first = max((moment for moment, _ in self.memory.over_time), default=0) - len(moments)
        for moment, alive in self.memory.over_time:
            at = moment - first
            if 0 <= at < len(moments):
                events.append(
                    {"ph": "C", "name": "memory", "pid": self.rank, "ts": moments[at] * 1e6, "args": {"bytes": alive}}
                )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write the report: a Chrome trace where the name ends in `.trace.json`, JSON for `.json`, else the tables."""
        name = str(path)
        if name.endswith(".trace.json"):
            text = json.dumps(self.trace())
        else:
            text = json.dumps(self.to_dict(), indent=1) + "\n" if name.endswith(".json") else repr(self)
        Path(path).write_text(text)


_NUMBERED = re.compile(r"\.\d+(?=\.|$)")
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_ROWS = 8


def _largest(title: str, sizes: Counter[str]) -> Table:
    """The largest of many, and what the others come to."""
    table = Table(Column(title, overflow="fold"), "size")
    for name, size in sizes.most_common(_MOST_ROWS):
        table.add_row(name, _sized(size))
    rest = sizes.most_common()[_MOST_ROWS:]
    if rest:
        table.add_row(f"{len(rest)} more", _sized(sum(size for _, size in rest)))
    return table


def _profile(over_time: list[tuple[int, int]], columns: int = 72) -> str:
    """Bytes over time as one line of bars: of each stretch of equally many ops, the most."""
    first, last = (over_time[0][0], over_time[-1][0]) if over_time else (0, 0)
    tallest, highest = max((alive for _, alive in over_time), default=0), [0] * columns
    for moment, alive in over_time:
        at = (moment - first) * columns // (last - first + 1)
        highest[at] = max(highest[at], alive)
    for at in range(1, columns):
        highest[at] = highest[at] or highest[at - 1]
    return "".join(_BARS[-(-size * (len(_BARS) - 1) // max(tallest, 1))] for size in highest)


def words_of(name: str, value: float) -> str:
    """A figure of this name, in the unit that suits it."""
    if "bytes" in name:
        return _sized(value)
    if "(s)" in name:
        return f"{value * 1e3:,.3f} ms"
    if "flop" in name:
        return f"{value / 1e12:,.3f} T" if value >= 1e9 else f"{value / 1e9:,.3f} G"
    return f"{value:.1%}" if name == "MFU" else f"{value:,.0f}"


def _sized(value: float) -> str:
    """Bytes, in the unit that suits them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= 0.1 * size:
            return f"{value / size:,.3f} {unit}"
    return f"{value:,.0f} B"
