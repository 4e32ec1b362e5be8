"""The record of a run: what this process did and communicated, in files that remain if it is killed.

Three files a rank. `rank-00003.ring` has a record (`ring.py`) for each collective and each forward of a module, with
the times of its begin and end; `rank-00003.ops` one for each op on distributed tensors, so that the many ops do not
push the collectives out. `rank-00003.lines` has what the numbers in the rings stand for, one JSON object a line, each
written once: places in the program, kinds of collectives, modules, ops; and, now and then, the memory in use.
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
from shardwise.comm.ring import BACKWARD, MODULE, OP, WAIT, Ring, kept

if TYPE_CHECKING:
    from shardwise.comm.guard import Guard

T = TypeVar("T")
_MOST_NAMES = 1 << 16
_MOST_KNOWN = 1 << 14
_MEMORY_NS = 50_000_000  # how often memory is looked at, at most
_now = time.monotonic_ns

flights: list[Flight] = []  # the record that is being written, if there is one


class StepLike(Protocol):
    """What a record needs to know of a step of a move."""

    @property
    def kind(self) -> str: ...
    @property
    def where(self) -> str: ...
    def describe(self) -> str: ...
    def bytes_here(self) -> int: ...


class CommLike(Protocol):
    """What a record needs to know of the backend of a simulated mesh."""

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
        # the part of a record that stays the same, by the plan or step, the instruction of the program that runs it,
        # and the module: one look-up instead of words. The code object is kept alive, so that no other gets its id
        self._sites: dict[Hashable, tuple[bytes, CodeType | None]] = {}
        self._threads: dict[int, int] = {}  # their numbers
        # of threads that are not inside an op; ops that another op calls are not recorded
        self._outside: dict[int, int] = {}
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
        """Add a line to the `.lines` file. It is in the file even if the process ends now."""
        if self._forks != forks.count:
            return  # the files are those of the process that this one was forked from
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
        note = guard.note
        frame = user_frame(sys._getframe(1).f_back) if note.source is None else None
        code, at = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        step, clock = guard.step, guard.clock.name
        key = (step, note, guard.kind, guard.where, clock, guard.begun, self.module, id(code), at)
        site = self._sites.get(key)
        if site is None:
            what = self._name_guard(guard)
            named = self._names.get(clock) or self._name(clock, clock=clock)
            flags = (WAIT if guard.begun else 0) | (BACKWARD if note.backward else 0)
            site = self._keep(key, code, what, self._place(note.source, frame), named, flags)
        return self._enter(guard.number, thread, site[0])

    def enter_step(self, comm: CommLike, step: StepLike, note: Note) -> int:
        """A step of a move on a simulated mesh begins."""
        frame = user_frame(sys._getframe(1).f_back) if note.source is None else None
        code, at = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        key = (step, note, self.module, id(code), at)
        site = self._sites.get(key)
        if site is None:
            facts = {"op": note.op, "kind": step.kind, "axis": step.where, "layouts": step.describe()}
            what = self._name_what(facts, bytes=step.bytes_here(), simulated=len(comm.grid))
            place = self._place(note.source, frame)
            site = self._keep(key, code, what, place, 0, BACKWARD if note.backward else 0)
        return self._enter(0, get_ident(), site[0])

    def enter_module(self, name: int) -> int:
        """A module's forward begins."""
        key = (name, self.module)
        site = self._sites.get(key) or self._keep(key, None, name, 0, 0, MODULE)
        self.module = name
        return self._enter(0, get_ident(), site[0])

    def leave(self, slot: int, error: BaseException | None) -> None:
        """What was entered has ended."""
        if self._ring is not None:
            self._ring.leave(slot, error)

    def run_op(
        self, func: object, name_of: Callable[..., str], plan: Callable[..., T], args: Sequence[object], *call: object
    ) -> T:
        """Run the plan of an op on its arguments, and write down that it ran unless it is part of another op."""
        thread, ring = get_ident(), self._ops
        number = self._outside.get(thread)
        if number is None or ring is None:
            if not self.keeps_ops or (number is None and thread in self._threads):
                return plan(args, *call)
            number, ring = self._thread(thread), self._open_ops()
        frame = user_frame(sys._getframe(1).f_back)
        code, at = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        key = (plan, self.module, id(code), at)
        site = self._sites.get(key)
        if site is None:
            what = self._name_op(name_of(func), args)
            site = self._keep(key, code, what, self._place(None, frame), 0, OP)
        slot = ring.enter(_now(), 0, self._memory, number, site[0])
        del self._outside[thread]
        try:
            result = plan(args, *call)
        except BaseException as error:
            self._outside[thread] = number
            if self._ops is not None:
                ring.leave(slot, error)
            raise
        self._outside[thread] = number
        if self._ops is not None:
            ring.leave(slot)
        return result

    def _enter(self, count: int, thread: int, same: bytes) -> int:
        ring = self._ring or self._open()
        now = _now()
        if now - self._looked > _MEMORY_NS:
            self._looked, self._memory = now, memory_in_use() >> 10
        number = self._threads.get(thread)
        return ring.enter(now, count, self._memory, self._thread(thread) if number is None else number, same)

    def _thread(self, ident: int) -> int:
        number = self._threads.setdefault(ident, len(self._threads) & 0xFFFF)
        self._outside[ident] = number
        return number

    def _keep(
        self, key: Hashable, code: CodeType | None, what: int, where: int, clock: int, flags: int
    ) -> tuple[bytes, CodeType | None]:
        """Make and store, under `key`, what stays the same in the records of one place of the program."""
        if len(self._sites) >= _MOST_KNOWN:
            self._sites.clear()  # plans and steps are not kept alive for ever
        found = self._sites[key] = kept(what, where, clock, self.module, flags), code
        return found

    # -- names ----------------------------------------------------------------------------------------------
    def _name(self, key: Hashable, **facts: object) -> int:
        """Give a number to something that is seen for the first time; 0 if there are too many."""
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

    def _name_guard(self, guard: Guard) -> int:
        step = guard.step
        facts = {
            "op": guard.note.op,
            "kind": guard.kind,
            "axis": guard.where.partition(" (")[0].removeprefix("mesh axis ").strip("'"),
            "layouts": guard.moves,
            "reason": guard.note.reason,
        }
        received = 0 if step is None else step.bytes_here()
        return self._name_what(facts, bytes=received, ranks=_short(guard.along.ranks))

    def _name_op(self, op: str, args: Sequence[object]) -> int:
        """The number of an op with the layouts of its tensors."""
        found = [layout for layout in (getattr(arg, "_layout", None) for arg in args) if layout is not None]
        words = ", ".join(f"{list(layout.shape)} {layout.placements}" for layout in found[:4])
        return self._name_what({"op": op, "kind": "op", "layouts": words})

    def _name_what(self, what: dict[str, str], **more: object) -> int:
        """The number of an op or a collective. Steps of a move may be new objects each time, so they are recognized by
        their text."""
        words = ("what", *what.values(), *map(str, more.values()))
        return self._names.get(words) or self._name(words, what=[what], **more)

    def _place(self, source: str | None, frame: FrameType | None) -> int:
        """The number of a line of the user's program: `source`, or where a frame is."""
        if source is not None:
            return self._names.get(source) or self._name(source, line=source)
        if frame is None:
            return 0
        key = (frame.f_code.co_filename, frame.f_lineno)
        line, function = f"{key[0]}:{key[1]}", frame.f_code.co_qualname
        return self._names.get(key) or self._name(key, line=line, function=function)


def _short(ranks: Sequence[int]) -> list[int]:
    return list(ranks[:1024])


def memory_in_use() -> int:
    """Bytes that torch has allocated on this process's GPU; those that the process has in memory if it uses none."""
    # a quick check; to ask whether there is a GPU is slow
    if torch.cuda.is_initialized() and (used := torch.cuda.memory_allocated()):
        return used
    if not _statm:
        try:
            _statm.append(os.open("/proc/self/statm", os.O_RDONLY))
        except OSError:  # no such file on this system
            return 0
    return int(os.pread(_statm[0], 64, 0).split()[1]) * mmap.PAGESIZE


_statm: list[int] = []  # the open file, which a forked process must open anew
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_statm.clear)
    os.register_at_fork(after_in_child=flights.clear)  # what is recorded is the process that was forked
