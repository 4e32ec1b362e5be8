"""The tiles of one tensor with their holders: what a side of a move is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.layout.layout import Layout
from shardwise.layout.tiles import TileLike, Tiles, as_tuples


@dataclass(frozen=True, eq=False)
class TileSet:
    """Who holds which tiles of a tensor, and where they lie in what each holder has.

    This is all that a move needs to know of one of its two sides. Row i is a tile that `ranks[i]` holds in its tensor
    number `slots[i]`. It begins there at `places[i]`; without `places` every tile is a tensor of its own. `wholes` has
    the shapes of tensors in which several tiles lie, or none.
    """

    ranks: np.ndarray
    slots: np.ndarray
    tiles: Tiles
    places: np.ndarray | None = None
    wholes: Mapping[int, tuple[int, ...]] | None = None

    @staticmethod
    def of(tiles: Mapping[int, Sequence[TileLike]] | TileSet) -> TileSet:
        """The tiles that each rank of a mapping holds, in its order."""
        if isinstance(tiles, TileSet):
            return tiles
        counts = [len(held) for held in tiles.values()]
        ranks = np.repeat(np.array(list(tiles), dtype=np.int64), counts)
        slots = np.concatenate([np.arange(n) for n in counts] or [np.zeros(0, dtype=np.int64)])
        return TileSet(ranks, slots, Tiles.of(tile for held in tiles.values() for tile in held))

    @staticmethod
    def owned(ranks: np.ndarray, tiles: Tiles) -> TileSet:
        """A set of tiles given with their owners, in any order. The tiles of one rank keep their order."""
        order = np.argsort(ranks, kind="stable")
        slots = np.empty(len(ranks), dtype=np.int64)
        slots[order] = np.arange(len(ranks)) - np.searchsorted(ranks[order], ranks[order], side="left")
        return TileSet(ranks, slots, tiles)

    @staticmethod
    def of_layout(layout: Layout) -> TileSet:
        """What the ranks of a mesh hold: every rank one tensor, with one or several tiles in it."""
        ranks: list[int] = []
        wholes: dict[int, tuple[int, ...]] = {}
        tiles: list[TileLike] = []
        places: list[tuple[int, ...]] = []
        for rank in layout.mesh.ranks:
            coords = layout.mesh.coords(rank)
            held, wholes[rank] = layout.tiles_at(coords), layout.local_shape_at(coords)
            tiles += held
            ranks += [rank] * len(held)
            places += itertools.product(*map(_starts, layout.region(coords)))
        slots = np.zeros(len(ranks), dtype=np.int64)
        where = np.array(places, dtype=np.int64).reshape(len(ranks), layout.ndim)
        return TileSet(np.array(ranks, dtype=np.int64), slots, Tiles.of(tiles, layout.ndim), where, wholes)

    def of_width(self, ndim: int | None) -> TileSet:
        """This set; an empty one becomes an empty set of tiles of `ndim` dims."""
        return self if len(self.tiles) else replace(self, tiles=Tiles.of([], ndim or 0))

    @property
    def ndim(self) -> int | None:
        return self.tiles.starts.shape[1] if len(self.tiles) else None

    def rows_of(self, rank: int) -> list[int]:
        """The rows of one rank's tiles, in its order."""
        found = self._rows.get(rank)
        if found is None:
            mine = np.nonzero(self.ranks == rank)[0]
            found = self._rows[rank] = mine[np.argsort(self.slots[mine], kind="stable")].tolist()
        return found

    @functools.cached_property
    def _rows(self) -> dict[int, list[int]]:
        return {}

    def of_rank(self, rank: int) -> Tiles:
        """The tiles of one rank, in its order."""
        return self.tiles.take(self.rows_of(rank))

    def shapes(self, rank: int) -> list[tuple[int, ...]]:
        """The shapes of the tensors that a rank has."""
        if self.wholes is not None:
            return [self.wholes[rank]] if rank in self.wholes else []
        held = self.of_rank(rank)
        return as_tuples(held.ends - held.starts)

    @functools.cached_property
    def key(self) -> tuple[bytes, ...]:
        """Equal for equal tiles with equal holders."""
        where = b"" if self.places is None else self.places.tobytes()
        tiles = self.tiles
        return self.ranks.tobytes(), self.slots.tobytes(), tiles.starts.tobytes(), tiles.ends.tobytes(), where


def _starts(side: Sequence[tuple[int, int]]) -> list[int]:
    """Where each interval of a set begins in a tensor that holds the set."""
    return [0, *itertools.accumulate(b - a for a, b in side)][: len(side)]
