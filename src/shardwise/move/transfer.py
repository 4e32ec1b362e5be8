"""An exchange on processes: pack what others need, run one collective per round (or send a message per peer), and put
what was received to its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.comm.messages import (
    ALL_GATHER,
    REDUCE_SCATTER,
    WIRE,
    Along,
    Work,
    as_wire,
    start_sends,
    start_swap,
    width,
)
from shardwise.comm.reduction import REDUCTIONS, reduce_parts
from shardwise.layout.region import Region, region_size, run_start
from shardwise.move.pack import pick, place
from shardwise.move.schedule import BUFFER, Laid, Member, Pieces, Put, Round, Routes, Shape, Span, round_of
from shardwise.torch_private.tensors import foreach_copy_, in_memory

Tensors = Sequence[torch.Tensor]


class Exchanged:
    """The plan of an exchange: what a transfer needs to know of it."""

    reduce_op = "sum"
    rounds = 1
    zeros = False  # whether elements that no rank sends are zero
    is_local = False  # whether no rank sends anything to another
    kept: dict[Any, Any]  # what was worked out before

    def routes(self, member: Member) -> Routes:
        """What a member sends and takes."""
        raise NotImplementedError

    def sends_separately(self, along: Along) -> bool:
        """Whether every peer gets a separate message. All ranks must give the same answer."""
        return False

    def native(self, along: Along) -> Native | None:
        """The function that runs the exchange as one, faster, collective of the backend's own; None if it has none."""
        return None


class Course(NamedTuple):
    """What one rank does in an exchange, independent of the values."""

    shapes: Sequence[Shape]  # of the results
    rounds: tuple[Round, ...]
    native: Native | None
    separate: bool
    stays: Mapping[int, int]
    most: tuple[int, int]  # elements of the largest buffers, out and in
    one_round: bool


