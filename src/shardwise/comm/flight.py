"""The record of a run: what this process did and communicated, in files that outlive it.

Three files a rank. `rank-00003.ring` has a record (`ring.py`) for each time that a collective or a module was entered,
with the time it was left; `rank-00003.ops` one for each op on distributed tensors, so that the many ops do not push the
collectives out. `rank-00003.lines` has what the numbers in the rings stand for, one JSON object a line, each written
once: places in the program, kinds of collectives, modules, ops; and, now and then, the memory in use.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist

from shardwise.comm.calls import forks
from shardwise.comm.record import Note, user_frame
from shardwise.comm.ring import BACKWARD, MODULE, OP, WAIT, Ring

if TYPE_CHECKING:
    from shardwise.comm.guard import Guard

T = TypeVar("T")
_MOST_NAMES = 1 << 16
_MOST_KNOWN = 1 << 12
_MEMORY_NS = 50_000_000  # how often memory is looked at, at most
_now = time.monotonic_ns

flights: list[Flight] = []  # the record that is being written, if there is one


class StepLike(Protocol):
    """What is asked of a step of a move."""

    @property
    def kind(self) -> str: ...
    @property
    def where(self) -> str: ...
    def describe(self) -> str: ...
    def bytes_here(self) -> int: ...


class CommLike(Protocol):
    """What is asked of a simulated mesh's backend."""

    @property
    def grid(self) -> Sequence[tuple[int, ...]]: ...


