"""The record of communication: every exchange, forward and backward, reports to this file.

Each thread has a list of the recorders (ledgers) that are open in it. An autograd node keeps the list of the thread
that made it and records its backward there too (`recording_to`), so a ledger sees the backward passes of all that
happened inside of it, in whichever thread they run. What hooks do on one of autograd's own threads cannot be assigned
to a recorder, so all open recorders take it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import NamedTuple, Protocol

from shardwise.torch_private.autograd import current_node


class Note(NamedTuple):
    """On whose behalf a move runs: the op, why it communicates, in which pass, for which line of the user's program,
    and the op's arguments that are no tensors, which must be the same on all ranks."""

    op: str
    reason: str = ""
    backward: bool = False
    source: str | None = None
    called_with: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One communication.

    Attributes:
        op: The operation that communicated.
        kind: The collective: all_gather, all_reduce, reduce_scatter, all_to_all, send_recv, ...
        axis: The name of the mesh axis; several are joined by "+".
        bytes: Bytes received, summed over the ranks of this process.
        source: file:line of the user's program.
        backward: Whether it happened in a backward pass.
        reason: Why the operation had to communicate; empty where the program asked for it.
    """

    op: str
    kind: str
    axis: str
    bytes: int
    source: str
    backward: bool
    reason: str


class Recorder:
    """Takes every entry between `open` and `close`, from the thread that opened it and from backward passes of its
    graphs."""

    def __init__(self, take: Callable[[Entry], None]) -> None:
        self._take = take
        self._list: list[Recorder] | None = None  # where it is open

    def open(self) -> None:
        self._list = recorders()
        self._list.append(self)
        if self._list is not _all_open:
            _all_open.append(self)

    def close(self) -> None:
        for known in (self._list, _all_open):
            if known is not None and self in known:
                known.remove(self)
        self._list = None

    def add(self, entry: Entry) -> None:
        """Take an entry. A backward pass may still refer to a closed recorder, which ignores it."""
        if self._list is not None:
            self._take(entry)


class Described(Protocol):
    """What a step of a move says of itself."""

    def describe(self) -> str: ...
    def bytes_here(self) -> int: ...


class _OfThread(threading.local):
    recorders: list[Recorder] | None = None
    note: Note | None = None  # on whose behalf a step of a move runs now
    step: Described | None = None  # that step
    digest = 0  # its number
    called_with = ""  # the arguments of the op whose program runs, if any; they must be the same on all ranks
    has_met = False  # whether all ranks are known to be at the same program, so that no collective asks


of_thread = _OfThread()
_all_open: list[Recorder] = []


def recorders() -> list[Recorder]:
    """The recorders that are open in this thread. It is always the same list object, so a copy of the reference sees
    recorders that are opened later."""
    found = of_thread.recorders
    if found is None:
        # a backward pass in a thread that made no graph is in one of autograd's own threads
        if current_node() is not None:
            return _all_open
        found = of_thread.recorders = []
    return found


@contextmanager
def recording_to(kept: list[Recorder]) -> Iterator[None]:
    """In this context, communication is recorded by the recorders in `kept`, too. It surrounds a backward pass, which
    may run in another thread; `kept` is the list of the thread that made the graph."""
    here = of_thread.recorders
    if kept is here or (here is not None and not kept):
        yield
        return
    of_thread.recorders = [*kept, *(recorder for recorder in here if recorder not in kept)] if here else kept
    try:
        yield
    finally:
        of_thread.recorders = here


def for_backward(note: Note, source: str | None) -> Note:
    """The note of the backward pass of what `note` is about."""
    return note._replace(backward=True, source=source)


class HasAxes(Protocol):
    """What a record needs to know of a backend."""

    @property
    def axis_names(self) -> Sequence[str]: ...


def record(comm: HasAxes, kind: str, axis: int, received: int, note: Note) -> None:
    """Record a communication that is not a step of a move."""
    to = recorders()
    if to:
        tell(comm.axis_names[axis], kind, received, note, to)


def tell(axis: str, kind: str, received: int, note: Note, to: Sequence[Recorder]) -> None:
    """Report a communication to these recorders."""
    entry = Entry(note.op, kind, axis, received, note.source or user_line(), note.backward, note.reason)
    for recorder in tuple(to):
        recorder.add(entry)


_NOT_THE_USERS = frozenset({"shardwise", "torch", "contextlib", "functools"})
_MOST_CODES = 1 << 14
_codes: dict[int, tuple[CodeType, bool]] = {}  # by the id of the code, which the entry keeps alive
_passed: set[int] = set()  # the ids of those that are not the user's
_users: set[int] = set()  # and of those that are
_lines: dict[tuple[int, int], tuple[CodeType, str]] = {}  # by id and instruction: which line that is takes longer


def is_of_user(frame: FrameType) -> bool:
    """Whether a frame belongs to neither shardwise nor torch. The module of its code decides: a path would not do,
    since users may name their folders as they like and run code without a file."""
    code = frame.f_code
    known = _codes.get(id(code))
    if known is not None:
        return known[1]
    module = frame.f_globals.get("__name__")
    mine = (module or "").partition(".")[0] not in _NOT_THE_USERS
    if len(_codes) >= _MOST_CODES:
        _codes.clear()
        _passed.clear()
        _users.clear()
    _codes[id(code)] = (code, mine)
    (_users if mine else _passed).add(id(code))
    return mine


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program, from a frame on."""
    passed = _passed
    while frame is not None:
        while id(frame.f_code) in passed:  # this is done for every recorded op, a dozen frames each
            frame = frame.f_back
            if frame is None:
                return None
        if id(frame.f_code) in _users or is_of_user(frame):
            return frame
        frame = frame.f_back
    return None


def user_line(frame: FrameType | None = None) -> str:
    """file:line of the innermost frame of the user's program, from a frame on (default: the caller's)."""
    found = user_frame(sys._getframe(1) if frame is None else frame)
    if found is None:
        return "?"
    code = found.f_code
    at = (id(code), found.f_lasti)
    known = _lines.get(at)
    if known is None:
        if len(_lines) >= _MOST_CODES:
            _lines.clear()
        known = _lines[at] = code, f"{code.co_filename}:{found.f_lineno}"
    return known[1]
