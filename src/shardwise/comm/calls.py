"""Which collective every thread of this process is in, and the numbers by which ranks tell exchanges apart."""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from shardwise.comm.guard import Guard

Group = Any  # a process group of torch.distributed
entered: dict[int, Guard] = {}  # by thread: the collective that it is in
threads: set[int] = set()  # that have been in one
turns = itertools.count(1)  # of entering one, in this process
SEED_ALIKE = (
    "Seed all ranks alike with shardwise.manual_seed(seed), and draw what differs between ranks with a generator of "
    "its own or inside shardwise.random.fork()"
)

_KEPT_TAGS = 32  # a rank can be ahead of the others by so many that it need not wait in


class Drawn(NamedTuple):
    """What random ops drew.

    Attributes:
        ops: How many random ops there were.
        digest: A hash of what they drew.
    """

    ops: int = 0
    digest: int = 0

    def after(self, drawn: int) -> Drawn:
        """This, with what one more random op drew."""
        return Drawn(self.ops + 1, hash((self.digest, drawn)))


class DrawnOnMesh(Protocol):
    """Compares what the ranks of one mesh draw.

    Attributes:
        ranks: Those of the mesh.
    """

    ranks: tuple[int, ...]

    def forget(self) -> None:
        """Begin anew. All ranks of the mesh do it at the same place of the program."""


class Clock:
    """Counts the exchanges of some ranks in one group. Ranks that run the same program count alike.

    Attributes:
        tags: Those of the last exchanges, which say what each was; the newest is last.
        drawn: What was drawn on the meshes that communicate in the group.
        meshes: Those whose first axis this is, by all their axes; they outlive the mesh, since ranks collect their
            garbage at different times.
    """

    __slots__ = ("count", "drawn", "forks", "meshes", "name", "tags")

    def __init__(self, name: str = "") -> None:
        self.name, self.count, self.forks = name, 0, forks.count
        self.tags: deque[int] = deque(maxlen=_KEPT_TAGS)
        self.drawn = Drawn()
        self.meshes: dict[tuple[Clock | str, ...], DrawnOnMesh] = {}


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
