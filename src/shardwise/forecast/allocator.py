"""CUDA's caching allocator, played: how much memory it takes from the device for blocks that come and go.

Its rules: blocks are multiples of 512 bytes, and each stream has pools of its own. Small blocks (up to 1 MiB) come out
of segments of 2 MiB, larger ones (below 10 MiB) out of segments of 20 MiB, and those above get segments of their own in
multiples of 2 MiB. A free block that fits best is taken and cut, free neighbours are joined, and segments are kept
until the device has no more. Where segments are expandable, a pool has one, which grows at its end by 2 or 20 MiB.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

_MIB = 1 << 20
_SMALL, _MIDDLE, _SMALL_SEGMENT, _MIDDLE_SEGMENT, _MULTIPLE = _MIB, 10 * _MIB, 2 * _MIB, 20 * _MIB, 2 * _MIB

Pool = tuple[str, bool]  # the stream, and whether it is for small blocks
Step = tuple[Hashable, int, str]  # a block, its size from now on, and the stream that it is allocated on


@dataclass(eq=False)
class _Piece:
    """A part of a segment: in use, or free."""

    size: int
    number: int
    pool: Pool
    is_free: bool = False
    before: _Piece | None = None
    after: _Piece | None = None


class Allocator:
    """Blocks by the caller's keys.

    Args:
        is_expandable: Whether segments are expandable.
        room: What the device has, in bytes.

    Attributes:
        reserved, most: Bytes of all segments, now and at most.
        failed: Whether the device had too little.
    """

    def __init__(self, is_expandable: bool = False, room: float = math.inf) -> None:
        self.is_expandable, self.room = is_expandable, room
        self.reserved = self.most = 0
        self.failed = False
        self._held: dict[Hashable, _Piece] = {}
        self._free: defaultdict[Pool, list[tuple[int, int]]] = defaultdict(list)  # (size, number), ascending
        self._pieces: dict[int, _Piece] = {}
        self._ends: dict[Pool, _Piece] = {}  # the last pieces of expandable segments
        self._count = 0

    def resize(self, key: Hashable, size: int, stream: str = "") -> None:
        """The block of that key has so many bytes from now on; 0 where it is gone."""
        if key in self._held:
            self._release(self._held.pop(key))
        if size:
            self._held[key] = self._take(size, (stream, size <= _SMALL))

    def _take(self, size: int, pool: Pool) -> _Piece:
        piece = self._fitting(size, pool) or self._segment(size, pool)
        piece.is_free = False
        rest = piece.size - size
        if rest >= 512 if pool[1] or self.is_expandable else rest > _SMALL:
            self._cut(piece, size)
        return piece

    def _fitting(self, size: int, pool: Pool) -> _Piece | None:
        """The free piece that fits best; the end of a segment that can grow only if there is no other."""
        free = self._free[pool]
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        if self.is_expandable and place + 1 < len(free) and self._pieces[free[place][1]].after is None:
            place += 1
        return self._pieces[free.pop(place)[1]]

    def _segment(self, size: int, pool: Pool) -> _Piece:
        """A piece of at least that size, of memory that is new."""
        each = _SMALL_SEGMENT if pool[1] else _MIDDLE_SEGMENT
        if self.is_expandable:
            return self._grown(size, pool, each)
        return self._piece(self._taken(each if size < _MIDDLE else -(-size // _MULTIPLE) * _MULTIPLE), pool)

    def _grown(self, size: int, pool: Pool, each: int) -> _Piece:
        end = self._ends.get(pool)
        if end is not None and end.is_free:
            self._unstore(end)
            end.size += self._taken(-(-(size - end.size) // each) * each)
            return end
        made = self._piece(self._taken(-(-size // each) * each), pool)
        if end is not None:
            made.before, end.after = end, made
        self._ends[pool] = made
        return made

    def _taken(self, size: int) -> int:
        """So many bytes are taken from the device. Where it has too little, segments that are free are given back."""
        if self.reserved + size > self.room and not self.is_expandable:
            for piece in [p for p in self._pieces.values() if p.is_free and p.before is p.after is None]:
                self._unstore(piece)
                del self._pieces[piece.number]
                self.reserved -= piece.size
        self.reserved += size
        self.most = max(self.most, self.reserved)
        self.failed |= self.reserved > self.room
        return size

    def _piece(self, size: int, pool: Pool) -> _Piece:
        self._count += 1
        made = self._pieces[self._count] = _Piece(size, self._count, pool)
        return made

    def _cut(self, piece: _Piece, size: int) -> None:
        """The end of a piece is free."""
        rest = self._piece(piece.size - size, piece.pool)
        piece.size, rest.before, rest.after = size, piece, piece.after
        if piece.after is not None:
            piece.after.before = rest
        elif self.is_expandable:
            self._ends[piece.pool] = rest
        piece.after = rest
        self._store(rest)

    def _store(self, piece: _Piece) -> None:
        piece.is_free = True
        insort(self._free[piece.pool], (piece.size, piece.number))

    def _unstore(self, piece: _Piece) -> None:
        free = self._free[piece.pool]
        del free[bisect_left(free, (piece.size, piece.number))]

    def _release(self, piece: _Piece) -> None:
        for other in (piece.before, piece.after):
            if other is not None and other.is_free:
                self._unstore(other)
                first, second = (other, piece) if other is piece.before else (piece, other)
                piece = self._joined(first, second)
        self._store(piece)

    def _joined(self, first: _Piece, second: _Piece) -> _Piece:
        first.size, first.after = first.size + second.size, second.after
        if second.after is not None:
            second.after.before = first
        elif self.is_expandable:
            self._ends[first.pool] = first
        del self._pieces[second.number]
        return first


def played(steps: Iterable[Step], is_expandable: bool = False, room: float = math.inf) -> Allocator:
    """The allocator after blocks have had these sizes, one after another."""
    allocator = Allocator(is_expandable, room)
    for key, size, stream in steps:
        allocator.resize(key, size, stream)
    return allocator
