"""What one rank does in one round of an exchange, computed once from integers: what it packs, how much it sends to and
receives from each peer, and where the received data goes.

It follows from the rank's routes. These come from two layouts on one mesh (exchange.py), in time that does not grow
with the mesh, or from any two sets of tiles (tiles.py).

A message that is contiguous in memory is sent from its place, or received directly into its place. All else goes
through a buffer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.layout.region import Region, View, box_at, cut_region, region_shape, run_start, view_of, whole_region
from shardwise.layout.shapes import contiguous_stride

Member = Any  # a participant: coordinates on a mesh, or a global rank
Shape = tuple[int, ...]
Place = tuple[int, Region]  # which of a rank's tensors, and where in it


class Pieces(NamedTuple):
    """Regions of a rank's tensors that are handled together, one after the other. They are stored as columns, since
    there may be thousands.

    Where every piece is a box, `strides` and `starts` are the arguments with which torch.as_strided makes it a view of
    its tensor. They are empty where all pieces are `whole`, and where a piece has a side of several intervals, which no
    view can show.
    """

    slots: tuple[int, ...]  # which tensor
    shapes: tuple[Shape, ...]
    strides: tuple[Shape, ...] | None
    starts: tuple[int, ...] | None
    regions: tuple[Region, ...] | None  # None where they are not known: see `regions_in`
    whole: bool  # every piece is all of its tensor

    @staticmethod
    def of(places: Iterable[Place], tensors: Sequence[Shape]) -> Pieces:
        """The pieces for these regions of tensors of these shapes, without empty ones."""
        full = [(slot, region) for slot, region in places if all(region)]
        shapes = tuple(region_shape(region) for _, region in full)
        slots, regions = tuple(slot for slot, _ in full), tuple(region for _, region in full)
        whole = all(shape == tuple(tensors[slot]) for slot, shape in zip(slots, shapes, strict=True))
        views = [] if whole else [view_of(region, tensors[slot]) for slot, region in full]
        if whole or None in views:
            return Pieces(slots, shapes, None, None, regions, whole)
        strides, starts = (tuple(column) for column in list(zip(*views, strict=True))[1:])
        return Pieces(slots, shapes, strides, starts, regions, whole)

    def some(self, first: int, stop: int) -> Pieces:
        """The pieces with the numbers `first` to `stop`, not including `stop`."""
        if stop - first == len(self.slots):
            return self
        return Pieces(
            self.slots[first:stop],
            self.shapes[first:stop],
            self.strides and self.strides[first:stop],
            self.starts and self.starts[first:stop],
            self.regions and self.regions[first:stop],
            self.whole,
        )

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def are_seen(self) -> bool:
        """Whether every piece is a view of its tensor."""
        return self.whole or self.starts is not None

    def regions_in(self, tensors: Sequence[Shape]) -> Sequence[Region]:
        """The regions, in tensors of these shapes."""
        if self.regions is not None:
            return self.regions
        if self.whole or self.starts is None:
            return [whole_region(shape) for shape in self.shapes]
        columns = zip(self.slots, self.starts, self.shapes, strict=True)
        return [box_at(start, shape, tensors[slot]) for slot, start, shape in columns]


class Route(NamedTuple):
    """Pieces of what a rank will hold, and their sources: one rank, or in order all ranks that have a part of the
    sum."""

    sources: tuple[Member, ...]
    pieces: Pieces


class Routes(NamedTuple):
    """One rank's part of an exchange.

    What one rank sends another is one message: the pieces in `sends`, one after the other. The receiver finds the same
    pieces, in the same order, in the routes that have the sender among their sources. What a rank keeps is what it
    sends itself, except for whole tensors that stay.
    """

    sends: Mapping[Member, Pieces]
    takes: Sequence[Route]
    held: Sequence[Shape]  # the shapes of the tensors the rank has
    needed: Sequence[Shape]  # and of those it will have
    stays: Mapping[int, int] = {}  # tensors that stay what they are, in no route: their slots after and before


BUFFER = -1  # the slot of the buffer


class Span(NamedTuple):
    """The data for or from one peer, contiguous in one of this rank's tensors or in the buffer."""

    peer: int  # its number in the group
    slot: int
    start: int
    stop: int


class Laid(NamedTuple):
    """Pieces one after the other in a buffer. Neighbours of the same shape are one view, which is then taken apart
    along its first dim."""

    views: tuple[tuple[View, bool], ...]  # and whether a view is to be taken apart

    @staticmethod
    def at(start: int, shapes: Iterable[Shape]) -> Laid:
        views = []
        for shape, group in itertools.groupby(shapes):
            n, size, stride = len(list(group)), math.prod(shape), contiguous_stride(shape)
            views.append((View(shape, stride, start) if n == 1 else View((n, *shape), (size, *stride), start), n > 1))
            start += n * size
        return Laid(tuple(views))


