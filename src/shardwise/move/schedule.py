"""What one rank does in one round of an exchange, worked out once from integers: what it packs, how much goes to and
comes from whom, and what becomes of what came.

It follows from the rank's routes. They are found in two ways: from two layouts on one mesh (exchange.py), in time that
does not grow with the mesh, and from any two sets of tiles (tiles.py), by a sweep.

A message that is one run of memory is sent from where it is, or received where it belongs; the rest goes through a
buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.layout.region import (
    Region,
    View,
    contiguous_stride,
    cut_region,
    region_shape,
    run_start,
    view_of,
)

Member = Any  # who takes part: coordinates on a mesh, or a global rank
Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A region of one of the tensors that a rank holds, and its shape."""

    slot: int
    region: Region
    shape: Shape

    @staticmethod
    def of(slot: int, region: Region) -> Piece:
        return Piece(slot, region, region_shape(region))


class Route(NamedTuple):
    """A piece of what a rank will hold, and who has it: one, or everyone who has a part of the sum, in order."""

    sources: tuple[Member, ...]
    piece: Piece


class Routes(NamedTuple):
    """One rank's part of an exchange.

    What one rank sends another is one message: the pieces in `sends`, one after the other. The receiver finds as many
    routes with that sender among its sources, in the same order. What a rank keeps is what it sends itself.
    """

    sends: Mapping[Member, Sequence[Piece]]
    takes: Sequence[Route]
    held: Sequence[Shape]  # the shapes of the tensors the rank has
    needed: Sequence[Shape]  # and of those it will have
    stays: Mapping[int, int] = {}  # tensors that stay what they are: their slots after and before


BUFFER = -1  # the slot of the buffer


class Span(NamedTuple):
    """What goes to or comes from one peer: a run of elements of one of this rank's tensors, or of the buffer."""

    peer: int  # its number in the group
    slot: int
    start: int
    stop: int


class Part(NamedTuple):
    """A region of one of a rank's tensors, and how to see it there where it can be seen."""

    slot: int
    region: Region
    view: View | None


class Put(NamedTuple):
    """Parts that end up, added up if they are several, at a region of the result."""

    into: Part
    in_place: bool  # the first part is there already
    parts: tuple[View | Part, ...]  # of what was received, or of this rank's own tensors


class Puts(NamedTuple):
    """Several puts, and whether each of them is one copy to a place that can be seen."""

    each: tuple[Put, ...]
    copies: bool

    @staticmethod
    def of(puts: Sequence[Put]) -> Puts:
        return Puts(tuple(puts), all(len(p.parts) == 1 and not p.in_place and p.into.view for p in puts))


@dataclass(frozen=True)
class Round:
    """One exchange of a rank with its peers; sizes are in elements."""

    counts: list[int]  # to each peer
    sizes: list[int]  # from each peer
    packs: tuple[tuple[View, Part], ...]  # where in the buffer that is sent what is copied
    packed: int
    received: int
    sends: tuple[Span, ...]
    takes: tuple[Span, ...]
    meanwhile: Puts  # what needs nothing from others
    puts: Puts

    @property
    def buffers(self) -> int:
        return self.packed + self.received


def round_of(routes: Routes, me: Member, peers: Sequence[Member], number: int, rounds: int, separate: bool) -> Round:
    """Round `number` of an exchange in `rounds` for one rank.

    With `separate` messages every peer is sent to by itself. Else what is sent is one run, cut up in the order of
    `peers`, and so is what is received: what stays here may then travel along, where that saves a buffer.
    """
    alone = _Sides(routes, me, peers, number, rounds, own=False)
    if separate:
        return alone.one_by_one()
    ways = [alone.at_once()]
    if ways[0].buffers and rounds == 1 and me in routes.sends:
        ways.append(_Sides(routes, me, peers, number, rounds, own=True).at_once())
    return min(ways, key=lambda way: way.buffers)


Message = tuple[int, list[Piece]]  # a peer's number in the group, and what goes to or comes from it


