"""The record of what was communicated: every exchange passes here, forward and backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.comm.base import Comm

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


def record(comm: Comm, kind: str, axis: int, received: int, note: Note) -> None:
    """Tell the ledgers open in this thread of a communication that is not a step of a move."""
    heard = listeners()
    if heard:
        tell(comm.axis_names[axis], kind, received, note, heard)


def tell(axis: str, kind: str, received: int, note: Note, heard: list[Any]) -> None:
    """Tell these ledgers of a communication."""
    entry = Entry(note.op, kind, axis, received, note.source or user_line(), note.backward, note.reason)
    for listener in heard:
        listener(entry)


def user_line() -> str:
    """file:line of the innermost frame that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE) and "/torch/" not in name and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
