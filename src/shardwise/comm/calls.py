"""Which collective every thread of this process is in, and the numbers by which ranks tell exchanges apart."""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.comm.guard import Guard

Group = Any  # a process group of torch.distributed
entered: dict[int, Guard] = {}  # by thread: the collective that it is in
threads: set[int] = set()  # that have been in one
turns = itertools.count(1)  # of entering one, in this process
draws: dict[tuple[int, ...], tuple[int, int]] = {}  # by the ranks of a mesh: how many random ops, and what they drew


_KEPT_TAGS = 32  # a rank can be ahead of the others by so many that it need not wait in


class Clock:
    """Counts the exchanges of some ranks in one group. Ranks that run the same program count alike.

    Attributes:
        tags: Those of the last exchanges, which say what each was; the newest is last.
    """

    __slots__ = ("count", "forks", "name", "tags")

    def __init__(self, name: str = "") -> None:
        self.name, self.count, self.forks = name, 0, forks.count
        self.tags: deque[int] = deque(maxlen=_KEPT_TAGS)


class _Forks:
    """How many forks lie between the process that loaded the library and this one."""

    count = 0

    def add(self) -> None:
        self.count += 1
        entered.clear()  # of threads that are not here
        threads.clear()


forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forks.add)
