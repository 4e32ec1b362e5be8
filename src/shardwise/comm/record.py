"""The record of what was communicated: every exchange passes here, forward and backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.comm.base import Comm, Step

_state = threading.local()
_HERE = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True, slots=True)
class Note:
    """On whose behalf a move runs."""

    op: str
    reason: str = ""
    backward: bool = False
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One communication: `bytes` received, summed over the ranks this process plays."""

    op: str
    kind: str
    axis: str
    bytes: int
    source: str
    backward: bool
    reason: str


def listeners() -> list[Any]:
    """The ledgers open in this thread, one live list: what a move saw in forward listens to its backward too,
    in whichever thread autograd runs that."""
    found = getattr(_state, "listeners", None)
    if found is None:
        found = _state.listeners = []
    return found


@contextmanager
def hearing(heard: list[Any]) -> Iterator[None]:
    """Inside, these ledgers listen: for work that autograd may do in a thread of its own."""
    saved, _state.listeners = listeners(), heard
    try:
        yield
    finally:
        _state.listeners = saved


def for_backward(note: Note, source: str | None) -> Note:
    return Note(note.op, note.reason, True, source)


def record_step(comm: Comm, step: Step, note: Note, heard: list[Any]) -> None:
    """Tell every listener of one step; next to free when nobody listens."""
    if heard and step.kind != "local":
        total = sum(step.bytes_in(coords) for coords in comm.played())
        _tell(comm, step.kind, step.axes, total, note, heard)


def record(comm: Comm, kind: str, axis: int, received: int, note: Note) -> None:
    """Tell of a communication that is not a step of a move."""
    heard = listeners()
    if heard:
        _tell(comm, kind, (axis,), received, note, heard)


def _tell(comm: Comm, kind: str, axes: tuple[int, ...], received: int, note: Note, heard: list[Any]) -> None:
    name, source = "+".join(comm.axis_names[a] for a in axes), note.source or user_line()
    for listener in heard:
        listener(Entry(note.op, kind, name, received, source, note.backward, note.reason))


def user_line() -> str:
    """file:line of the innermost frame that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE) and "/torch/" not in name and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
