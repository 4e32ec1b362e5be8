"""A routed step on a process group: pack what others need, one collective a round, put what came where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.comm.base import Coords
from shardwise.comm.boxes import pick, place
from shardwise.comm.schedule import Part, Put, Round, round_of
from shardwise.comm.simulation import REDUCTIONS, reduce_parts
from shardwise.comm.swap import start_all_to_all, start_sends
from shardwise.comm.wire import WIRE, as_wire, width

# torch 2.13 has new names for these two
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_POINT_TO_POINT = ("gloo", "nccl")  # backends that are known to send from rank to rank


class Along(NamedTuple):
    """Those who take part: their coordinates and global ranks in the order of their group, and the group if they have
    one."""

    peers: tuple[Coords, ...]
    ranks: tuple[int, ...]
    group: Any
    backend: str
    in_order: bool  # whether ranks ascend with coordinates


class Course(NamedTuple):
    """What one rank does in a step, whatever the values."""

    shape: tuple[int, ...]  # of the result
    rounds: tuple[Round, ...]
    native: Any  # how the backend does it all, or None
    apart: bool  # whether peers are sent to one by one
    most: tuple[int, int]  # elements of the largest buffers, out and in


class Transfer:
    """One run of a routed step. The first round is under way once this is made; `finish` waits, runs the others and
    returns the new local tensor."""

    def __init__(self, step: Any, local: torch.Tensor, me: Coords, along: Along) -> None:
        if local.is_conj() or local.is_neg():
            local = local.resolve_conj().resolve_neg()
        self.step, self.local, self.along = step, local, along
        self.plain = local.is_contiguous() and not local.storage_offset()  # so that a view of it is known beforehand
        self.course = course = _course(step, me, along)
        self.out = local.new_empty(course.shape) if step.inside is None else local.new_zeros(course.shape)
        # one pair of buffers for all rounds: a backend may let go of what it was given a little late
        self.buffers: Any = [local.new_empty(n) if n else None for n in course.most]
        self.kept: Any = None
        self.work = self._begin(course.rounds[0])

    def finish(self) -> torch.Tensor:
        for i, round in enumerate(self.course.rounds):
            if i:
                self.work = self._begin(round)
            if self.work is not None:
                self.work.wait()
            for put in round.puts:
                self._put(put)
        self.kept = self.work = self.buffers = None
        return self.out

    def _begin(self, round: Round) -> Any:
        if self.course.native is not None:
            return self.course.native(self)
        local, packed, received = self.local, self.local, self.out
        if round.packs:
            packed = self.buffers[0]
            for room, part in round.packs:
                room.of(packed).copy_(self._own(part))
        elif not local.is_contiguous():
            local = self.local = packed = local.contiguous()
        if round.received:
            received = self.buffers[1]
        self.kept = (packed, received)
        start = self._send_apart if self.course.apart else self._send_at_once
        work = start(round, packed, received)
        for put in round.meanwhile:
            self._put(put)
        return work

    def _send_at_once(self, round: Round, packed: torch.Tensor, received: torch.Tensor) -> Any:
        wide, sizes, counts = width(packed.dtype), round.sizes, round.counts
        if wide > 1:
            sizes, counts = [n * wide for n in sizes], [n * wide for n in counts]
        into, out = _run(received, round.takes, wide), _run(packed, round.sends, wide)
        return start_all_to_all(into, sizes, out, counts, self.along.group)

    def _send_apart(self, round: Round, packed: torch.Tensor, received: torch.Tensor) -> Any:
        wide, ranks = width(packed.dtype), self.along.ranks
        if not self.local.is_contiguous() and not all(span.buffered for span in round.sends):
            self.local = self.local.contiguous()
        ends = []
        for spans, buffer, own in ((round.sends, packed, self.local), (round.takes, received, self.out)):
            wires = {True: as_wire(buffer), False: as_wire(own)} if spans else {}
            ends.append([(ranks[p], wires[buffered][a * wide : b * wide]) for p, buffered, (a, b) in spans])
        return start_sends(ends[0], ends[1], self.along.group)

    def _own(self, part: Part) -> torch.Tensor:
        return part.view.of(self.local) if part.view is not None and self.plain else pick(self.local, part.box)

    def _put(self, put: Put) -> None:
        """Parts to where they belong; sums are added up in the order of coordinates, so that all who need one get
        the same."""
        parts = [self._own(p) if isinstance(p, Part) else p.of(self.kept[1]) for p in put.parts]
        if put.into.view is None:
            box = put.into.box
            parts = [pick(self.out, box), *parts] if put.in_place else parts
            place(self.out, box, parts[0] if len(parts) == 1 else reduce_parts(parts, self.step.reduce_op))
            return
        into = put.into.view.of(self.out)
        if not put.in_place:
            into.copy_(parts[0])
            del parts[0]
        for part in parts:
            REDUCTIONS[self.step.reduce_op](into, part, out=into)  # type: ignore[call-arg]

    # -- what a backend does by itself ----------------------------------------------------------------------
    def _stack(self) -> Any:
        """The parts, one rank after another, are the result."""
        if not self.out.numel():
            return None
        self.kept = as_wire(self.local)
        return getattr(dist, ALL_GATHER)(as_wire(self.out), self.kept, group=self.along.group, async_op=True)

    def _reduce(self) -> Any:
        """Parts of a sum that the backend adds up."""
        me = self.along.peers[dist.get_rank(self.along.group)]
        sent = self.step.outgoing(me)
        self.kept = torch.cat([pick(self.local, sent[peer]).reshape(-1) for peer in self.along.peers])
        group = self.along.group
        return getattr(dist, REDUCE_SCATTER)(self.out.view(-1), self.kept, group=group, async_op=True)


def _course(step: Any, me: Coords, along: Along) -> Course:
    key = ("course", me, along.backend, along.group is None)
    found = step.kept.get(key)
    if found is None:
        native = _native(step, along)
        apart = along.group is None or (step.apart and along.backend in _POINT_TO_POINT)
        rounds = () if native else tuple(round_of(step, me, along.peers, i, apart) for i in range(step.rounds))
        most = (max((r.packed for r in rounds), default=0), max((r.received for r in rounds), default=0))
        found = step.kept[key] = Course(step.result_shape(me), rounds or (_NO_ROUND,), native, apart, most)
    return found


def _native(step: Any, along: Along) -> Any:
    """The collective of the backend that is quicker than sending to each: gloo has none."""
    if along.group is None or along.backend == "gloo":
        return None
    if step.stacks and along.in_order:
        return Transfer._stack
    even = step.kind == "reduce_scatter" and step.even and step.rounds == 1 and step.reduce_op == "sum"
    return Transfer._reduce if even and step.dst.dtype in WIRE and along.backend == "nccl" else None


_NO_ROUND = Round([], [], (), 0, 0, (), (), (), ())


def _run(x: torch.Tensor, spans: Sequence[Any], wide: int) -> torch.Tensor:
    """The part of a contiguous tensor that the spans cover together, as it travels."""
    start, stop = (spans[0].run[0], spans[-1].run[1]) if spans else (0, 0)
    if x.dtype in WIRE:
        return x.as_strided((stop - start,), (1,), x.storage_offset() + start)
    return as_wire(x)[start * wide : stop * wide]
