"""CUDA's caching allocator, played: how much memory it takes from the device for blocks that come and go.

Its rules: blocks are multiples of 512 bytes; small ones (up to 1 MiB) come out of segments of 2 MiB, larger ones (below
10 MiB) out of segments of 20 MiB, and those above get segments of their own in multiples of 2 MiB. A free block that
fits best is taken and cut, free neighbours are joined, and segments are kept. One stream, no expandable segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

_MIB = 1 << 20
_SMALL, _MIDDLE, _SMALL_SEGMENT, _MIDDLE_SEGMENT, _MULTIPLE = _MIB, 10 * _MIB, 2 * _MIB, 20 * _MIB, 2 * _MIB


@dataclass(eq=False)
class _Piece:
    """A part of a segment: in use, or free."""

    size: int
    number: int
    is_small: bool
    is_free: bool = False
    before: _Piece | None = None
    after: _Piece | None = None


class Allocator:
    """Blocks by the caller's keys.

    Attributes:
        reserved: Bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._held: dict[Hashable, _Piece] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, number), ascending
        self._pieces: dict[int, _Piece] = {}
        self._count = 0

    def resize(self, key: Hashable, size: int) -> None:
        """The block of that key has so many bytes from now on; 0 where it is gone."""
        if key in self._held:
            self._release(self._held.pop(key))
        if size:
            self._held[key] = self._take(size)

    def _take(self, size: int) -> _Piece:
        is_small = size <= _SMALL
        free = self._free[is_small]
        place = bisect_left(free, (size, -1))
        if place < len(free):
            piece = self._pieces[free.pop(place)[1]]
        else:
            piece = self._segment(size, is_small)
        piece.is_free = False
        rest = piece.size - size
        if rest >= 512 if is_small else rest > _SMALL:
            self._cut(piece, size)
        return piece

    def _segment(self, size: int, is_small: bool) -> _Piece:
        if is_small:
            taken = _SMALL_SEGMENT
        else:
            taken = _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _MULTIPLE) * _MULTIPLE
        self.reserved += taken
        return self._piece(taken, is_small)

    def _piece(self, size: int, is_small: bool) -> _Piece:
        self._count += 1
        made = self._pieces[self._count] = _Piece(size, self._count, is_small)
        return made

    def _cut(self, piece: _Piece, size: int) -> None:
        """The end of a piece is free."""
        rest = self._piece(piece.size - size, piece.is_small)
        piece.size, rest.before, rest.after = size, piece, piece.after
        if piece.after is not None:
            piece.after.before = rest
        piece.after = rest
        self._store(rest)

    def _store(self, piece: _Piece) -> None:
        piece.is_free = True
        insort(self._free[piece.is_small], (piece.size, piece.number))

    def _unstore(self, piece: _Piece) -> None:
        free = self._free[piece.is_small]
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
        del self._pieces[second.number]
        return first


def reserved_by(changes: Iterable[tuple[Hashable, int]]) -> int:
    """Bytes that the allocator has taken from the device after blocks have had these sizes, one after another."""
    allocator = Allocator()
    for key, size in changes:
        allocator.resize(key, size)
    return allocator.reserved
