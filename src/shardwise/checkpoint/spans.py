"""What is read at once, and who needs which part of it. Integers only.

Blocks of a tensor that follow each other and that the same processes need become one span: it is read by one process in
one sequence, and a process that needs a part of it takes that part in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.blocks import Block
from shardwise.checkpoint.holders import Side
from shardwise.layout.tiles import Tile, Tiles, meetings

MOST_SPAN = 8 << 20  # bytes
ALIGNED = 64  # slots and parts of messages begin at multiples of this


def up(n: int) -> int:
    return n + -n % ALIGNED


class Span(NamedTuple):
    """Blocks `first` and on (`blocks` of them) of a tensor: one tile, of so many bytes once it is read, for which so
    many bytes (`disk`) are read."""

    tile: Tile
    first: int
    blocks: int
    bytes: int
    disk: int


class Takers(NamedTuple):
    """The processes that need some of a span, in order; the bytes that each needs; the same in a message."""

    who: np.ndarray
    amounts: np.ndarray
    padded: np.ndarray
    most: np.ndarray  # those who need most


class Part(NamedTuple):
    """A box of a span that goes to tile number `tile` (among its own) of a process."""

    rank: int
    tile: int
    box: Tile
    bytes: int


class Turns(NamedTuple):
    """A row for each span and each host that needs some of it: its processes are `counts` of `who` from `starts` on."""

    span: np.ndarray
    host: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    who: np.ndarray
    amounts: np.ndarray  # bytes that each of `who` needs of the span
    spaces: np.ndarray  # bytes that the span takes in memory
    disk: np.ndarray

    def of(self, first: int, last: int) -> Turns:
        """The rows of spans `first` up to, not including, `last`."""
        a, b = np.searchsorted(self.span, (first, last)).tolist()
        span, host, starts, counts = (rows[a:b] for rows in (self.span, self.host, self.starts, self.counts))
        return Turns(span, host, starts, counts, self.who, self.amounts, self.spaces[a:b], self.disk[a:b])


class Needs:
    """Who needs what of the spans of a tensor; tensors of one shape and one layout share it.

    Processes are numbered by their place among those that load.
    """

    def __init__(self, spans: Sequence[Span], side: Side, ranks: np.ndarray, itemsize: int) -> None:
        self.spans, self._ranks = spans, ranks
        tiles = Tiles.of([span.tile for span in spans], side.tiles.starts.shape[1])
        span, tile = meetings(tiles, side.tiles)
        order = np.lexsort((tile, span))
        span, tile = span[order], tile[order]
        self._boxes = tiles.take(span).meet(side.tiles.take(tile))
        self._bytes = self._boxes.volumes * itemsize
        self._tile = _own_numbers(side.ranks)[tile]
        self._who = np.searchsorted(ranks, side.ranks)[tile]
        self._first = np.searchsorted(span, np.arange(len(spans) + 1))
        self.total = np.bincount(self._who, weights=self._bytes, minlength=len(ranks)).astype(np.int64)
        self.takers: list[Takers] = []
        padded = self._bytes + -self._bytes % ALIGNED
        for a, b in zip(self._first[:-1].tolist(), self._first[1:].tolist()):
            who, at = np.unique(self._who[a:b], return_inverse=True)
            amounts, more = (np.bincount(at, weights=n[a:b], minlength=len(who)) for n in (self._bytes, padded))
            most = who[amounts == amounts.max(initial=0)]
            self.takers.append(Takers(who, amounts.astype(np.int64), more.astype(np.int64), most))
        self._turns: Turns | None = None
        self._parts: dict[tuple[int, bytes], tuple[Part, ...]] = {}
        self.all_direct: bool | None = None  # a note of the plan

    def turns(self, hosts: np.ndarray) -> Turns:
        """Who may read a span on each host that needs some of it."""
        if self._turns is None:
            rows = [(hosts[t.who] + len(hosts) * i, t.who, t.amounts) for i, t in enumerate(self.takers)]
            key, who, amounts = (np.concatenate(columns) for columns in zip(*rows))
            order = np.argsort(key, kind="stable")
            key, who, amounts = key[order], who[order], amounts[order]
            starts = np.flatnonzero(np.diff(key, prepend=-1))
            span, host = np.divmod(key[starts], len(hosts))
            spaces = np.array([up(span.bytes) for span in self.spans], dtype=np.int64)[span]
            disk = np.array([span.disk for span in self.spans], dtype=np.int64)[span]
            counts = np.diff(starts, append=len(key))
            self._turns = Turns(span, host, starts, counts, who, amounts, spaces, disk)
        return self._turns

    def parts(self, i: int, of: np.ndarray) -> tuple[Part, ...]:
        """The parts of a span that go to some of the processes."""
        key = i, of.tobytes()
        if key not in self._parts:
            self._parts[key] = self._found(i, of)
        return self._parts[key]

    def _found(self, i: int, of: np.ndarray) -> tuple[Part, ...]:
        rows = np.arange(self._first[i], self._first[i + 1])
        rows = rows[(self._who[rows] == of[0]) if len(of) == 1 else np.isin(self._who[rows], of)]
        starts, sizes = self._boxes.starts[rows], self._boxes.ends[rows] - self._boxes.starts[rows]
        columns = (self._ranks[self._who[rows]], self._tile[rows], self._bytes[rows])
        ranks, tiles, counts = (column.tolist() for column in columns)
        return tuple(
            Part(rank, tile, Tile(tuple(start), tuple(size)), n)
            for rank, tile, start, size, n in zip(ranks, tiles, starts.tolist(), sizes.tolist(), counts)
        )


def _own_numbers(ranks: np.ndarray) -> np.ndarray:
    """The number of each tile among those of its process."""
    order = np.argsort(ranks, kind="stable")
    ordered = ranks[order]
    out = np.empty(len(ranks), dtype=np.int64)
    out[order] = np.arange(len(ranks)) - np.searchsorted(ordered, ordered)
    return out


def spans_of(blocks: Sequence[Block], sizes: Sequence[int], side: Side, itemsize: int, most: int) -> list[Span]:
    """The spans of a tensor from its blocks, with the bytes to read for each.

    No edge of a tile that somebody needs is inside of a span, unless it is inside of a block.
    """
    ends = np.concatenate([side.tiles.starts, side.tiles.ends])
    edges = [np.unique(ends[:, dim]) for dim in range(ends.shape[1])]
    out: list[Span] = []
    for i, block in enumerate(blocks):
        size, disk = math.prod(block.tile.sizes) * itemsize, sizes[i]
        together = _together(out[-1].tile, block.tile, edges) if out and out[-1].bytes + size <= most else None
        if together is None:
            out.append(Span(block.tile, i, 1, size, disk))
        else:
            last = out[-1]
            out[-1] = Span(together, last.first, last.blocks + 1, last.bytes + size, last.disk + disk)
    return out


def _together(one: Tile, next_: Tile, edges: Sequence[np.ndarray]) -> Tile | None:
    """Two tiles as one, if the second follows the first in the memory of it."""
    differ = [dim for dim, (a, b) in enumerate(zip(one.offsets, next_.offsets)) if a != b]
    if len(differ) != 1:
        return None
    dim = differ[0]
    start, stop = one.offsets[dim], next_.offsets[dim] + next_.sizes[dim]
    follows = one.offsets[dim] + one.sizes[dim] == next_.offsets[dim]
    outer = (*one.sizes[:dim], *next_.sizes[:dim])
    if not follows or any(n != 1 for n in outer) or one.sizes[dim + 1 :] != next_.sizes[dim + 1 :]:
        return None
    if np.searchsorted(edges[dim], start, side="right") != np.searchsorted(edges[dim], stop, side="left"):
        return None
    return Tile(one.offsets, (*one.sizes[:dim], stop - start, *one.sizes[dim + 1 :]))
