"""Before each collective, ranks compare what they are about to communicate.

Each sends the other ranks of the collective a hash of all that must be equal: the op, its layouts, the step of its
move, how many collectives these ranks have had, the line of the user's program, and what was drawn at random. Where the
hashes differ, the ranks exchange the values behind them, and all raise the same error.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.guard import Guard, crc
from shardwise.comm.messages import Along, clocks
from shardwise.comm.peers import board
from shardwise.comm.record import Note
from shardwise.comm.watch import errors
from shardwise.errors import RanksDifferError

_NUMBERS, _TEXTS = 0x60000001, 0x60000002  # tags that no other message has
_ROOM = 2000  # bytes of a text


@dataclass(frozen=True, slots=True)
class CheckedMove:
    """One collective that a rank has reached.

    Attributes:
        number: How many collectives these ranks have had in their group, with this one.
        op: The operation that communicates.
        backward: Whether it is part of a backward pass.
        kind: The collective: all_gather, all_reduce, all_to_all, ...
        where: The mesh axis, or what else joins the ranks.
        ranks: The global ranks that take part.
        source: file:line of the user's program.
        drawn: How many random ops the ranks had run.
        waits: Whether it was begun before, and is waited for here.
        layouts: What moves, and how, and the op's arguments that are no tensors; empty where nothing is known.
    """

    number: int
    op: str
    backward: bool
    kind: str
    where: str
    ranks: tuple[int, ...]
    source: str
    drawn: int
    waits: bool
    _guard: Guard

    @property
    def layouts(self) -> str:
        return self._guard.moves

    def __str__(self) -> str:
        op = f"{self.op}{' (backward)' if self.backward else ''}: " if self.op not in ("", self.kind) else ""
        waits = "the wait for " if self.waits else ""
        moved = f", {self.layouts}" if self.layouts else ""
        drawn = f", after {self.drawn} random ops" if self.drawn else ""
        return f"{waits}{op}{self.kind} on {self.where}{moved} (number {self.number}{drawn}) at {self.source}"


class Checker:
    """Compares the ranks before each collective, and remembers the last collectives of this rank.

    Attributes:
        record: The last collectives, oldest first.
    """

    def __init__(self, keep: int, lines: bool) -> None:
        self.record: deque[CheckedMove] = deque(maxlen=keep)
        self._lines = lines
        self._alongs: dict[tuple[int, ...], Along] = {}  # the groups of ranks that it has compared with

    def __call__(self, guard: Guard) -> None:
        """Compare what this rank is about to do with what the others are."""
        along, source, drawn = guard.along, guard.line(), guard.clock.drawn
        entry = CheckedMove(
            guard.number, guard.note.op, guard.note.backward, guard.kind, guard.where, along.ranks, source, drawn.ops,
            guard.begun, guard,
        )  # fmt: skip
        self.record.append(entry)
        line = crc(os.path.basename(source)) if self._lines else 0
        self._compare(along, hash((guard.tag, line, *drawn, guard.begun)), entry)

    def leave(self, source: str) -> None:
        """Tell the others that this rank stops comparing. They find out at their next collective."""
        for along in list(self._alongs.values()):
            with Guard(along, "end", "check_ranks()", "", Note("", source=source)):
                pass

    def _compare(self, along: Along, number: int, entry: CheckedMove) -> None:
        if len(along.ranks) == 1 or along.backend == "fake":
            return
        self._alongs.setdefault(along.ranks, along)
        mine = torch.tensor([number], dtype=torch.int64)
        numbers = [int(x) for x in _exchange(mine, along, _NUMBERS)]
        if len(set(numbers)) > 1:
            text = json.dumps(str(entry)).encode()[:_ROOM]
            texts = _exchange(torch.tensor([*text, *bytes(_ROOM - len(text))], dtype=torch.uint8), along, _TEXTS)
            said = [bytes(x.tolist()).rstrip(b"\0").decode(errors="replace").strip('"') for x in texts]
            difference = _difference(along.ranks, numbers, said)
            here = board()
            if here is not None:  # others may wait for these ranks
                here.end("verdict", difference)
                errors.stand()
            _forget_draws(along.ranks)  # all of them know, and may seed their generators again
            raise RanksDifferError(difference)


def _forget_draws(ranks: Sequence[int]) -> None:
    """Have these ranks compare their draws from the beginning, on the meshes that have no other ranks."""
    for clock in clocks.values():
        for mesh in clock.meshes.values():
            if set(mesh.ranks) <= set(ranks):
                mesh.forget()


def _exchange(mine: torch.Tensor, along: Along, tag: int) -> list[torch.Tensor]:
    """The tensors of all ranks, in their order."""
    group, places, me = _channel(along)
    out = [mine if place == me else torch.empty_like(mine) for place in places]
    works = [group.recv([x], place, tag) for x, place in zip(out, places, strict=True) if place != me]
    works += [group.send([mine], place, tag) for place in places if place != me]
    for work in works:
        work.wait()
    return out


_side: list[Any] = []  # a group for comparing, where the world's group cannot carry CPU tensors


def _channel(along: Along) -> tuple[Any, Sequence[int], int]:
    """A gloo group of these ranks, their numbers in it, and this rank's number."""
    if along.backend == "gloo" and along.group is not None:
        return along.group, range(len(along.ranks)), along.group.rank()
    if along.backend == "gloo":
        return dist.group.WORLD, along.ranks, dist.get_rank()
    if not _side:
        _side.append(dist.new_group(backend="gloo"))
    return _side[0], along.ranks, dist.get_rank()


def _difference(ranks: Sequence[int], numbers: Sequence[int], said: Sequence[str]) -> str:
    """The text that says which ranks differ, and in what. It is the same on all ranks."""
    (most, count), *rest = Counter(numbers).most_common()
    groups = {n: [r for r, number in zip(ranks, numbers, strict=True) if number == n] for n in dict.fromkeys(numbers)}
    texts = dict(zip(numbers, said, strict=True))
    head = "the ranks run different programs: "
    if rest and rest[0][1] == count:
        return head + "; ".join(f"{_names(who)} came to {texts[n]}" for n, who in groups.items())
    others = "; ".join(f"{_names(who)} came to {texts[n]}" for n, who in groups.items() if n != most)
    return f"{head}{others}; the others, {_names(groups[most])}, to {texts[most]}"


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
