"""Finds out which ranks are blocked, and why. A thread of each process looks at the collectives that the other threads
are in.

If one takes longer than usual, the thread reports that to the other ranks (`peers.py`) and reads their reports. Where
these show that the collective cannot end, its group is broken up, so that it raises at once and with the reason:

- a rank it waits for has failed, has come to the end of its program, or is gone;
- all ranks that it waits for, and that those wait for, are blocked too, and no collective has all its ranks: the ranks
  run different programs.

While nothing is blocked, no rank asks the others anything.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing.util
import sys
import threading
import time
import traceback
from atexit import register as at_exit
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.comm.calls import SEED_ALIKE, Group, entered, forks, threads
from shardwise.comm.messages import clocks, on_new_clock
from shardwise.comm.peers import (
    PATIENCE_SECONDS,
    Board,
    board,
    causes_of_failure,
    is_of_peers,
    places_of,
    who_is_lost,
)
from shardwise.comm.record import is_of_user, user_line
from shardwise.errors import CommError

if TYPE_CHECKING:
    from shardwise.comm.guard import Guard

TICK_SECONDS = 0.25
BLOCKED_SECONDS = 0.75  # a collective that takes longer is reported to the others
SURE_SECONDS = 1.0  # the ranks must be blocked at the same place for so long
GRACE_SECONDS = 5.0  # the time that a rank with an error gets to go on: its program may have caught the error
_NOBODY = 0x60000003  # a tag that no message has
_LONGEST = 600  # characters of an error that is reported to others


class Errors:
    """The errors of this rank. The other ranks must learn of them, unless it goes on to communicate."""

    def __init__(self) -> None:
        self.count = 0
        self.standing = False  # whether there is one since the last collective
        self.has_reported = False
        self.text, self.at = "", 0.0
        self.last = 0  # the id of the error

    def add(self, op: str, error: BaseException, inside: bool = False, own: bool = False) -> None:
        """Note an error of an op and report it. The others act on it once they have waited for this rank for a while,
        or at once if it was raised `inside` a collective. A CommError is mostly caused by other ranks, unless it is
        this rank's `own`."""
        if watch.thread is None or (isinstance(error, CommError) and not own) or id(error) == self.last:
            return
        self.count, self.last = self.count + 1, id(error)
        self.text, self.at, self.standing = text_of(error, op), time.monotonic(), True
        here = board()
        if here is not None:
            self.has_reported = True
            with suppress(RuntimeError):  # the store is lost: the others will find that out too
                here.set("error", json.dumps([self.count, self.text, 0.0 if inside else GRACE_SECONDS]))

    def stand(self) -> None:
        """Note that this rank found a collective broken."""
        self.at, self.standing, self.has_reported = time.monotonic(), True, True

    def forget(self) -> None:
        """This rank goes on after its error. Its report is removed once the others have had time to read it."""
        here = board() if self.has_reported else None
        if here is not None:
            if time.monotonic() - self.at < 2 * PATIENCE_SECONDS:
                return
            here.set("error", "")
            here.go_on()
        self.standing, self.has_reported, self.last = False, False, 0


errors = Errors()


def text_of(error: BaseException, op: str = "") -> str:
    """The text by which an error is reported to others."""
    walk = list(traceback.walk_tb(error.__traceback__))
    line = next((f"{f.f_code.co_filename}:{n}" for f, n in reversed(walk) if is_of_user(f)), None)
    said = f"{type(error).__name__}: {error}"[:_LONGEST]
    return f"failed{f' in {op}' if op else ''} at {line or user_line()}: {said}"


