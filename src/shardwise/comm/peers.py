"""What ranks tell each other outside of collectives: short texts that each rank writes to the store of the process
group.

| word    | says                                                                                        |
|---------|---------------------------------------------------------------------------------------------|
| `is`    | the host and the process of the rank                                                        |
| `waits` | the collective it has been blocked in for a while, renewed as long as it is (`watch.py`)      |
| `end`   | why it will come to no collective any more: its error, the error of another that it noticed, |
|         | the end of its program, or that it left the group                                           |
| `error` | an error that its program may have caught: gone with the next collective it comes to         |
| `says`  | what it has, where the ranks found that they have different things                          |

So a rank whose collective failed, or which is blocked in one, can say which rank caused it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from shardwise.comm.calls import forks
from shardwise.torch_private.distributed import default_store

PATIENCE_SECONDS = 2.0  # a process ends a little after its connections: the others are given this time to notice
_OF_PEERS = re.compile(r"connection|timed? ?out|peer|network|socket|remote process|pair closure", re.IGNORECASE)


class Board:
    """The texts of all ranks of one world."""

    def __init__(self, number: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ended = ""  # how, if it did
        self.said = "", ""  # the reason, kept after the rank went on, and the collectives that it is about
        self.comparisons = 0  # how often the ranks asked each other which of them differ
        self._number, self._forks = number, forks.count
        # weak: a strong reference would keep the group alive after the program left it
        self._world = weakref.ref(dist.group.WORLD)
        self.set("is", f"{socket.gethostname()} {os.getpid()}")

    @property
    def is_current(self) -> bool:
        """Whether this process is still a rank of that world. A forked process is not."""
        return dist.is_initialized() and self._world() is dist.group.WORLD and self._forks == forks.count

    def set(self, what: str, text: str) -> None:
        """Write a text of this rank; an empty one removes it."""
        default_store().set(self._key(self.rank, what), text)

    def get(self, rank: int, what: str) -> str:
        """The text of a rank; empty if there is none."""
        store, key = default_store(), self._key(rank, what)
        return store.get(key).decode() if store.check([key]) else ""

    def end(self, how: str, text: str, about: str = "") -> None:
        """Announce, once, that this rank will take part in no more collectives, and why. What the ranks found out about
        themselves replaces what they had noticed before. `about` is the same on all ranks that end so."""
        if not self.ended or (how == "verdict" and self.ended in ("noticed", "verdict") and (text, about) != self.said):
            self.ended, self.said = how, (text, about)
            self.set("end", json.dumps([how, text, about]))

    def correct(self, text: str) -> None:
        """Replace the text about what this rank noticed by a better one."""
        if self.ended == "noticed":
            self.said = text, ""
            self.set("end", json.dumps([self.ended, text, ""]))

    def go_on(self) -> None:
        """Take back that this rank ended, if other ranks were the reason."""
        if self.ended in ("noticed", "verdict"):
            self.ended = ""
            self.set("end", "")

    def end_of(self, rank: int) -> tuple[str, str] | None:
        """How and why a rank ended; None if it did not say so."""
        said = self.get(rank, "end")
        if not said:
            return None
        how, text, about = json.loads(said)
        if how == "verdict" and (text, about) == self.said:
            return None  # this rank raised the same error and went on; the other may do so, too
        return how, text

    def process_of(self, rank: int) -> str:
        """What the process of a rank on this host does: "runs", "stopped", "gone"; "" where nothing is known."""
        host, _, pid = self.get(rank, "is").partition(" ")
        return _state(int(pid)) if host == socket.gethostname() else ""

    def is_dead(self, rank: int) -> bool:
        """Whether the process of a rank is gone and did not say why."""
        return self.process_of(rank) == "gone"

    def _key(self, rank: int, what: str) -> str:
        return f"shardwise/{self._number}/{rank}/{what}"


_boards: list[Board] = []  # the last one


def board() -> Board | None:
    """The board of the current world; None if it has none, for instance with a fake process group."""
    if _boards and _boards[0].is_current:
        return _boards[0]
    if not dist.is_initialized() or dist.get_backend() in ("fake", "threaded"):
        return None
    if _boards and _boards[0]._forks != forks.count and _boards[0]._world() is dist.group.WORLD:
        return None  # a forked process is not a rank
    _boards[:] = [Board(_boards[0]._number + 1 if _boards else 0)]
    return _boards[0]


def is_of_peers(error: BaseException) -> bool:
    """Whether an error of torch.distributed is about other ranks."""
    return isinstance(error, dist.DistError) or _OF_PEERS.search(str(error)) is not None


def who_is_lost(error: BaseException, ranks: Iterable[int]) -> str:
    """What to add to the error of a failed collective of these ranks; nothing if it does not look as if a peer was
    lost."""
    here = board()
    if here is None or not is_of_peers(error):
        return ""
    found: list[str] = []
    # a store may not answer: its process may be stopped, or a stopped process may have locked its file
    asking = threading.Thread(target=lambda: found.append(_cause_text(here, ranks, error)), daemon=True)
    asking.start()
    asking.join(3 * PATIENCE_SECONDS)
    return found[0] if found else "; the store of the process group does not answer either"


def _cause_text(here: Board, ranks: Iterable[int], error: BaseException) -> str:
    try:
        here.end("noticed", "")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (causes := _sure_causes(here)) and _silent_ranks(here, ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        found = "; " + ", ".join(causes) if causes else _silent_ranks_text(here, ranks, error)
        if not causes and (noticed := _what_others_noticed(here)):
            found += "; " + ", ".join(noticed)
        if found:
            here.correct(found.removeprefix("; "))
    except RuntimeError:
        return "; the store of the process group is lost as well: the process that holds it, often rank 0, has died"
    return found


def places_of(here: Board, ranks: Iterable[int]) -> str:
    """Where these ranks are blocked, as far as they reported it."""
    words = {rank: json.loads(said)[2] for rank in sorted(ranks) if (said := here.get(rank, "waits"))}
    return "; ".join(f"rank {rank} is in {call[4]}" for rank, calls in words.items() for call in calls)


def ranks_that_differ(mine: str, ranks: Sequence[int]) -> str:
    """The ranks that report something else than the majority. Every rank must call this, and reports `mine`."""
    here = board()
    if here is None:
        return ""
    try:
        here.comparisons += 1  # as on all ranks
        word = f"says {here.comparisons}"
        here.set(word, mine)
        deadline, said_by = time.monotonic() + PATIENCE_SECONDS, {here.rank: mine}
        while len(said_by) < len(ranks) and time.monotonic() < deadline:
            said_by |= {rank: said for rank in ranks if rank not in said_by and (said := here.get(rank, word))}
    except RuntimeError:
        return ""
    most, count = Counter(said_by.values()).most_common(1)[0]
    if 2 * count <= len(said_by):
        return f" ({_ranks(sorted(said_by))})"
    return f" ({_ranks(rank for rank in sorted(said_by) if said_by[rank] != most)} others than the rest)"


def causes_of_failure(here: Board) -> list[str]:
    """Why collectives failed, according to other ranks."""
    return _sure_causes(here) or _what_others_noticed(here)


def _sure_causes(here: Board) -> list[str]:
    """The first that exists of: errors of other ranks, what ranks agreed on, processes gone without a report, and
    ranks that ended normally."""
    everyone, ends = _ends(here)
    own = [f"rank {rank} {text}" for rank, (how, text) in ends.items() if how == "failed"]
    if own:
        return own
    agreed = [text for how, text in ends.values() if how == "verdict"]
    if agreed:
        return agreed[:1]
    dead = [rank for rank in everyone if rank not in ends and here.is_dead(rank)]
    if dead:
        return [f"{_ranks(dead)} died"]
    left = [f"rank {rank} {text}" for rank, (how, text) in ends.items() if how == "left"]
    # a rank that had its part done may leave, and the others still wait for one that cannot go on
    stopped = [rank for rank in everyone if left and rank not in ends and here.process_of(rank) == "stopped"]
    return [f"the process of {_ranks(stopped)} is stopped by a signal", *left] if stopped else left


def _what_others_noticed(here: Board) -> list[str]:
    everyone, ends = _ends(here)
    noticed = [f"rank {rank} gave up ({text})" for rank, (how, text) in ends.items() if how == "noticed" and text]
    errors = [f"rank {rank} {json.loads(said)[1]}" for rank in everyone if (said := here.get(rank, "error"))]
    return noticed[:1] or errors


def _ends(here: Board) -> tuple[list[int], dict[int, tuple[str, str]]]:
    """The other ranks, and how those of them ended that did."""
    everyone = [rank for rank in range(here.size) if rank != here.rank]
    return everyone, {rank: end for rank in everyone if (end := here.end_of(rank)) is not None}


def _silent_ranks(here: Board, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if rank != here.rank and here.end_of(rank) is None]


def _silent_ranks_text(here: Board, ranks: Iterable[int], error: BaseException) -> str:
    """A text about the ranks that report nothing, and about where the ranks are that do not know of the failure."""
    running, silent = (_silent_ranks(here, some) for some in (range(here.size), ranks))
    if not silent:
        return ""
    places = places_of(here, running)
    return f"; {_ranks(silent)} did not answer{_processes_text(here, silent, error)}{f' ({places})' if places else ''}"


def _processes_text(here: Board, ranks: Iterable[int], error: BaseException) -> str:
    """A text of what is known about ranks that do not answer."""
    stopped = [rank for rank in ranks if here.process_of(rank) == "stopped"]
    if stopped:
        return f" ({_ranks(stopped)}: stopped by a signal)"
    closed = re.search(r"closed|reset", str(error))
    return " (the process runs but closed its connections: did it destroy its process group?)" if closed else ""


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        return "gone" if state in "ZX" else "stopped" if state in "Tt" else "runs"  # a zombie waits for its parent only
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return "gone"
    try:  # no /proc on this system
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "runs"


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
