"""The plan of a load: who reads which span, who takes which part of it, in how many rounds. Integers only.

Every span that anybody needs is read once, by a process that needs much of it. Others of the same host take their parts
from its memory, those of other hosts get them in messages; a host reads a span itself where that is cheaper than the
messages. Spans are taken in the order of the disk, as many in a round as fit into the memory that a load may take. All
processes find the same plan; each keeps what concerns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.holders import Side
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.spans import MOST_SPAN, Needs, Part, Span, Takers, Turns, spans_of, up
from shardwise.checkpoint.storage import StorageLine
from shardwise.errors import CheckpointError

MEMORY = 64 << 20
NETWORK_BYTES_PER_SECOND = 1e9
_VARIANTS = 16  # ways in which the processes of a host take turns
_ROUND = 16 << 20  # bytes that a process reads for others in a round: what is read is still in a cache when it is taken


class Read(NamedTuple):
    """A span, who reads it, where it is in the reader's shared memory (None: nobody else needs it), and the parts of
    it that concern this process: its own, and as the reader those that travel."""

    name: str
    span: Span
    reader: int
    slot: int | None
    parts: tuple[Part, ...]


@dataclass
class LoadPlan:
    """What a load will do. `explain()` says it in words."""

    path: str
    ranks: tuple[int, ...]
    memory: int
    hosts: int = 1
    storage: StorageLine = StorageLine()
    total: int = 0  # bytes of the tensors that are loaded
    staged: bool = False
    rounds: list[list[Read]] = field(default_factory=list)  # this process's part of them
    disk: dict[int, int] = field(default_factory=dict)  # bytes that each process reads
    network: dict[int, int] = field(default_factory=dict)  # bytes that each process gets from others
    peak: int = 0  # bytes of buffers, on the process that has most
    arena: int = 0  # bytes of this process that others take from
    ahead: int = 0  # bytes for what is read before it is asked for
    direct: int = 0  # spans that more than one host reads, since that is cheaper than messages

    @property
    def seconds(self) -> float:
        """A guess: what the busiest process reads and receives."""
        busiest = max(
            self.storage.seconds(self.disk[rank]) + self.network[rank] / NETWORK_BYTES_PER_SECOND for rank in self.ranks
        )
        return busiest + 0.001 * len(self.rounds)

    def explain(self) -> str:
        """What is read from disk, what travels between processes, how much memory and time it takes."""
        read, how = sum(self.disk.values()), "measured" if self.storage.measured else "guessed"
        lines = [
            f"load of {_size(self.total)} from {self.path} into {len(self.ranks)} process(es) on {self.hosts} host(s), "
            f"{len(self.rounds)} round(s)",
            f"  from disk     {_size(read)} in all: {read / max(self.total, 1):.2f}x the tensors that are loaded"
            + (f"; {self.direct} span(s) by more than one host" if self.direct else ""),
            f"  memory        {_size(self.peak)} of buffers on a process, of at most {_size(self.memory)}"
            + ("; tensors change only once all was read" if self.staged else "; tensors change while reading"),
            f"  time          about {self.seconds:.2g} s ({self.storage.bandwidth / 1e9:.3g} GB/s from disk, {how}; "
            f"{NETWORK_BYTES_PER_SECOND / 1e9:g} GB/s between processes, guessed)",
        ]
        for rank in self.ranks[:16]:
            lines.append(
                f"  rank {rank:<8} {_size(self.disk[rank])} from disk, {_size(self.network[rank])} from others"
            )
        if len(self.ranks) > 16:
            lines.append(f"  ... and {len(self.ranks) - 16} more")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} TiB"


def plan(
    source: Source,
    sides: Mapping[str, Side],
    ranks: Sequence[int],
    me: int,
    memory: int,
    *,
    hosts: Sequence[int] | None = None,
    storage: StorageLine | None = None,
) -> LoadPlan:
    """The plan of a load of these tensors by these processes, as process `me` needs it.

    Args:
        hosts: For each process the number of its host; those of one host see each other's memory. By default each
            process is a host.
    """
    order = np.argsort(np.asarray(ranks), kind="stable")
    ordered = np.asarray(ranks, dtype=np.int64)[order]
    numbers = np.arange(len(ranks)) if hosts is None else np.asarray(hosts)[order]
    made = LoadPlan(str(source.path), tuple(ranks), memory, len(np.unique(numbers)), storage or StorageLine())
    held = Sum(len(ranks))
    counted: dict[tuple[int, int], np.ndarray] = {}
    for name, side in sides.items():
        key = id(side), source.entries[name].dtype.itemsize
        if key not in counted:
            _check_ranks(name, side, ordered)
            at = np.searchsorted(ordered, side.ranks)
            counted[key] = np.bincount(at, weights=side.tiles.volumes * key[1], minlength=len(ranks)).astype(np.int64)
        held.add(counted[key])
        made.total += source.entries[name].nbytes if len(side.ranks) else 0
    made.staged = int(held.per_rank.max(initial=0)) <= memory // 2
    rounds = _Rounds(made, source, ordered, numbers, int(np.searchsorted(ordered, me)))
    for name in sorted(sides, key=source.order):
        if len(sides[name].ranks):
            rounds.add(name, sides[name])
    rounds.finish()
    return made


def _check_ranks(name: str, side: Side, ranks: np.ndarray) -> None:
    outside = np.setdiff1d(side.ranks, ranks)
    if len(outside):
        raise CheckpointError(
            f"tensor {name!r}: ranks {outside[:8].tolist()} hold parts of it, but take no part in the load; call it "
            f"on all ranks of the tensor's mesh, with a process group that has them"
        )


class _Shift(NamedTuple):
    """One way in which the processes of each host share the reading of some spans. Bytes of each process: in memory,
    from disk, and those of the latter that it needs itself. Then what this host reads: the number of the span, who
    reads it, and the bytes before it in the memory of that process."""

    spaces: np.ndarray
    disk: np.ndarray
    own: np.ndarray
    mine: list[tuple[int, int, int]]
    top: int  # the most of `spaces`


class Sum:
    """A sum of arrays of which few are different: each is added once, so many times, when the sum is asked for."""

    def __init__(self, size: int) -> None:
        self._array = np.zeros(size, dtype=np.int64)
        self._times: dict[int, tuple[np.ndarray, int]] = {}

    def add(self, amounts: np.ndarray, times: int = 1) -> None:
        """Add an array, which must not change later."""
        self._times[id(amounts)] = amounts, self._times.get(id(amounts), (amounts, 0))[1] + times

    @property
    def per_rank(self) -> np.ndarray:
        """The sum; it may be changed in place."""
        for amounts, times in self._times.values():
            self._array += amounts * times
        self._times.clear()
        return self._array


class _Rounds:
    """Spans, put into rounds one after the other."""

    def __init__(self, made: LoadPlan, source: Source, ranks: np.ndarray, hosts: np.ndarray, me: int) -> None:
        self.made, self.source, self.ranks, self.hosts, self.me = made, source, ranks, hosts, me
        made.ahead = 2 * MOST_SPAN if made.memory >= 8 * MOST_SPAN else 0
        self.room = (made.memory // 2 if made.staged else made.memory) - made.ahead
        self.most = min(MOST_SPAN, self.room // 4, made.total // (4 * len(ranks)))  # of a span: all have some to read
        self.now: list[Read] = []
        self.any = False  # whether anybody has something in this round
        self.shared = Sum(len(ranks))  # bytes of each one's memory that others take from
        self.top = 0  # the most of these
        self.messages = np.zeros(len(ranks), dtype=np.int64)
        self.sent = False  # whether there are any
        self.disk, self.got = Sum(len(ranks)), Sum(len(ranks))
        self.block = 0  # the largest block, which is read before it is put anywhere
        self._needs: dict[object, Needs] = {}
        self._shifts: dict[tuple[int, int, int, int], _Shift] = {}

    def add(self, name: str, side: Side) -> None:
        needs = self._needs_of(name, side)
        self.got.add(needs.total)
        if self._all_direct(needs) and self._by_hosts(name, needs, 0, len(needs.spans)):
            return
        for i, takers in enumerate(needs.takers):
            if len(takers.who):
                self._one(name, needs, i, takers)

    def _needs_of(self, name: str, side: Side) -> Needs:
        entry, source = self.source.entries[name], self.source
        key = id(side), entry.shape, entry.dtype.itemsize, source.cut(name)
        if key not in self._needs:
            blocks = source.blocks(name)
            sizes = [source.size(name, i) for i in range(len(blocks))]
            spans = spans_of(blocks, sizes, side, entry.dtype.itemsize, self.most)
            self.block = max(self.block, *sizes)
            largest = max(*sizes, *(span.bytes for span in spans))
            if 3 * largest > self.room and largest > self.room // 2:
                raise CheckpointError(
                    f"memory={self.made.memory}: a block of tensor {name!r} takes {largest} bytes, and others to send "
                    f"it; give at least {4 * largest}"
                )
            self._needs[key] = Needs(spans, side, self.ranks, entry.dtype.itemsize)
        return self._needs[key]

    def _one(self, name: str, needs: Needs, i: int, takers: Takers) -> None:
        span = needs.spans[i]
        self.any = True
        disk, got, most = self.disk.per_rank, self.got.per_rank, takers.most
        reader = int(most[0] if len(most) == 1 else most[disk[most].argmin()])
        if len(takers.who) == 1:
            disk[reader] += span.disk
            got[reader] -= int(takers.amounts[0])
            self._keep(name, needs, i, reader, None, takers.who[:0])
            return
        who, padded, sent = takers.who[:0], takers.padded[:0], 0  # those of other hosts
        if self.made.hosts > 1:
            away = self.hosts[takers.who] != self.hosts[reader]
            who, padded = takers.who[away], takers.padded[away]
            sent = int(padded.sum())
        if sent and self._is_direct(span, sent):
            self._by_hosts(name, needs, i, i + 1)
            return
        self._make_room(span, reader, who, padded, sent)
        shared = self.shared.per_rank
        slot = int(shared[reader])
        shared[reader] += up(span.bytes)
        self.top = max(self.top, int(shared[reader]))
        if sent:
            self.sent = True
            self.messages[who] += padded
            self.messages[reader] += sent
        disk[reader] += span.disk
        got[reader] -= int(takers.amounts[np.searchsorted(takers.who, reader)])
        self._keep(name, needs, i, reader, slot, who)

    def _is_direct(self, span: Span, sent: int) -> bool:
        """Whether every host reads a span itself, rather than that one sends so many bytes of it to the others."""
        return self.made.storage.seconds(span.disk) < sent / NETWORK_BYTES_PER_SECOND or sent > self.room // 2

    def _all_direct(self, needs: Needs) -> bool:
        """Whether every span is read by several hosts, whichever process would read it for all."""
        if self.made.hosts == 1:
            return False
        if needs.all_direct is None:
            least = []
            for i, takers in enumerate(needs.takers):
                hosts = np.unique(self.hosts[takers.who], return_inverse=True)[1]
                here = np.bincount(hosts, weights=takers.padded) if len(hosts) else np.zeros(1)
                least.append(self._is_direct(needs.spans[i], int(takers.padded.sum() - here.max())))
            needs.all_direct = all(least)
        return needs.all_direct

    def _by_hosts(self, name: str, needs: Needs, first: int, last: int) -> bool:
        """On every host that needs some of a span one process reads it; they take turns. Whether several spans fit."""
        key = id(needs), first, last, self.made.direct // (last - first) % _VARIANTS
        if key not in self._shifts:
            self._shifts[key] = self._shift(needs.turns(self.hosts).of(first, last), key[-1])
        shift, most = self._shifts[key], min(self.room, _ROUND)
        if last - first > 1 and shift.top > most:
            return False
        top = shift.top
        if self.top:
            top = int((self.shared.per_rank + shift.spaces).max())
            if top > most:
                self.close()
                top = shift.top
        self.any = True
        self.made.direct += last - first
        for i, reader, before in shift.mine:
            slot = int(self.shared.per_rank[reader]) + before if self.top else before
            self._keep(name, needs, i, reader, slot, needs.takers[i].who[:0])
        self.shared.add(shift.spaces)
        self.top = top
        self.disk.add(shift.disk)
        self.got.add(shift.own, -1)
        return True

    def _shift(self, turns: Turns, number: int) -> _Shift:
        rows = turns.starts + (number + turns.span) % turns.counts
        readers, mine = turns.who[rows], []
        for row in np.flatnonzero(turns.host == self.hosts[self.me]).tolist():
            before = int(turns.spaces[:row][readers[:row] == readers[row]].sum())
            mine.append((int(turns.span[row]), int(readers[row]), before))
        own = self._sum(readers, turns.amounts[rows])
        spaces = self._sum(readers, turns.spaces)
        return _Shift(spaces, self._sum(readers, turns.disk), own, mine, int(spaces.max()))

    def _sum(self, who: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        return np.bincount(who, weights=amounts, minlength=len(self.ranks)).astype(np.int64)

    def _keep(self, name: str, needs: Needs, i: int, reader: int, slot: int | None, travels: np.ndarray) -> None:
        """Note what concerns this process."""
        if reader == self.me:
            parts = needs.parts(i, np.append(travels, self.me))
        elif slot is not None:
            parts = needs.parts(i, np.array([self.me]))
        else:
            return
        if parts or reader == self.me:
            self.now.append(Read(name, needs.spans[i], int(self.ranks[reader]), slot, parts))

    def _make_room(self, span: Span, reader: int, who: np.ndarray, padded: np.ndarray, sent: int) -> None:
        """Begin another round where this span would be too much for this one; `sent` bytes of it travel to others."""
        shared = self.shared.per_rank
        used = int(shared[reader]) + up(span.bytes)
        full = used > min(self.room, _ROUND) or used + int(self.messages[reader]) + sent > self.room
        full = full or (sent > 0 and bool((shared[who] + self.messages[who] + padded > self.room).any()))
        if full and self.top:
            self.close()
            self.any = True

    def close(self) -> None:
        if self.any:
            self.made.rounds.append(self.now)
            here = int(self.shared.per_rank[self.me]) if self.top > self.made.arena else 0  # at most the top
            self.made.arena = max(self.made.arena, here)
            peak = int((self.shared.per_rank + self.messages).max()) if self.sent else self.top
            self.made.peak = max(self.made.peak, peak)
        self.now, self.any = [], False
        self.shared, self.top = Sum(len(self.ranks)), 0
        if self.sent:
            self.messages[:] = 0
            self.sent = False

    def finish(self) -> None:
        self.close()
        self.made.peak += self.block + self.made.ahead
        self.made.disk = dict(zip(self.ranks.tolist(), self.disk.per_rank.tolist()))
        self.made.network = dict(zip(self.ranks.tolist(), self.got.per_rank.tolist()))