class Watch:
    """What the watching thread knows."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None  # the error that ends this process
        self._since: dict[int, tuple[int, float]] = {}  # by thread: the turn of its collective, and since when
        self._has_reported = False
        # (seconds, function): called once when a collective has been blocked for so long
        self.on_blocked: list[tuple[float, Callable[[], None]]] = []
        self._shown: set[int] = set()  # the turns for which these were called
        self._beat = 0
        # by rank and word: its text, its count of renewals, since when
        self._seen: dict[tuple[int, str], tuple[Any, int, float]] = {}

    def start(self) -> None:
        """Watch, from now on."""
        if self.thread is None or not self.thread.is_alive():
            self._stop.clear()
            self.thread = threading.Thread(target=self._run, name="shardwise-watch", daemon=True)
            self.thread.start()

    def end(self, error: BaseException | None) -> None:
        """Stop watching, and report why this rank ends. The watching thread does it: the store may not answer (for
        instance a file whose folder was deleted), and a process that ends must neither wait for it nor start a
        thread."""
        self._error = error
        self._stop.set()
        if self.thread is None or not self.thread.is_alive():
            _tell_end(error)
        else:
            self.thread.join(PATIENCE_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            try:
                self._look()
            except RuntimeError:  # the store is lost, or the program is leaving the group: nothing can be reported
                self._has_reported = False
        _tell_end(self._error)

    def _look(self) -> None:
        now, inside = time.monotonic(), dict(entered)
        self._since = {
            thread: (guard.turn, self._since[thread][1] if self._since.get(thread, (0,))[0] == guard.turn else now)
            for thread, guard in inside.items()
        }
        blocked = {thread: guard for thread, guard in inside.items() if now - self._since[thread][1] > BLOCKED_SECONDS}
        self._show(now)
        if not blocked and not self._has_reported:
            return
        here = board()
        if here is None:
            return
        if not blocked:
            self._has_reported, self._seen = False, {}
            here.set("waits", "")
            return
        frames = sys._current_frames()
        self._beat += 1
        calls = [
            (guard.clock.name, guard.number, guard.tag, guard.along.ranks, _place(guard, frames.get(thread)))
            + (guard.drawn,)
            for thread, guard in blocked.items()
        ]
        alive = {thread.ident for thread in threading.enumerate()}
        rest = (threads & alive) - set(blocked)  # another thread may still do what the others wait for
        alone = len(rest) <= (1 if not blocked else 0)
        came = {clock.name: (clock.count, list(clock.tags)) for clock in clocks.values()}
        here.set("waits", json.dumps([self._beat, alone, calls, came]))
        self._has_reported = True
        for guard in blocked.values():
            trouble = None if guard.trouble else self._why(here, guard.along.ranks)
            if trouble is not None:
                how, guard.trouble, about = trouble
                here.end(how, guard.trouble, about)
            if guard.trouble:  # again and again, until its thread has raised
                break_up(guard.along.group)

    def _show(self, now: float) -> None:
        """Call the `on_blocked` functions for collectives that take too long."""
        for limit, tell in self.on_blocked[:]:
            late = {turn for turn, since in self._since.values() if now - since > limit} - self._shown
            if late:
                self._shown |= late
                tell()

    def _why(self, here: Board, ranks: tuple[int, ...]) -> tuple[str, str, str] | None:
        """Why a collective of these ranks cannot end, if it is known: how it was found out, a text, and which
        collectives it is about."""
        causes = self._ended(here, ranks)
        if causes:
            return "noticed", causes, ""
        blocked = self._all_blocked(here, ranks)
        if blocked is None:
            return None
        for calls, _ in blocked.values():
            if any(all(_has_come(call, *blocked[peer]) for peer in call[3]) for call in calls):
                return None  # all ranks of this collective have come: it is only slow
        text = (
            f"the ranks wait for each other, because they {_difference(blocked)}: {places_of(here, blocked)}. "
            f"shardwise.debug.check_ranks() finds the first place where they differ"
        )
        return (
            "verdict",
            text,
            str(sorted((clock, number) for calls, _ in blocked.values() for clock, number, *_ in calls)),
        )

    def _ended(self, here: Board, ranks: tuple[int, ...]) -> str:
        """The ranks that will not come any more, and why."""
        for rank in ranks:
            if rank == here.rank:
                continue
            said = here.get(rank, "error")
            if said:
                count, text, grace = json.loads(said)
                if count != errors.count and self._stands((rank, "error"), count, grace):
                    return f"rank {rank} {text}"
            if here.end_of(rank) is not None or here.is_dead(rank):
                return ", ".join(causes_of_failure(here))
        return ""

    def _all_blocked(self, here: Board, ranks: tuple[int, ...]) -> dict[int, Any] | None:
        """What these ranks, and all ranks that they wait for, are blocked in, and how many collectives each has
        reached. None if one of them still runs."""
        found: dict[int, Any] = {}
        queue = list(ranks)
        while queue:
            rank = queue.pop()
            if rank in found:
                continue
            said = here.get(rank, "waits")
            if not said:
                self._seen.pop((rank, "waits"), None)
                return None
            beat, alone, *word = json.loads(said)
            if not alone or not self._stands((rank, "waits"), word, SURE_SECONDS, beat):
                return None
            found[rank] = word
            queue += [peer for call in word[0] for peer in call[3]]
        return found

    def _stands(self, key: tuple[int, str], word: object, seconds: float, beat: int = -1) -> bool:
        """Whether a rank has reported the same for that many seconds while it was running (a stopped process does not
        count)."""
        now = time.monotonic()
        known = self._seen.get(key)
        if known is None or known[0] != word:
            self._seen[key] = known = (word, beat, now)
        return now - known[2] >= seconds and (beat < 0 or beat > known[1])


def _place(guard: Guard, frame: FrameType | None) -> str:
    return f"{guard.describe()} at {guard.line(frame)}"


def _difference(blocked: Mapping[int, Any]) -> str:
    """What ranks that wait for each other have done."""
    drawn: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}  # by clock and number: what each rank had drawn
    for rank in sorted(blocked):
        for clock, number, *_, before in blocked[rank][0]:
            drawn.setdefault((clock, number), {})[rank] = tuple(before)
    for of in drawn.values():
        if len(set(of.values())) > 1:
            counts = ", ".join(f"{count} on rank {rank}" for rank, (count, _) in of.items())
            return f"have drawn different random numbers (random ops before: {counts}). {SEED_ALIKE}. They are"
    return "run different programs"


def _has_come(
    call: Sequence[Any], calls: Sequence[Sequence[Any]], came: Mapping[str, tuple[int, Sequence[int]]]
) -> bool:
    """Whether a rank has done, or is doing, its part of a call. It is in `calls`; `came` says to how many collectives
    of each clock it came, and the tags of the last ones: a rank that has to wait for nobody may be past another."""
    clock, number, tag = call[:3]
    same = [other for other in calls if other[0] == clock and other[1] == number]
    if same:
        return any(other[2] == tag for other in same)
    count, tags = came.get(clock, (0, ()))
    behind = count - number
    return behind >= 0 and (behind >= len(tags) or tags[-1 - behind] == tag)


watch = Watch()


def break_up(group: Group) -> None:
    """Make all operations under way in a gloo group fail. A wait for a message that times out closes all connections of
    the group. The peer waited for must be alive: if it has left, only its own connection fails."""
    group = dist.group.WORLD if group is None else group
    try:
        peers = [rank for rank in range(group.size()) if rank != group.rank()]
    except RuntimeError:  # it is gone
        return
    for peer in peers:
        try:
            work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NOBODY)
            work.wait(datetime.timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():  # the time-out is the purpose
                return


# -- the end of a process ----------------------------------------------------------------------------------
def sign_in() -> None:
    """Report which process this rank is, and arrange that its end is reported."""
    here = board()
    if here is None or here.size == 1:
        return
    if _registered[0] != forks.count:
        _registered[0] = forks.count
        at_exit(_at_exit)
        multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)  # of a process that multiprocessing started
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    if not isinstance(threading.excepthook, _ThreadHook):
        threading.excepthook = _ThreadHook(threading.excepthook)
    if "gloo" in dist.get_backend_config(dist.group.WORLD):
        watch.start()


on_new_clock.append(sign_in)  # ranks that communicate without a mesh, too
_registered = [-1]  # the number of forks when the exit handlers of this process were registered


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class _Hook:
    """Reports an uncaught error to the other ranks, then calls the previous hook."""

    def __init__(self, before: Hook) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _tell_end(error)
        self.before(kind, error, trace)


class _ThreadHook:
    """The same for an error that ends a thread: other ranks may wait for what the thread was to communicate."""

    def __init__(self, before: Callable[[threading.ExceptHookArgs], object]) -> None:
        self.before = before

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        ident = None if args.thread is None else args.thread.ident
        if isinstance(args.exc_value, Exception) and ident in threads:
            errors.add("a thread", args.exc_value, inside=True)
        self.before(args)


def _tell_end(error: BaseException | None) -> None:
    """Report that this rank has ended."""
    here = board()
    if here is None or here.size == 1:
        return
    if isinstance(error, RuntimeError) and not isinstance(error, CommError) and is_of_peers(error):
        with suppress(RuntimeError):
            here.end("noticed", text_of(error))  # in a collective of the program's own: others learn where
        error.add_note("shardwise: " + who_is_lost(error, range(here.size)).removeprefix("; "))
    if here.ended:
        return
    try:
        if error is None or isinstance(error, SystemExit):
            here.end("left", "has come to the end of its program")
            return
        known = errors.standing and id(error) == errors.last
        here.end("failed", errors.text if known else text_of(error))
        if here.rank == 0:  # rank 0 often holds the store
            _wait_for_readers(here)
    except RuntimeError:  # the store is gone: nobody can read the report
        pass


def _wait_for_readers(here: Board) -> None:
    deadline = time.monotonic() + 2 * BLOCKED_SECONDS
    others = set(range(1, here.size))
    while others and time.monotonic() < deadline:
        others = {rank for rank in others if here.end_of(rank) is None and not here.is_dead(rank)}
        time.sleep(0.05)


def _at_exit() -> None:
    watch.end(sys.exc_info()[1])
