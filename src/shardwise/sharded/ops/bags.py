"""Bags of rows, summed by the owners of the rows: vectors of sums travel, not the rows.

Each owner of a tile learns which rows each bag has there, and sends one vector per bag back. The rank that asks adds up
what the owners send and, for a mean, divides. Gradients take the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from shardwise.sharded.ops.lookup import Lookup

_embedding_bag = F.embedding_bag
_NEVER = 1 << 50  # more than any price of fetching rows


class Bags:
    """This rank's bags: `ids` in the order of the bags, how many each bag has, and perhaps a weight per id."""

    def __init__(
        self, ids: torch.Tensor, lengths: torch.Tensor | None, weights: torch.Tensor | None, padding: int | None
    ) -> None:
        """Without lengths the offsets make no sense. The price is infinite then: torch's function runs and raises."""
        self.makes_sense = lengths is not None
        lengths = ids.new_zeros(0) if lengths is None else lengths
        bag = torch.repeat_interleave(lengths)
        if padding is not None and self.makes_sense:
            kept = (ids != padding).nonzero().flatten()
            ids, bag = ids[kept], bag[kept]
            weights = None if weights is None else weights[kept]
        self.ids, self.bag, self.weights = ids, bag, weights
        self.sizes = torch.bincount(bag, minlength=len(lengths))
        self._sorted, self._order = torch.sort(ids, stable=True)
        self._found: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.asked: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def of_rows(self, rows: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return which ids are in a range of rows, in the order of the bags; their bags; how many are in each bag."""
        if rows not in self._found:
            low, high = torch.searchsorted(self._sorted, self._sorted.new_tensor(rows)).tolist()
            at = self._order[low:high].sort().values if self.makes_sense else self._order[:0]
            self._found[rows] = (at, *torch.unique_consecutive(self.bag[at], return_counts=True))
        return self._found[rows]

    def wishes(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return, for each tile's range of rows, how many ids in how many bags are looked up there."""
        self.asked = [self.of_rows(r) for r in rows]
        return [(len(at), len(bags)) for at, bags, _ in self.asked]

    def price(self, lookup: Lookup) -> int:
        """Return the bytes: ids, lengths and weights to the owners, sums back, gradients the other way."""
        if not self.makes_sense:
            return _NEVER
        size, total = lookup.table.dtype.itemsize, 0
        weights = self.weights
        extra = 0 if weights is None else size * (2 if weights.requires_grad and torch.is_grad_enabled() else 1)
        for i in lookup.elsewhere():
            at, bags, _ = self.asked[i]
            total += len(at) * (8 + extra) + len(bags) * (8 + lookup.widths[i] * size * lookup.ways)
        return total

    def ask(self, lookup: Lookup, counts: list[list[tuple[int, ...]]]) -> None:
        """Send every owner the ids of its rows and how many each bag has. `counts[rank][tile]` says how many ids in how
        many bags a rank looks up in a tile of this one."""
        self.lookup, self.counts = lookup, counts
        words = [
            word
            for (at, _, lengths), (start, _) in zip(self.asked, lookup.rows)
            for word in (self.ids[at] - start, lengths)
        ]
        give = [sum(len(at) + len(bags) for at, bags, _ in self._of_owner(mine)) for mine in lookup.tiles_of]
        take = [sum(map(sum, row)) for row in counts]
        received = lookup.exchange(torch.cat([self.ids[:0], *words]), take, give)
        sizes = [n for row in counts for tile in row for n in tile]
        self._heard = list(received.split(sizes))

    def _of_owner(self, tiles: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return [self.asked[i] for i in tiles]

    def pooled(self, mode: str, sparse: bool) -> torch.Tensor:
        """Return this rank's bags, summed or averaged; differentiable in the table and the weights."""
        weights = None if self.weights is None else self._sent_weights(self.weights)
        sums = self._sums(weights, sparse)
        widths = self.lookup.widths
        take = [sum(len(self.asked[i][1]) * widths[i] for i in mine) for mine in self.lookup.tiles_of]
        tiles = [shard.tensor.shape[1] for shard in self.lookup.table.local_shards()]
        give = [sum(tile[1] * width for tile, width in zip(row, tiles)) for row in self.counts]
        out = self._added(self.lookup.exchange(sums, take, give))
        return out if mode == "sum" else out / self.sizes.clamp(min=1).unsqueeze(1)

    def _sent_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Exchange the weights, and return those of the ids that are looked up here."""
        flat = torch.cat([weights[at] for at, _, _ in self.asked])
        give = [sum(len(at) for at, _, _ in self._of_owner(mine)) for mine in self.lookup.tiles_of]
        return self.lookup.exchange(flat, [sum(tile[0] for tile in row) for row in self.counts], give)

    def _sums(self, weights: torch.Tensor | None, sparse: bool) -> torch.Tensor:
        """Return what this rank sums as an owner: for each rank and tile one vector per bag, in one flat tensor."""
        tiles = [shard.tensor for shard in self.lookup.table.local_shards()]
        # every rank is in the graph, of the table and of the weights, whatever it sums
        pieces = [] if tiles else [self.lookup.table._anchor.reshape(-1)]
        pieces += [] if weights is None else [weights[:0]]
        received, at = iter(self._heard), 0
        for row in self.counts:
            for tile, (n, _) in zip(tiles, row):
                ids, lengths = next(received), next(received)
                mine = None if weights is None else weights[at : at + n]
                at += n
                if n and tile.shape[1]:
                    offsets = lengths.cumsum(0) - lengths
                    sums = _embedding_bag(ids, tile, offsets, mode="sum", per_sample_weights=mine, sparse=sparse)
                    pieces.append(sums.reshape(-1))
                else:
                    pieces.append(rows_of(tile, ids[:0], sparse))
        return torch.cat(pieces)

    def _added(self, got: torch.Tensor) -> torch.Tensor:
        """Add up by bag what the owners sent; in float32 where the table's dtype has few digits."""
        widths = self.lookup.widths
        parts = got.split([len(bags) * width for (_, bags, _), width in zip(self.asked, widths)])
        strips: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for part, (_, bags, _), column, width in zip(parts, self.asked, self.lookup.columns, widths):
            strips.setdefault((column, width), []).append((bags, part.view(len(bags), width)))
        wide = torch.promote_types(got.dtype, torch.float32)
        out = got.new_zeros(len(self.sizes), self.lookup.table.size(1), dtype=wide)
        for (column, width), found in strips.items():
            bags, sums = torch.cat([b for b, _ in found]), torch.cat([p for _, p in found])
            out.narrow(1, column, width).index_add_(0, bags, sums.to(wide))
        return out.to(got.dtype)


def rows_of(tile: torch.Tensor, ids: torch.Tensor, sparse: bool) -> torch.Tensor:
    """Return rows of a tile, flat; differentiable. A tile without elements skips the kernel, which fails on GPUs."""
    if not tile.numel():
        return tile.reshape(-1)
    return F.embedding(ids, tile, sparse=sparse).reshape(-1)


def lengths_of(ids: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool) -> torch.Tensor | None:
    """Return how many ids each bag has, or None where the offsets make no sense."""
    if offsets is None:
        return ids.new_full((ids.shape[0],), ids.shape[1], dtype=torch.int64)
    if offsets.dim() != 1 or not len(offsets) or offsets.dtype not in (torch.int32, torch.int64):
        return None
    ends = offsets.new_tensor([len(ids)])
    edges = offsets if include_last_offset else torch.cat([offsets, ends])
    lengths = edges.diff().long()
    if int(edges[0]) != 0 or int(edges[-1]) != len(ids) or bool((lengths < 0).any()):
        return None
    return lengths
