"""Reads the files of a recorded run. What a killed process left half written is left out."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_RECORD = struct.Struct("<QQQIIHxxIIIII8x")
_SIZE, _HEAD = 64, 4096
FAILED, WAIT, BACKWARD, MODULE, OP = 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class Event:
    """A collective, a module or an op that a rank entered.

    Attributes:
        number: How many events of its file (collectives and modules, or ops) the rank had, with this one.
        entered, left: Seconds since 1970; `left` is None where the rank never came out.
        op, kind, axis, layouts, reason: What was communicated; `kind` is "module" for a module, whose name is `op`, and
            "op" for an op on distributed tensors, whose operands are `layouts`.
        bytes: Bytes that the rank received; of a simulated mesh, all ranks together.
        source: file:line of the program.
        ranks: Who takes part.
        clock, count: The group, and how many collectives it had, with this one.
        module: The innermost module in whose forward it happened.
        thread: The thread, counted from 0.
        backward, wait, failed: Whether it is of a backward pass, the wait for one begun before, or ended in an error.
        memory: Bytes in use.
    """

    number: int
    entered: float
    left: float | None
    op: str
    kind: str
    axis: str
    layouts: str
    reason: str
    bytes: int
    source: str
    ranks: tuple[int, ...]
    clock: str
    count: int
    module: str
    thread: int
    backward: bool
    wait: bool
    failed: bool
    memory: int

    @property
    def is_module(self) -> bool:
        return self.kind == "module"

    def __str__(self) -> str:
        op = f"{self.op}{' (backward)' if self.backward else ''}: " if self.op not in ("", self.kind) else ""
        layouts = f", {self.layouts}" if self.layouts else ""
        return f"{'the wait for ' if self.wait else ''}{op}{self.kind} on {self.axis!r}{layouts} at {self.source}"


@dataclass
class Rank:
    """What one process left behind."""

    rank: int
    world: int
    host: str
    pid: int
    events: list[Event] = field(default_factory=list)  # collectives and modules
    ops: list[Event] = field(default_factory=list)  # ops on distributed tensors, as long as they are kept
    end: dict[str, object] | None = None  # how its record ended; None if nobody wrote that
    memory: list[dict[str, float]] = field(default_factory=list)  # by category, now and then
    parameters: list[list[object]] = field(default_factory=list)  # name, shape, dtype, placements, bytes here
    started: float = 0.0
    lost: int = 0  # events that were overwritten

    @property
    def state(self) -> str:
        """What its process does now: "runs", "stopped", "gone"; "" where that cannot be known."""
        if self.host != socket.gethostname() or not os.path.exists("/proc/self/stat"):
            return ""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return "gone" if state in "ZX" else "stopped" if state in "Tt" else "runs"

    @property
    def all_events(self) -> list[Event]:
        """Collectives, modules and ops in the order in which they began."""
        return sorted([*self.events, *self.ops], key=lambda event: event.entered)

    @property
    def collectives(self) -> list[Event]:
        return [event for event in self.events if not event.is_module]


@dataclass
class Run:
    """All ranks of a run whose files were found."""

    folder: Path
    ranks: dict[int, Rank]

    @property
    def world(self) -> int:
        return max((rank.world for rank in self.ranks.values()), default=0)

    @property
    def missing(self) -> list[int]:
        """The ranks that left no file."""
        return [rank for rank in range(self.world) if rank not in self.ranks]


def read_run(folder: str | Path, progress: Callable[[int, int], object] = lambda done, ranks: None) -> Run:
    """The record in a folder.

    Args:
        folder: What `shardwise.debug.record(folder)` wrote.
        progress: Told after each rank how many of how many were read.

    Raises:
        FileNotFoundError: There is none.
    """
    folder = Path(folder)
    files = sorted(folder.glob("rank-*.lines"))
    if not files:
        raise FileNotFoundError(f"{folder}: no record of a run is here; `shardwise.debug.record(folder)` makes one")
    found = []
    for done, file in enumerate(files):
        progress(done, len(files))
        rank = _read_rank(file)
        if rank is not None:
            found.append(rank)
    return Run(folder, {rank.rank: rank for rank in found})


def _read_rank(path: Path) -> Rank | None:
    names: dict[int, dict[str, object]] = {0: {}}
    rank: Rank | None = None
    shift = keep = 0
    for line in path.read_bytes().splitlines():
        try:
            facts = json.loads(line)
        except ValueError:  # the process was killed while it wrote
            continue
        if "is" in facts:
            number, world, host, pid = facts["is"]
            rank, keep = Rank(number, world, host, pid), facts["keep"]
            shift = facts["clocks"][0] - facts["clocks"][1]
            rank.started = facts["clocks"][0] / 1e9
        elif rank is None:
            continue
        elif "name" in facts:
            names[facts["name"]] = facts
        elif "end" in facts:
            rank.end = facts
        elif "memory" in facts:
            rank.memory.append(facts["memory"])
        elif "parameters" in facts:
            rank.parameters = facts["parameters"]
    if rank is None:
        return None
    for name in ("ring", "ops"):
        rows = _read_ring(path.with_suffix(f".{name}"), keep)
        rank.lost += rows[0][0] - 1 if rows else 0
        (rank.ops if name == "ops" else rank.events).extend(_event(row, names, shift) for row in rows)
    return rank


def _read_ring(path: Path, keep: int) -> list[tuple[int, ...]]:
    """The records of one file, oldest first."""
    data = path.read_bytes() if path.exists() else b""
    rows = []
    for slot in range(keep):
        at = _HEAD + slot * _SIZE
        if at + _RECORD.size > len(data):
            break
        row = _RECORD.unpack_from(data, at)
        if row[0]:
            rows.append(row)
        elif slot > 0 and not rows:
            break
    return sorted(rows)


def _event(row: tuple[int, ...], names: dict[int, dict[str, object]], shift: int) -> Event:
    number, entered, left, count, memory, thread, what, where, clock, module, flags = row
    said, inside = names.get(what, {}), str(names.get(module, {}).get("module", ""))
    facts: dict[str, str] = (said.get("what") or [{}])[0]  # type: ignore[index]
    if flags & MODULE:
        inside = str(said.get("module", "?"))
        facts = {"op": inside, "kind": "module"}
    received = int(said.get("bytes") or 0) if not flags & WAIT else 0  # type: ignore[call-overload]
    return Event(
        number=number,
        entered=(entered + shift) / 1e9,
        left=(left + shift) / 1e9 if left else None,
        op=facts.get("op", ""),
        kind=facts.get("kind", ""),
        axis=facts.get("axis", ""),
        layouts=facts.get("layouts", ""),
        reason=facts.get("reason", ""),
        bytes=received,
        source=str(names.get(where, {}).get("line", "?")),
        ranks=tuple(said.get("ranks") or ()),  # type: ignore[arg-type]
        clock=str(names.get(clock, {}).get("clock", "")),
        count=count,
        module=inside,
        thread=thread,
        backward=bool(flags & BACKWARD),
        wait=bool(flags & WAIT),
        failed=bool(flags & FAILED),
        memory=memory << 10,
    )