class _Sides:
    """Both sides of a round: the messages that leave and those that come, with or without this rank's own."""

    def __init__(
        self, routes: Routes, me: Member, peers: Sequence[Member], number: int, rounds: int, own: bool
    ) -> None:
        self.me, self.own, self.first = me, own, number == 0  # `own`: whether the own part travels with the others'
        self.held, self.needed = routes.held, routes.needed
        self.number = {peer: i for i, peer in enumerate(peers)}
        cut = lambda p: Piece.of(p.slot, cut_region(p.region, rounds, number)) if rounds > 1 else p  # noqa: E731
        self.sent = {peer: [cut(piece) for piece in pieces] for peer, pieces in routes.sends.items()}
        self.kept = routes.sends.get(me, ())  # uncut: what stays is copied once, in the first round
        self.takes = [(sources, cut(piece), piece) for sources, piece in routes.takes]

    # -- the two ways ---------------------------------------------------------------------------------------
    def at_once(self) -> Round:
        leaving, coming = self._leaving(), self._coming()
        sends = _as_one_run(leaving, self.held)
        direct = all(sum(self._travels(p) for p in sources) <= 1 for sources, _, _ in self.takes)
        takes = _as_one_run(coming, self.needed) if direct and self._may_start_in_place() else None
        packs: list[tuple[View, Part]] = []
        if sends is None:
            sends = _lined_up(leaving)
            for span, (_, pieces) in zip(sends, leaving, strict=True):
                packs += self._packed(pieces, span.start)
        return self._round(sends, packs, _lined_up(coming) if takes is None else takes)

    def one_by_one(self) -> Round:
        sends: list[Span] = []
        packs: list[tuple[View, Part]] = []
        places: dict[tuple[Piece, ...], int] = {}  # what goes to several is packed once
        at = 0
        for peer, pieces in self._leaving():
            direct = _direct(peer, pieces, self.held)
            if direct is None:
                key = tuple(pieces)
                if key not in places:
                    places[key] = at
                    packs += self._packed(pieces, at)
                    at += _size(pieces)
                direct = Span(peer, BUFFER, places[key], places[key] + _size(pieces))
            sends.append(direct)
        takes: list[Span] = []
        alone = [sources for sources, _, _ in self.takes if sum(map(self._travels, sources)) == 1]
        in_place = {self.number[peer] for sources in alone for peer in sources} if self._may_start_in_place() else set()
        at = 0
        for peer, pieces in self._coming():
            direct = _direct(peer, pieces, self.needed) if peer in in_place else None
            takes.append(direct or Span(peer, BUFFER, at, at + _size(pieces)))
            at += 0 if direct else _size(pieces)
        return self._round(sends, packs, takes)

    # -- messages -------------------------------------------------------------------------------------------
    def _travels(self, peer: Member) -> bool:
        return self.own or peer != self.me

    def _may_start_in_place(self) -> bool:
        """Whether what comes may be written to the result before the own part is added: of two, the order does not
        matter, of more it decides how sums round."""
        return all(len(sources) <= 2 for sources, _, _ in self.takes)

    def _leaving(self) -> list[Message]:
        return self._in_order((peer, piece) for peer, pieces in self.sent.items() for piece in pieces)

    def _coming(self) -> list[Message]:
        return self._in_order((peer, piece) for sources, piece, _ in self.takes for peer in sources)

    def _in_order(self, pieces: Iterable[tuple[Member, Piece]]) -> list[Message]:
        """The messages of those that travel, in the order of the group; nothing makes no message."""
        found: dict[int, list[Piece]] = {}
        for peer, piece in pieces:
            if self._travels(peer) and all(piece.region):
                found.setdefault(self.number[peer], []).append(piece)
        return sorted(found.items())

    def _packed(self, pieces: Sequence[Piece], at: int) -> list[tuple[View, Part]]:
        """Where in a buffer, from `at` on, each piece is copied."""
        out = []
        for piece in pieces:
            out.append((_in_buffer(at, piece.shape), _part(piece, self.held)))
            at += math.prod(piece.shape)
        return out

    # -- put together ---------------------------------------------------------------------------------------
    def _round(self, sends: Sequence[Span], packs: Sequence[tuple[View, Part]], takes: Sequence[Span]) -> Round:
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
            meanwhile=Puts.of(meanwhile),
            puts=Puts.of([put for put in puts if put.parts]),
        )

    def _all_puts(self, came: dict[int, Span]) -> tuple[list[Put], list[Put]]:
        """What happens to each route: what needs nothing from others, then the rest."""
        meanwhile: list[Put] = []
        puts: list[Put] = []
        read = {peer: span.start for peer, span in came.items()}  # how far each message has been taken
        kept, own_parts = iter(self.kept), iter(self.sent.get(self.me, ()))
        for sources, piece, uncut in self.takes:
            mine = (next(kept), next(own_parts)) if self.me in sources else (None, None)
            if sources == (self.me,) and not self.own:  # nothing comes: all at once, while the others' travels
                if self.first and all(uncut.region):
                    meanwhile.append(self._put(sources, uncut, came, read, mine[0]))
            elif all(piece.region):
                puts.append(self._put(sources, piece, came, read, mine[1]))
        return meanwhile, puts

    def _put(
        self, sources: tuple[Member, ...], piece: Piece, came: dict[int, Span], read: dict[int, int], own: Piece | None
    ) -> Put:
        parts: list[View | Part] = []
        in_place = False
        for peer in sources:
            if not self._travels(peer):
                assert own is not None
                parts.append(_part(own, self.held))
            elif came[number := self.number[peer]].slot == BUFFER:
                parts.append(_in_buffer(read[number], piece.shape))
                read[number] += math.prod(piece.shape)
            else:
                in_place = True
        return Put(_part(piece, self.needed), in_place, tuple(parts))


def _part(piece: Piece, shapes: Sequence[Shape]) -> Part:
    return Part(piece.slot, piece.region, view_of(piece.region, shapes[piece.slot], piece.shape))


def _in_buffer(start: int, shape: Shape) -> View:
    return View(shape, contiguous_stride(shape), start)


def _size(pieces: Sequence[Piece]) -> int:
    return sum(math.prod(piece.shape) for piece in pieces)


def _direct(peer: int, pieces: Sequence[Piece], shapes: Sequence[Shape]) -> Span | None:
    """A message that is one piece and one run of memory: where it is."""
    if len(pieces) > 1:
        return None
    slot, region, shape = pieces[0]
    start = run_start(region, shapes[slot])
    return None if start is None else Span(peer, slot, start, start + math.prod(shape))


def _as_one_run(messages: Sequence[Message], shapes: Sequence[Shape]) -> list[Span] | None:
    """The messages where they are, if they follow each other in the memory of one tensor in the order of the peers."""
    spans: list[Span] = []
    for peer, pieces in messages:
        span = _direct(peer, pieces, shapes)
        if span is None or (spans and (spans[-1].slot, spans[-1].stop) != (span.slot, span.start)):
            return None
        spans.append(span)
    return spans


def _lined_up(messages: Sequence[Message]) -> list[Span]:
    """The messages one after the other in a buffer."""
    spans, at = [], 0
    for peer, pieces in messages:
        spans.append(Span(peer, BUFFER, at, at + _size(pieces)))
        at += _size(pieces)
    return spans