class Put(NamedTuple):
    """Parts that are written to pieces of the result, added up if there are several."""

    into: Pieces
    in_place: bool  # the first part is there already
    parts: tuple[Laid | Pieces, ...]  # of what was received, or of this rank's own tensors
    is_copy: bool  # it is one part, and its places are views


@dataclass(frozen=True)
class Round:
    """One exchange of a rank with its peers; sizes are in elements."""

    counts: list[int]  # to each peer
    sizes: list[int]  # from each peer
    packs: tuple[tuple[Laid, Pieces], ...]  # where in the buffer that is sent what is copied
    packed: int
    received: int
    sends: tuple[Span, ...]
    takes: tuple[Span, ...]
    meanwhile: tuple[Put, ...]  # what needs nothing from others
    puts: tuple[Put, ...]

    @property
    def buffers(self) -> int:
        return self.packed + self.received


def round_of(routes: Routes, me: Member, peers: Sequence[Member], number: int, rounds: int, separate: bool) -> Round:
    """Round `number` of an exchange in `rounds`, for one rank. With `separate`, every peer gets a message of its own.
    Without, all that is sent is one run of memory, cut up in the order of `peers`, and so is all that is received.
    Elements that stay on this rank may then be part of the run, if that saves a buffer."""
    alone = _Sides(routes, me, peers, number, rounds, own=False)
    if separate:
        return alone.one_by_one()
    ways = [alone.at_once()]
    if ways[0].buffers and rounds == 1 and me in routes.sends:
        ways.append(_Sides(routes, me, peers, number, rounds, own=True).at_once())
    return min(ways, key=lambda way: way.buffers)


Message = tuple[int, list[Pieces]]  # a peer's number in the group, and what goes to or comes from it
Packs = list[tuple[Laid, Pieces]]


class _Sides:
    """Both sides of a round: the messages sent and those received, with or without this rank's message to itself."""

    def __init__(
        self, routes: Routes, me: Member, peers: Sequence[Member], number: int, rounds: int, own: bool
    ) -> None:
        self.me, self.own, self.first = me, own, number == 0  # `own`: whether the own part travels with the others'
        self.held, self.needed = routes.held, routes.needed
        self.number = {peer: i for i, peer in enumerate(peers)}

        def cut(pieces: Pieces, tensors: Sequence[Shape]) -> Pieces:
            if rounds == 1:
                return pieces
            regions = (cut_region(region, rounds, number) for region in pieces.regions_in(tensors))
            return Pieces.of(zip(pieces.slots, regions, strict=True), tensors)

        self.sent = {peer: cut(pieces, self.held) for peer, pieces in routes.sends.items()}
        self.kept = routes.sends.get(me)  # uncut: what stays is copied once, in the first round
        self.takes = [(sources, cut(pieces, self.needed), pieces) for sources, pieces in routes.takes]

    # -- the two ways ---------------------------------------------------------------------------------------
    def at_once(self) -> Round:
        leaving, coming = self._leaving(), self._coming()
        sends = _as_one_run(leaving, self.held)
        direct = all(sum(self._travels(p) for p in sources) <= 1 for sources, _, _ in self.takes)
        takes = _as_one_run(coming, self.needed) if direct and self._may_start_in_place() else None
        packs: Packs = []
        if sends is None:
            sends = _lined_up(leaving)
            for span, (_, blocks) in zip(sends, leaving, strict=True):
                packs += _packed(blocks, span.start)
        return self._round(sends, packs, _lined_up(coming) if takes is None else takes)

    def one_by_one(self) -> Round:
        sends: list[Span] = []
        packs: Packs = []
        places: dict[tuple[Pieces, ...], int] = {}  # what several peers get is packed once
        at = 0
        for peer, blocks in self._leaving():
            direct = _direct(peer, blocks, self.held)
            if direct is None:
                key, size = tuple(blocks), _size(blocks)
                if key not in places:
                    places[key] = at
                    packs += _packed(blocks, at)
                    at += size
                direct = Span(peer, BUFFER, places[key], places[key] + size)
            sends.append(direct)
        takes: list[Span] = []
        alone = [sources for sources, _, _ in self.takes if sum(map(self._travels, sources)) == 1]
        in_place = {self.number[peer] for sources in alone for peer in sources} if self._may_start_in_place() else set()
        at = 0
        for peer, blocks in self._coming():
            direct = _direct(peer, blocks, self.needed) if peer in in_place else None
            if direct is None:
                direct = Span(peer, BUFFER, at, at + _size(blocks))
                at = direct.stop
            takes.append(direct)
        return self._round(sends, packs, takes)

    # -- messages -------------------------------------------------------------------------------------------
    def _travels(self, peer: Member) -> bool:
        return self.own or peer != self.me

    def _may_start_in_place(self) -> bool:
        """Whether received data may be written to the result before this rank's own part is added. The order of two
        parts does not matter; that of more decides how the sum is rounded."""
        return all(len(sources) <= 2 for sources, _, _ in self.takes)

    def _leaving(self) -> list[Message]:
        return self._in_order(self.sent.items())

    def _coming(self) -> list[Message]:
        return self._in_order((peer, pieces) for sources, pieces, _ in self.takes for peer in sources)

    def _in_order(self, blocks: Iterable[tuple[Member, Pieces]]) -> list[Message]:
        """The messages that are sent, in the order of the group, without empty ones."""
        found: dict[int, list[Pieces]] = {}
        for peer, pieces in blocks:
            if self._travels(peer) and pieces.slots:
                found.setdefault(self.number[peer], []).append(pieces)
        return sorted(found.items())

    # -- put together ---------------------------------------------------------------------------------------
    def _round(self, sends: Sequence[Span], packs: Packs, takes: Sequence[Span]) -> Round:
        counts, sizes = [0] * len(self.number), [0] * len(self.number)
        for spans, numbers in ((sends, counts), (takes, sizes)):
            for peer, _, start, stop in spans:
                numbers[peer] = stop - start
        meanwhile, puts = self._all_puts({span.peer: span for span in takes})
        return Round(
            counts,
            sizes,
            tuple(packs),
            packed=max((span.stop for span in sends if span.slot == BUFFER), default=0),
            received=max((span.stop for span in takes if span.slot == BUFFER), default=0),
            sends=tuple(sends),
            takes=tuple(takes),
            meanwhile=tuple(meanwhile),
            puts=tuple(put for put in puts if put.parts),
        )

    def _all_puts(self, came: dict[int, Span]) -> tuple[list[Put], list[Put]]:
        """What is done for each route: first those that need nothing from other ranks, then the rest."""
        meanwhile: list[Put] = []
        puts: list[Put] = []
        read = {peer: span.start for peer, span in came.items()}  # how far each message has been taken
        kept, own_parts = _in_turn(self.kept), _in_turn(self.sent.get(self.me))
        for sources, pieces, uncut in self.takes:
            mine = (kept(uncut), own_parts(pieces)) if self.me in sources else (None, None)
            if sources == (self.me,) and not self.own:  # nothing comes: all at once, while the others' travels
                if self.first and uncut.slots:
                    meanwhile.append(self._put(sources, uncut, came, read, mine[0]))
            elif pieces.slots:
                puts.append(self._put(sources, pieces, came, read, mine[1]))
        return meanwhile, puts

    def _put(
        self,
        sources: tuple[Member, ...],
        pieces: Pieces,
        came: dict[int, Span],
        read: dict[int, int],
        own: Pieces | None,
    ) -> Put:
        parts: list[Laid | Pieces] = []
        in_place = False
        for peer in sources:
            if not self._travels(peer):
                assert own is not None
                parts.append(own)
            elif came[number := self.number[peer]].slot == BUFFER:
                parts.append(Laid.at(read[number], pieces.shapes))
                read[number] += pieces.size
            else:
                in_place = True
        return Put(pieces, in_place, tuple(parts), len(parts) == 1 and not in_place and pieces.are_seen)


