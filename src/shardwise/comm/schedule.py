"""What one rank does in one round of a routed step, worked out once from integers: what it packs, how much goes to and
comes from whom, and what becomes of what came.

A part that is one run of memory is sent from where it is, or received where it belongs; the rest goes through a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.comm.base import Coords
from shardwise.comm.boxes import Box, View, box_shape, view_of
from shardwise.layout.layout import contiguous_stride

Run = tuple[int, int]  # from element, to element of a flat tensor


class Span(NamedTuple):
    """What goes to or comes from one peer: a run of this rank's tensor, or of a buffer."""

    peer: int  # its number in the group
    buffered: bool
    run: Run


class Part(NamedTuple):
    """A box of a rank's tensor, and how to see it there where it can be seen."""

    box: Box
    view: View | None


class Put(NamedTuple):
    """Parts that end up, added up if they are several, at a box of the result."""

    into: Part
    in_place: bool  # the first part is there already
    parts: tuple[View | Part, ...]  # of what was received, or of this rank's own tensor


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
    meanwhile: tuple[Put, ...]  # what needs nothing from others
    puts: tuple[Put, ...]

    @property
    def buffers(self) -> int:
        return self.packed + self.received


def round_of(step: Any, me: Coords, peers: Sequence[Coords], round: int, apart: bool) -> Round:
    """Round `round` of `step` for the rank at `me`. With `apart` every peer is sent to by itself; else what is sent is
    one run, cut up in the order of `peers`, and so is what is received: what stays here may then go along, where that
    saves a buffer."""
    alone = _Sides(step, me, peers, round, own=False)
    if apart:
        return alone.one_by_one()
    ways = [alone.at_once()]
    if ways[0].buffers and step.rounds == 1 and me in alone.sent:
        ways.append(_Sides(step, me, peers, round, own=True).at_once())
    return min(ways, key=lambda way: way.buffers)


