"""What every collective runs inside of: it gives the collective a number and a tag, knows who takes part, and turns a
failure into an error that says what failed and which rank caused it."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from types import FrameType, TracebackType
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from shardwise.comm.calls import Drawn, Group, entered, forks, threads, turns
from shardwise.comm.capturing import tape_here, tapes
from shardwise.comm.flight import flights
from shardwise.comm.messages import Along, clock_of
from shardwise.comm.peers import is_of_peers, who_is_lost
from shardwise.comm.record import Described, Note, of_thread, user_line
from shardwise.comm.watch import errors
from shardwise.errors import CommError
from shardwise.torch_private.tensors import tracing_mode

_UNKNOWN = Note("")
_NOTHING = Drawn()
_TAGS = 0x3FFFFFFF
_TICKET, _TICKETS = 0x40000000, 0x1FFFFFFF  # tags of the messages by which the ranks of a collective meet
_crcs: dict[str, int] = {}
_MOST_CRCS = 1 << 12
compare: list[Callable[[Guard], None]] = []  # called before each collective; `check_ranks` adds its check


def crc(text: str) -> int:
    """A number for a text, the same in every process."""
    found = _crcs.get(text)
    if found is None:
        if len(_crcs) >= _MOST_CRCS:
            _crcs.clear()
        found = _crcs[text] = crc32(text.encode())
    return found


def refuse_tracing(kind: str, where: str) -> NoReturn:
    """Raise where make_fx traces: received values would become constants of the graph."""
    raise CommError(
        f"{kind} on {where} while torch.fx traces (make_fx): what other ranks send would be lost from the graph; "
        f"trace what runs between the moves"
    )


class Sent(NamedTuple):
    """A text for what a collective carries that is no step of a move. It is the same on all ranks."""

    words: str

    @property
    def digest(self) -> int:
        return crc(self.words)

    def describe(self) -> str:
        return self.words

    def bytes_here(self) -> int:
        return 0


class Guard:
    """The context of one collective. It is entered when the collective begins, and once more to wait for it if it was
    only begun."""

    __slots__ = (
        ("along", "also", "at", "begun", "clock", "digest", "kind", "note", "number", "outer", "step", "tag")
        + ("compares_draws", "drawn", "slot", "trouble", "turn", "where")
    )  # fmt: skip

    def __init__(
        self,
        along: Along,
        kind: str,
        where: str,
        at: str,
        note: Note | None = None,
        what: Sent | None = None,
        compares_draws: bool = False,
    ) -> None:
        self.along, self.kind, self.where, self.at = along, kind, where, at
        self.compares_draws, self.drawn = compares_draws, _NOTHING
        self.number = 0
        self.also = ""
        self.begun = False
        self.trouble = ""  # why it cannot end, once the watching thread has found that out
        self.note: Note = note or of_thread.note or _UNKNOWN
        self.step: Described | None = of_thread.step if note is None else what
        self.digest: int = of_thread.digest if note is None else 0 if what is None else what.digest
        arguments = self.note.called_with or of_thread.called_with
        if arguments:
            self.digest, self.also = hash((self.digest, crc(arguments))), f", called with {arguments}"

    def __enter__(self) -> Guard:
        if tracing_mode() is not None:
            refuse_tracing(self.kind, self.where.partition(" (")[0])
        if tapes and (tape := tape_here()) is not None:
            tape.refuse(f"{self.name} communicates outside of a move")
        if self.number == 0:
            self._take_number()
        if errors.standing:
            errors.forget()
        thread = get_ident()
        self.outer = entered.get(thread)
        self.turn = next(turns)
        entered[thread] = self
        threads.add(thread)
        self.slot = flights[0].enter(self, thread) if flights else -1
        if compare:
            try:
                compare[0](self)
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise
        return self

    def _take_number(self) -> None:
        self.clock = clock = self.along.clock or clock_of(self.along.group, self.along.ranks)
        if clock.forks != forks.count:
            raise CommError(
                f"{self.name}: this process was forked from a rank after the mesh was made; it is no rank itself and "
                f"shares the rank's connections. Communicate in the rank only, or start the process with 'spawn'"
            )
        if entered and self.along.backend == "gloo":
            self._refuse_other_threads()
        clock.count += 1
        self.number = clock.count
        if not self.compares_draws:
            self.drawn = clock.drawn
        op, kind, who = crc(self.note.op), crc(self.kind), self.along.digest
        same = (op, self.note.backward, kind, self.digest, who, self.number, self.drawn.digest, len(compare))
        self.tag = hash(same) & _TAGS
        clock.tags.append(self.tag)

    def _refuse_other_threads(self) -> None:
        """Raise where another thread is just beginning a collective of the same ranks. Their order would be chance, and
        could differ on other ranks, so that the two would get each other's values."""
        mine = get_ident()
        for thread, guard in list(entered.items()):
            if thread != mine and guard.clock is self.clock and not guard.begun:
                error = CommError(
                    f"{self.name}: another thread is in {guard.name}. Two threads that communicate over one process "
                    f"group at the same time take each other's values; give each a mesh with a group of its own "
                    f"(DeviceMesh.from_group(dist.new_group(), ...)), or let one wait for the other"
                )
                errors.add(self.name, error, inside=True, own=True)
                raise error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread = get_ident()
        if self.slot >= 0 and flights:
            flights[0].leave(self.slot, error)
        if self.outer is None:
            entered.pop(thread, None)
        else:
            entered[thread] = self.outer
        self.begun = True
        if error is None or isinstance(error, CommError):
            return
        if not self.trouble and not is_of_peers(error):
            errors.add(self.name, error, inside=True)
        if not isinstance(error, (RuntimeError, ValueError)):
            return
        lost = f"; {self.trouble}" if self.trouble else f"{who_is_lost(error, self.along.ranks)}: {error}"
        errors.stand()
        raise CommError(f"{self.name} failed{self.at}{lost}") from error

    def meet(self) -> None:
        """Wait until the rank before this one has reached the same collective. Backends do not check this: they would
        mix the values of two collectives, or end the process if their sizes differ."""
        along = self.along
        if along.backend != "gloo" or of_thread.has_met:
            return
        group: Group = dist.group.WORLD if along.group is None else along.group
        me, n = group.rank(), group.size()
        if n > 1:
            came = group.recv([torch.empty(0)], (me - 1) % n, self.tag & _TICKETS | _TICKET)
            sent = group.send([torch.empty(0)], (me + 1) % n, self.tag & _TICKETS | _TICKET)
            came.wait()
            sent.wait()

    def carries(self, what: str) -> None:
        """Add a text about what is sent. It must be the same on all ranks."""
        self.also, self.digest = f", {what}{self.also}", hash((self.digest, crc(what)))

    # -- for people -----------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The op, the collective and where it is."""
        if self.note.op in ("", self.kind):
            return f"{self.kind} on {self.where}"
        return f"{self.note.op}{' (backward)' if self.note.backward else ''}: {self.kind} on {self.where}"

    def describe(self) -> str:
        """The name, with what moves."""
        return f"{self.name}{f', {self.moves}' if self.moves else ''} (number {self.number})"

    @property
    def moves(self) -> str:
        """A text of what moves, and of all else that must be the same on all ranks; empty where nothing is known."""
        step, order = "" if self.step is None else self.step.describe(), ""
        if not self.along.in_order:
            order = f", ranks in the order {[rank for _, rank in sorted(zip(self.along.peers, self.along.ranks))]}"
        return f"{step}{self.also}{order}".removeprefix(", ")

    def line(self, frame: FrameType | None = None) -> str:
        """The line of the user's program that it is for. `frame` is the frame of its thread, if that is not this
        thread."""
        return self.note.source or user_line(frame)