class Transfer:
    """One run of an exchange. Making it begins the first round. `finish` waits, runs the other rounds and returns the
    new tensors, which are in `out` from the start."""

    __slots__ = ("along", "buffers", "course", "keeping", "out", "plain", "plan", "sources", "work")

    def __init__(
        self, plan: Exchanged, sources: Tensors, me: Member, along: Along, into: list[torch.Tensor] | None = None
    ) -> None:
        self.plan, self.along = plan, along
        self.sources = list(map(_resolved, sources))
        self.plain = list(map(begins_its_memory, self.sources))  # then the place of any view is known
        self.course = course = course_of(plan, me, along)
        like = self.sources[0]
        self.out = self._room(like, course) if into is None else into
        # one pair of buffers for all rounds: a backend may release the tensors of a round late
        out, into_ = course.most
        self.buffers = [like.new_empty(out) if out else None, like.new_empty(into_) if into_ else None]
        self.keeping: Any = None  # tensors that must stay alive until the collective is done
        self.work = self._begin(course.rounds[0])
        if into is not None:
            for after, before in course.stays.items():
                into[after].copy_(self.sources[before])

    def _room(self, like: torch.Tensor, course: Course) -> list[torch.Tensor]:
        """Empty tensors for the results. A tensor that does not move is used as it is."""
        make, stays = like.new_zeros if self.plan.zeros else like.new_empty, course.stays
        if not stays:
            return [make(shape) for shape in course.shapes]
        return [self.sources[stays[i]] if i in stays else make(shape) for i, shape in enumerate(course.shapes)]

    def finish(self) -> list[torch.Tensor]:
        for i, one in enumerate(self.course.rounds):
            if i:
                self.work = self._begin(one)
            if self.work is not None:
                self.work.wait()
            if one.puts:
                self._put_all(one.puts)
        self.keeping = self.work = None
        self.buffers = [None, None]
        return self.out

    def _begin(self, one: Round) -> Work | None:
        if self.course.native is not None:
            return self.course.native(self)
        packed, received = self.buffers if self.course.one_round else self._buffers_of(one)
        if packed is not None:
            _copy_all(
                [view for room, _ in one.packs for view in _laid(packed, room)],
                [view for _, pieces in one.packs for view in self._own(pieces)],
            )
        work = (self._send_separately if self.course.separate else self._send_at_once)(one, packed, received)
        if one.meanwhile:
            self._put_all(one.meanwhile)
        return work

    def _buffers_of(self, one: Round) -> list[torch.Tensor | None]:
        """The buffers of a round; none where its parts are sent from and received into their places."""
        return [buffer if n else None for buffer, n in zip(self.buffers, (one.packed, one.received), strict=True)]

    def _send_at_once(self, one: Round, packed: torch.Tensor | None, received: torch.Tensor | None) -> Work:
        wide, sizes, counts = width(self.sources[0].dtype), one.sizes, one.counts
        if wide > 1:
            sizes, counts = [n * wide for n in sizes], [n * wide for n in counts]
        return start_swap(
            self._run(one.takes, self.out, received, wide),
            sizes,
            self._run(one.sends, self.sources, packed, wide),
            counts,
            self.along,
        )

    def _run(
        self, spans: Sequence[Span], tensors: list[torch.Tensor], buffer: torch.Tensor | None, wide: int
    ) -> torch.Tensor:
        """The contiguous memory of these spans together, in the form that is sent."""
        if not spans:
            return as_wire(self.sources[0].new_empty(0))
        x = buffer if buffer is not None else self._contiguous(tensors, spans[0].slot)
        start, stop = spans[0].start, spans[-1].stop
        if x.dtype in WIRE:
            if x is buffer and stop - start == x.numel():
                return x
            return x.as_strided((stop - start,), (1,), x.storage_offset() + start)
        return as_wire(x)[start * wide : stop * wide]

    def _send_separately(self, one: Round, packed: torch.Tensor | None, received: torch.Tensor | None) -> Work:
        out = self._messages(one.sends, packed, self.sources)
        return start_sends(out, self._messages(one.takes, received, self.out), self.along)

    def _messages(
        self, spans: Sequence[Span], buffer: torch.Tensor | None, tensors: list[torch.Tensor]
    ) -> list[tuple[int, torch.Tensor]]:
        """The contiguous memory for, or from, each peer, in the form that is sent."""
        messages, known, wire = [], None, None
        for peer, slot, start, stop in spans:
            if wire is None or slot != known:
                x = buffer if slot == BUFFER else self._contiguous(tensors, slot)
                known, wire, first, wide = slot, *_as_run(x)  # type: ignore[arg-type]
            messages.append((peer, wire.as_strided(((stop - start) * wide,), (1,), first + start * wide)))
        return messages

    def _contiguous(self, tensors: list[torch.Tensor], slot: int) -> torch.Tensor:
        """The tensor, contiguous. A source may have holes in memory, a result has none."""
        if not tensors[slot].is_contiguous():
            tensors[slot], self.plain[slot] = tensors[slot].contiguous(), True
        return tensors[slot]

    def _own(self, pieces: Pieces) -> Sequence[torch.Tensor]:
        """These pieces of the tensors that this rank held before."""
        if pieces.whole or (pieces.starts is not None and all(self.plain)):
            return _seen(self.sources, pieces)
        places = zip(pieces.slots, pieces.regions_in([x.shape for x in self.sources]), strict=True)
        return [pick(self.sources[slot], region) for slot, region in places]

    # -- what came ------------------------------------------------------------------------------------------
    def _put_all(self, puts: Sequence[Put]) -> None:
        rooms: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for put in puts:
            if put.is_copy:
                rooms += _seen(self.out, put.into)
                values += self._values(put.parts[0])
            else:
                self._put(put)
        _copy_all(rooms, values)

    def _values(self, part: Laid | Pieces) -> Sequence[torch.Tensor]:
        return _laid(self.buffers[1], part) if isinstance(part, Laid) else self._own(part)  # type: ignore[arg-type]

    def _put(self, put: Put) -> None:
        """Write parts to their places. Sums are added up in the order of coordinates, so that all ranks that need one
        get the same."""
        by_piece = list(zip(*map(self._values, put.parts), strict=True))
        reduce_op = self.plan.reduce_op
        if put.into.are_seen:
            for room, values in zip(_seen(self.out, put.into), by_piece, strict=True):
                if not put.in_place:
                    room.copy_(values[0])
                for value in values if put.in_place else values[1:]:
                    REDUCTIONS[reduce_op](room, value, out=room)  # type: ignore[call-arg]
            return
        for slot, region, values in zip(put.into.slots, put.into.regions or (), by_piece, strict=True):
            out = self.out[slot]
            parts = [pick(out, region), *values] if put.in_place else list(values)
            place(out, region, parts[0] if len(parts) == 1 else reduce_parts(parts, reduce_op))