def _in_turn(pieces: Pieces | None) -> Callable[[Pieces], Pieces | None]:
    """A function that returns as many of the next pieces as the message it is given holds, beginning where the last
    call stopped."""
    at = 0

    def following(shown: Pieces) -> Pieces | None:
        nonlocal at
        first, at = at, at + len(shown.slots)
        return None if pieces is None else pieces.some(first, at)

    return following


def _packed(blocks: Sequence[Pieces], at: int) -> Packs:
    """Where in a buffer, from `at` on, all pieces are copied."""
    out = []
    for pieces in blocks:
        out.append((Laid.at(at, pieces.shapes), pieces))
        at += pieces.size
    return out


def _size(blocks: Sequence[Pieces]) -> int:
    return sum(pieces.size for pieces in blocks)


def _direct(peer: int, blocks: Sequence[Pieces], tensors: Sequence[Shape]) -> Span | None:
    """If a message is one piece that is contiguous in memory: where that is. Else None."""
    (pieces, *more) = blocks
    if more or len(pieces.slots) > 1:
        return None
    slot, (region,) = pieces.slots[0], pieces.regions_in(tensors)
    start = run_start(region, tensors[slot])
    return None if start is None else Span(peer, slot, start, start + pieces.size)


def _as_one_run(messages: Sequence[Message], tensors: Sequence[Shape]) -> list[Span] | None:
    """The messages where they are, if they follow each other in the memory of one tensor in the order of the peers."""
    spans: list[Span] = []
    for peer, blocks in messages:
        span = _direct(peer, blocks, tensors)
        if span is None or (spans and (spans[-1].slot, spans[-1].stop) != (span.slot, span.start)):
            return None
        spans.append(span)
    return spans


def _lined_up(messages: Sequence[Message]) -> list[Span]:
    """The messages one after the other in a buffer."""
    spans, at = [], 0
    for peer, blocks in messages:
        spans.append(Span(peer, BUFFER, at, at + _size(blocks)))
        at = spans[-1].stop
    return spans