class _Sides:
    """Both sides of a round: the boxes that leave and those that come, with or without this rank's own."""

    def __init__(self, step: Any, me: Coords, peers: Sequence[Coords], round: int, own: bool) -> None:
        self.me, self.own, self.first = me, own, round == 0  # `own`: whether the own part travels with the others'
        cut = lambda box: step.part(box, round)  # noqa: E731
        self.here, self.there = step.source_shape(me), step.result_shape(me)
        self.number = {peer: i for i, peer in enumerate(peers)}
        self.sent = {peer: cut(box) for peer, box in step.outgoing(me).items()}
        self.whole_own = step.outgoing(me).get(me)
        self.routes = [(tuple(sources), cut(box), box) for sources, box in step.incoming(me)]

    # -- the two ways ---------------------------------------------------------------------------------------
    def at_once(self) -> Round:
        leaving = [(p, box) for p, box in self.sent.items() if self._travels(p)]
        coming = [(p, box) for sources, box, _ in self.routes for p in sources if self._travels(p)]
        sends = self._as_one_run(leaving, self.here)
        direct = all(sum(self._travels(p) for p in sources) <= 1 for sources, _, _ in self.routes)
        takes = self._as_one_run(coming, self.there) if direct and self._may_start_in_place() else None
        packs: tuple[Any, ...] = ()
        if sends is None:
            sends, packs = self._packed(leaving)
        return self._round(sends, packs, takes if takes is not None else self._lined_up(coming))

    def one_by_one(self) -> Round:
        sends: list[Span] = []
        packs: dict[Box, Any] = {}  # what goes to several is packed once
        at = 0
        for peer, box in self._in_order((p, b) for p, b in self.sent.items() if p != self.me):
            shape, start = box_shape(box), run_start(box, self.here)
            n = math.prod(shape)
            if start is not None:
                sends.append(Span(self.number[peer], False, (start, start + n)))
                continue
            if box not in packs:
                packs[box] = (_in_buffer(at, shape), self._mine(box))
                at += n
            first = packs[box][0].start
            sends.append(Span(self.number[peer], True, (first, first + n)))
        takes: list[Span] = []
        at = 0
        in_place = self._may_start_in_place()
        for sources, box, _ in self.routes:
            n, start = math.prod(box_shape(box)), run_start(box, self.there)
            others = [p for p in sources if p != self.me]
            for peer in others:
                if in_place and len(others) == 1 and start is not None:
                    takes.append(Span(self.number[peer], False, (start, start + n)))
                else:
                    takes.append(Span(self.number[peer], True, (at, at + n)))
                    at += n
        return self._round(sends, tuple(packs.values()), takes)

    # -- runs and buffers -----------------------------------------------------------------------------------
    def _travels(self, peer: Coords) -> bool:
        return self.own or peer != self.me

    def _may_start_in_place(self) -> bool:
        """Whether what comes may be written to the result before the own part is added: of two, the order does not
        matter, of more it decides how sums round."""
        return all(len(sources) <= 2 for sources, _, _ in self.routes)

    def _in_order(self, parts: Any) -> list[tuple[Coords, Box]]:
        return sorted(((p, b) for p, b in parts if math.prod(box_shape(b))), key=lambda part: self.number[part[0]])

    def _as_one_run(self, parts: list[tuple[Coords, Box]], shape: tuple[int, ...]) -> list[Span] | None:
        """The parts where they are, if they follow each other in memory in the order of the peers."""
        spans: list[Span] = []
        for peer, box in self._in_order(parts):
            start = run_start(box, shape)
            if start is None or (spans and spans[-1].run[1] != start):
                return None
            spans.append(Span(self.number[peer], False, (start, start + math.prod(box_shape(box)))))
        return spans

    def _lined_up(self, parts: list[tuple[Coords, Box]]) -> list[Span]:
        spans, at = [], 0
        for peer, box in self._in_order(parts):
            n = math.prod(box_shape(box))
            spans.append(Span(self.number[peer], True, (at, at + n)))
            at += n
        return spans

    def _packed(self, parts: list[tuple[Coords, Box]]) -> tuple[list[Span], tuple[Any, ...]]:
        spans = self._lined_up(parts)
        boxes = [box for _, box in self._in_order(parts)]
        packs = zip(spans, boxes, strict=True)
        return spans, tuple((_in_buffer(span.run[0], box_shape(b)), self._mine(b)) for span, b in packs)

    def _mine(self, box: Box) -> Part:
        return Part(box, view_of(box, self.here))

    # -- put together ---------------------------------------------------------------------------------------
    def _round(self, sends: Sequence[Span], packs: tuple[Any, ...], takes: Sequence[Span]) -> Round:
        counts, sizes = [0] * len(self.number), [0] * len(self.number)
        for spans, numbers in ((sends, counts), (takes, sizes)):
            for peer, _, (a, b) in spans:
                numbers[peer] = b - a
        came = {span.peer: span for span in takes}
        meanwhile: list[Put] = []
        puts: list[Put] = []
        for sources, box, uncut in self.routes:
            if sources == (self.me,) and not self.own:  # nothing comes: all at once, while the others' travels
                if self.first and all(uncut):
                    meanwhile.append(self._put(sources, uncut, came, self.whole_own))
            elif all(box):
                puts.append(self._put(sources, box, came, self.sent.get(self.me)))
        return Round(
            counts,
            sizes,
            packs,
            packed=max((span.run[1] for span in sends if span.buffered), default=0),
            received=max((span.run[1] for span in takes if span.buffered), default=0),
            sends=tuple(sends),
            takes=tuple(takes),
            meanwhile=tuple(meanwhile),
            puts=tuple(put for put in puts if put.parts),
        )

    def _put(self, sources: tuple[Coords, ...], box: Box, came: dict[int, Span], own: Box | None) -> Put:
        parts: list[Any] = []
        in_place = False
        for peer in sources:
            span = came.get(self.number[peer]) if self._travels(peer) else None
            if not self._travels(peer):
                parts.append(self._mine(own))  # type: ignore[arg-type]
            elif span is not None and span.buffered:
                parts.append(_in_buffer(span.run[0], box_shape(box)))
            else:
                in_place = True
        return Put(Part(box, view_of(box, self.there)), in_place, tuple(parts))


def _in_buffer(start: int, shape: tuple[int, ...]) -> View:
    return View(shape, contiguous_stride(shape), start)


def run_start(box: Box, shape: Sequence[int]) -> int | None:
    """Where a box of a contiguous tensor of this shape begins in memory, if it is one run of it."""
    start, stride, whole = 0, 1, True
    for side, n in zip(reversed(box), reversed(shape), strict=True):
        if len(side) != 1:
            return None if side else 0
        a, b = side[0]
        if not whole and b - a != 1:
            return None
        start, stride, whole = start + a * stride, stride * n, whole and b - a == n
    return start