def _seen(tensors: Sequence[torch.Tensor], pieces: Pieces) -> list[torch.Tensor]:
    """Pieces of contiguous tensors, as views."""
    slots, shapes, strides, starts, *_ = pieces
    if strides is None or starts is None:
        return [tensors[slot] for slot in slots]
    if len(slots) == 1:
        return [tensors[slots[0]].as_strided(shapes[0], strides[0], starts[0])]
    return list(map(torch.as_strided, [tensors[slot] for slot in slots], shapes, strides, starts))


def _as_run(x: torch.Tensor) -> tuple[torch.Tensor, int | torch.SymInt, int]:
    """A contiguous tensor in the form that is sent: its memory in a dtype that backends carry, where it begins, and how
    many elements of that dtype stand for one of the tensor's."""
    if x.dtype in WIRE:
        return x, x.storage_offset(), 1
    wire = as_wire(x)
    return wire, wire.storage_offset(), width(x.dtype)


def _laid(buffer: torch.Tensor, laid: Laid) -> list[torch.Tensor]:
    """The pieces in a buffer, as views of it."""
    out: list[torch.Tensor] = []
    for view, is_many in laid.views:
        found = buffer.as_strided(*view)
        if is_many:
            out += found.unbind()
        else:
            out.append(found)
    return out


Native = Callable[[Transfer], "Work | None"]


def course_of(plan: Exchanged, me: Member, along: Along) -> Course:
    """What `me` does in an exchange; computed once."""
    key = ("course", me, along.backend, along.group is None)
    found = plan.kept.get(key)
    if found is None:
        native, routes = plan.native(along), plan.routes(me)
        # gloo has no collective that is safe where ranks run different programs: messages then, each from its place
        separate = along.group is None or along.backend == "gloo" or plan.is_local or plan.sends_separately(along)
        rounds = [round_of(routes, me, along.peers, i, plan.rounds, separate) for i in range(plan.rounds)]
        rounds = [_NO_ROUND] if native else rounds
        most = (max(one.packed for one in rounds), max(one.received for one in rounds))
        found = plan.kept[key] = Course(
            routes.needed, tuple(rounds), native, separate, routes.stays, most, plan.rounds == 1
        )
    return found


_NO_ROUND = Round([], [], (), 0, 0, (), (), (), ())


def _resolved(x: torch.Tensor) -> torch.Tensor:
    """The tensor with its values in memory: pending conjugations, negations and zeros are carried out."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else in_memory(x)


def begins_its_memory(x: torch.Tensor) -> bool:
    """Whether it is contiguous and begins at the start of its memory. Then the place of any view of it is known in
    advance."""
    return x.is_contiguous() and not x.storage_offset()


def _copy_all(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """One call for thousands of small pieces."""
    if len(into) == 1:
        into[0].copy_(values[0])
    elif into:
        foreach_copy_(into, values)


# -- what a backend does by itself -------------------------------------------------------------------------
def gather_in_order(transfer: Transfer) -> Work | None:
    """An all-gather whose parts, one rank after another, are the result."""
    out, along = transfer.out[0], transfer.along
    if not out.numel():
        return None
    transfer.keeping = as_wire(transfer.sources[0])
    return getattr(dist, ALL_GATHER)(as_wire(out), transfer.keeping, group=along.group, async_op=True)


def reduce_and_scatter(transfer: Transfer) -> Work | None:
    """A reduce-scatter of the backend: it adds up the parts of the sum."""
    along, source = transfer.along, transfer.sources[0]
    out = transfer.out[0].view(-1)
    if not out.numel():
        return None
    regions, in_order = _by_peer(transfer.plan, along.peers[dist.get_rank(along.group)], along, source.shape)
    if in_order and source.is_contiguous():
        transfer.keeping = source.view(-1)
    else:
        transfer.keeping = torch.cat([pick(source, region).reshape(-1) for region in regions])
    return getattr(dist, REDUCE_SCATTER)(out, transfer.keeping, group=along.group, async_op=True)


def _by_peer(plan: Exchanged, me: Member, along: Along, shape: Shape) -> tuple[list[Region], bool]:
    """What each peer gets of a tensor of this shape, and whether these parts, peer after peer, are exactly the tensor's
    memory."""
    found = plan.kept.get(("by peer", me))
    if found is None:
        sent = plan.routes(me).sends
        regions = [region for peer in along.peers for region in sent[peer].regions_in([shape])]
        ends = itertools.accumulate(map(region_size, regions), initial=0)
        in_order = all(run_start(region, shape) == end for region, end in zip(regions, ends))  # the last end has none
        found = plan.kept["by peer", me] = regions, in_order
    return found