class Flight:
    """Writes the record of this process.

    Args:
        folder: Where the files go; it is made if need be.
        keep: How many records each ring has room for: older ones are overwritten.
        ops: Whether ops on distributed tensors are kept too.
    """

    def __init__(self, folder: Path, keep: int, ops: bool = False) -> None:
        self.folder, self.keep, self.keeps_ops = folder, keep, ops
        self.rank = -1
        self.module = 0  # the number of the innermost module of the main thread
        self._names: dict[Hashable, int] = {}
        # what ops and collectives are called, by the plan or step that runs them: a lookup instead of words
        self._known: dict[Hashable, int] = {}
        # the number of a line, by code and instruction; the code is kept, so that no other has its id
        self._places: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._inside: set[int] = set()  # threads that are in an op: what it calls itself is no op of the program
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()
        self._memory, self._looked = 0, 0
        self._forks = forks.count
        self._ring: Ring | None = None
        self._ops: Ring | None = None
        self._lines = -1
        if dist.is_initialized() or "RANK" in os.environ:
            self._open()

    # -- files ----------------------------------------------------------------------------------------------
    def _open(self) -> Ring:
        """Make the files, once it is known which rank this is."""
        with self._lock:
            if self._ring is not None:
                return self._ring
            known = dist.is_initialized()
            self.rank = dist.get_rank() if known else int(os.environ.get("RANK", "0"))
            world = dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE", "1"))
            self.folder.mkdir(parents=True, exist_ok=True)
            stem = self.folder / f"rank-{self.rank:05d}"
            self._lines = os.open(f"{stem}.lines", os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o644)
            Path(f"{stem}.ops").unlink(missing_ok=True)  # of an earlier record
            self._ops = Ring(f"{stem}.ops", self.keep) if self.keeps_ops else None
            self._ring = Ring(f"{stem}.ring", self.keep)
            self.say(
                is_=[self.rank, world, socket.gethostname(), os.getpid()],
                keep=self.keep,
                clocks=[time.time_ns(), time.monotonic_ns()],
                argv=sys.argv[:8],
            )
            return self._ring

    def _open_ops(self) -> Ring:
        self._open()
        assert self._ops is not None
        return self._ops

    def say(self, **facts: object) -> None:
        """Add a line to the file of words; it is there even if the process ends now."""
        if self._lines < 0:
            self._open()
        os.write(self._lines, (json.dumps({k.rstrip("_"): v for k, v in facts.items()}) + "\n").encode())

    def close(self) -> None:
        """Write no more."""
        ring, self._ring, ops, self._ops = self._ring, None, self._ops, None
        if ring is not None:
            ring.close()
            os.close(self._lines)
            self._lines = -1
        if ops is not None:
            ops.close()

    # -- what happens ---------------------------------------------------------------------------------------
    def enter(self, guard: Guard, thread: int) -> int:
        """A collective of processes begins, or is waited for; returns what `leave` takes."""
        if self._forks != forks.count:
            return -1
        note, names = guard.note, self._names
        key = (guard.step, note.op, guard.kind, guard.where)
        what = self._known.get(key) or self._name_guard(key, guard)
        clock = names.get(guard.clock.name) or self._name(guard.clock.name, clock=guard.clock.name)
        flags = (WAIT if guard.begun else 0) | (BACKWARD if note.backward else 0)
        return self._enter(what, self._place(note.source), clock, guard.number, thread, flags)

    def enter_step(self, comm: CommLike, step: StepLike, note: Note) -> int:
        """A step of a move on a simulated mesh begins."""
        key = (step, note.op)
        what = self._known.get(key)
        if what is None:
            facts = {"op": note.op, "kind": step.kind, "axis": step.where, "layouts": step.describe()}
            what = self._name_what(key, facts, bytes=step.bytes_here(), simulated=len(comm.grid))
        return self._enter(what, self._place(note.source), 0, 0, get_ident(), BACKWARD if note.backward else 0)

    def enter_module(self, name: int) -> int:
        """A module's forward begins."""
        return self._enter(name, 0, 0, 0, get_ident(), MODULE)

    def leave(self, slot: int, error: BaseException | None) -> None:
        """What was entered has ended."""
        if self._ring is not None:
            self._ring.leave(slot, error)

    def run_op(self, func: object, name_of: Callable[..., str], plan: Callable[..., T], *call: object) -> T:
        """Run the plan of an op on its arguments, and write down that it ran unless it is part of another op."""
        thread, inside = get_ident(), self._inside
        if thread in inside or not self.keeps_ops or self._forks != forks.count:
            return plan(*call)
        ring = self._ops or self._open_ops()
        what = self._known.get(plan) or self._name_op(plan, name_of(func), call)
        inside.add(thread)
        number = self._threads.get(thread)
        if number is None:
            number = self._thread(thread)
        slot = ring.enter(_now(), what, self._place_of(sys._getframe(1)), 0, 0, self.module, number, OP, self._memory)
        try:
            result = plan(*call)
        except BaseException as error:
            inside.discard(thread)
            if self._ops is not None:
                ring.leave(slot, error)
            raise
        inside.discard(thread)
        if self._ops is not None:
            ring.leave(slot)
        return result

    def _enter(self, what: int, where: int, clock: int, count: int, thread: int, flags: int) -> int:
        ring = self._ring or self._open()
        now = _now()
        if now - self._looked > _MEMORY_NS:
            self._looked, self._memory = now, memory_in_use() >> 10
        return ring.enter(now, what, where, clock, count, self.module, self._thread(thread), flags, self._memory)

    def _thread(self, ident: int) -> int:
        found = self._threads.get(ident)
        return self._threads.setdefault(ident, len(self._threads) & 0xFFFF) if found is None else found

    # -- names ----------------------------------------------------------------------------------------------
    def _name(self, key: Hashable, **facts: object) -> int:
        """The number of something that is met for the first time; 0 if there are too many of them."""
        if len(self._names) >= _MOST_NAMES:
            return 0
        self._ring or self._open()
        with self._lock:
            found = self._names.setdefault(key, len(self._names) + 1)
            self.say(name=found, **facts)
        return found

    def name_module(self, name: str, kind: str) -> int:
        """The number of a module."""
        return self._names.get(("module", name)) or self._name(("module", name), module=name, kind=kind)

    def _name_guard(self, key: Hashable, guard: Guard) -> int:
        step = guard.step
        facts = {
            "op": guard.note.op,
            "kind": guard.kind,
            "axis": guard.where.partition(" (")[0].removeprefix("mesh axis ").strip("'"),
            "layouts": "" if step is None else step.describe(),
            "reason": guard.note.reason,
        }
        received = 0 if step is None else step.bytes_here()
        return self._name_what(key, facts, bytes=received, ranks=_short(guard.along.ranks))

    def _name_op(self, plan: object, op: str, call: Sequence[object]) -> int:
        """The number of an op with the layouts of its tensors."""
        args = call[0] if call and isinstance(call[0], Sequence) else ()
        found = [layout for layout in (getattr(arg, "_layout", None) for arg in args) if layout is not None]
        words = ", ".join(f"{list(layout.shape)} {layout.placements}" for layout in found[:4])
        return self._name_what(plan, {"op": op, "kind": "op", "layouts": words})

    def _name_what(self, key: Hashable, what: dict[str, str], **more: object) -> int:
        """The number of an op or a collective. Steps of a move may be new objects each time: the words, not the object,
        decide whether it has a number already."""
        words = ("what", *what.values(), *map(str, more.values()))
        found = self._names.get(words) or self._name(words, what=[what], **more)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()  # plans and steps are not kept alive for ever
        self._known[key] = found
        return found

    def _place(self, source: str | None) -> int:
        """The number of the line of the user's program."""
        if source is not None:
            return self._names.get(source) or self._name(source, line=source)
        return self._place_of(sys._getframe(2))

    def _place_of(self, frame: FrameType | None) -> int:
        """The number of the innermost line of the user's program, from a frame on."""
        frame = user_frame(frame)
        if frame is None:
            return 0
        code = frame.f_code
        where = (id(code), frame.f_lasti)  # which line that is takes longer to find out
        found = self._places.get(where)
        if found is not None:
            return found[0]
        key = (code.co_filename, frame.f_lineno)
        number = self._names.get(key) or self._name(key, line=f"{key[0]}:{key[1]}", function=code.co_qualname)
        if len(self._places) >= _MOST_KNOWN:
            self._places.clear()
        self._places[where] = (number, code)
        return number


def _short(ranks: Sequence[int]) -> list[int]:
    return list(ranks[:1024])


def memory_in_use() -> int:
    """Bytes that torch has allocated on this process's GPU, or that the process has in memory."""
    if torch.cuda.is_initialized():  # quick; whether there is a GPU at all is not
        return torch.cuda.memory_allocated()
    if not _statm:
        try:
            _statm.append(os.open("/proc/self/statm", os.O_RDONLY))
        except OSError:  # no such file on this system
            return 0
    return int(os.pread(_statm[0], 64, 0).split()[1]) * mmap.PAGESIZE


_statm: list[int] = []  # the open file, which a forked process must open anew
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_statm.clear)
