"""Rows of a table that is cut into any tiles: what each rank wants of each tile, and the rows fetched.

Each rank asks for each row it needs once, in three exchanges: how many ids, the ids, the pieces of rows. The last one
is differentiable: gradients travel as the rows did, the other way. A row that is cut by columns comes in pieces. Where
bags are summed, it may be cheaper to sum them at the owners (`Bags`): the first exchange carries the prices of all
ranks too, so that all make the same choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise.comm.record import Note
from shardwise.errors import DimError
from shardwise.sharded.groups import ranks_of
from shardwise.sharded.ops.group_steps import exchange
from shardwise.sharded.tensor import ShardedTensor

_embedding_bag = F.embedding_bag
_NEVER = 1 << 50  # more than any price of fetching rows


class Bags:
    """This rank's bags: `ids` in the order of the bags, how many each bag has, and perhaps a weight per id.

    They may be summed by the owners of the rows, so that vectors of sums travel, not the rows: each owner of a tile
    learns which rows each bag has there, and sends one vector per bag back. The rank that asks adds up what the owners
    send and, for a mean, divides. Gradients take the same way back.
    """

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
        sent = [sum(len(at) + len(bags) for at, bags, _ in self._of_owner(mine)) for mine in lookup.tiles_of]
        expected = [sum(map(sum, row)) for row in counts]
        received = lookup.exchange(torch.cat([self.ids[:0], *words]), expected, sent)
        sizes = [n for row in counts for tile in row for n in tile]
        self._ids_to_look_up = list(received.split(sizes))

    def _of_owner(self, tiles: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return [self.asked[i] for i in tiles]

    def pooled(self, mode: str, sparse: bool) -> torch.Tensor:
        """Return this rank's bags, summed or averaged; differentiable in the table and the weights."""
        weights = None if self.weights is None else self._sent_weights(self.weights)
        sums = self._sums(weights, sparse)
        widths = self.lookup.widths
        expected = [sum(len(self.asked[i][1]) * widths[i] for i in mine) for mine in self.lookup.tiles_of]
        tiles = [shard.tensor.shape[1] for shard in self.lookup.table.local_shards()]
        sent = [sum(tile[1] * width for tile, width in zip(row, tiles)) for row in self.counts]
        out = self._added(self.lookup.exchange(sums, expected, sent))
        return out if mode == "sum" else out / self.sizes.clamp(min=1).unsqueeze(1)

    def _sent_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Exchange the weights, and return those of the ids that are looked up here."""
        flat = torch.cat([weights[at] for at, _, _ in self.asked])
        sent = [sum(len(at) for at, _, _ in self._of_owner(mine)) for mine in self.lookup.tiles_of]
        return self.lookup.exchange(flat, [sum(tile[0] for tile in row) for row in self.counts], sent)

    def _sums(self, weights: torch.Tensor | None, sparse: bool) -> torch.Tensor:
        """Return what this rank sums as an owner: for each rank and tile one vector per bag, in one flat tensor."""
        tiles = [shard.tensor for shard in self.lookup.table.local_shards()]
        # every rank is in the graph, of the table and of the weights, whatever it sums
        pieces = [] if tiles else [self.lookup.table._anchor.reshape(-1)]
        pieces += [] if weights is None else [weights[:0]]
        received, at = iter(self._ids_to_look_up), 0
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
            out.narrow(1, min(column, out.shape[1]), width).index_add_(0, bags, sums.to(wide))
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


class Lookup:
    """A request for the rows `ids` (distinct, ascending) of a table, or for sums of them, in bags."""

    def __init__(self, table: ShardedTensor, ids: torch.Tensor, op: str, bags: Bags | None = None) -> None:
        self.table, self.group, self.note = table, table._process_group, Note(op)
        self.ranks, self.ids, self.bags = ranks_of(self.group), ids, bags
        self._find_tiles()
        told = self._tell()
        self._check_range(told)
        self.pools = bags is not None and sum(row[3] for row in told) < sum(row[2] for row in told)
        mine, each = len(self.tiles_of[dist.get_rank(self.group)]), 1 if bags is None else 3
        counts = [[row[4 + each * i : 4 + each * (i + 1)] for i in range(mine)] for row in told]
        if self.pools and bags is not None:
            bags.ask(self, [[tuple(tile[1:]) for tile in row] for row in counts])
        else:
            self._ask([[tile[0] for tile in row] for row in counts])

    def _find_tiles(self) -> None:
        """Find the tiles in the order of their owners in the group, and which of this rank's ids each has."""
        boxes, ranks = self.table._tiles.tiles, self.table._tiles.ranks
        starts = torch.from_numpy(boxes.starts[:, 0].copy()).to(self.ids.device)
        ends = torch.from_numpy(boxes.ends[:, 0].copy()).to(self.ids.device)
        low, high = torch.searchsorted(self.ids, starts).tolist(), torch.searchsorted(self.ids, ends).tolist()
        position = {rank: i for i, rank in enumerate(self.ranks)}
        order = sorted(range(len(ranks)), key=lambda t: position[int(ranks[t])])  # stable: a rank's tiles in its order
        self.wanted = [slice(low[t], high[t]) for t in order]
        self.per_tile = [high[t] - low[t] for t in order]
        self.rows = [(int(boxes.starts[t, 0]), int(boxes.ends[t, 0])) for t in order]
        self.columns = [int(boxes.starts[t, 1]) for t in order]
        self.widths = [int(boxes.ends[t, 1] - boxes.starts[t, 1]) for t in order]
        self.tiles_of: list[list[int]] = [[] for _ in self.ranks]
        for i, t in enumerate(order):
            self.tiles_of[position[int(ranks[t])]].append(i)

    def _tell(self) -> list[list[int]]:
        """Return what every rank sends to this one: its least and largest id, its prices of both ways, and how much it
        wants of each tile held here."""
        limits = [int(self.ids[0]), int(self.ids[-1])] if len(self.ids) else [0, 0]
        wishes = [[n] for n in self.per_tile]
        prices = [0, 0]
        if self.bags is not None:
            wishes = [[n, *more] for n, more in zip(self.per_tile, self.bags.wishes(self.rows))]
            prices = [self._price_of_rows(), self.bags.price(self)]
        words = [n for mine in self.tiles_of for n in (*limits, *prices, *(n for i in mine for n in wishes[i]))]
        each = len(wishes[0]) if wishes else 1
        width, world = 4 + each * len(self.tiles_of[dist.get_rank(self.group)]), len(self.ranks)
        flat = torch.tensor(words, dtype=torch.int64, device=self.ids.device)
        told = self.exchange(flat, [width] * world, [4 + each * len(mine) for mine in self.tiles_of])
        return told.view(world, width).tolist()

    def elsewhere(self) -> list[int]:
        """Return the tiles that other ranks hold: what is asked of those travels."""
        me = dist.get_rank(self.group)
        return [i for rank, mine in enumerate(self.tiles_of) if rank != me for i in mine]

    @property
    def ways(self) -> int:
        """How often values travel: once, or twice with gradients."""
        return 2 if self.table.requires_grad and torch.is_grad_enabled() else 1

    def _price_of_rows(self) -> int:
        """Return the bytes of fetching rows: ids to the owners, pieces of rows back, their gradients to the owners."""
        size = self.table.dtype.itemsize * self.ways
        return sum(self.per_tile[i] * (8 + self.widths[i] * size) for i in self.elsewhere())

    def _ask(self, counts: list[list[int]]) -> None:
        """Exchange the ids: every owner learns which of its rows each rank wants."""
        rows = [self.ids[where] - start for where, (start, _) in zip(self.wanted, self.rows)]
        self.counts = counts  # [rank][my tile]
        self.ids_sent = [sum(self.per_tile[i] for i in mine) for mine in self.tiles_of]
        self.ids_received = [sum(row) for row in self.counts]
        received = self.exchange(torch.cat([self.ids[:0], *rows]), self.ids_received, self.ids_sent)
        self.received = [list(part.split(row)) for part, row in zip(received.split(self.ids_received), self.counts)]

    def _check_range(self, told: list[list[int]]) -> None:
        """Raise on all ranks where the ids of one are out of range, so that none is left waiting."""
        n = self.table.size(0)
        for rank, (low, high, *_) in zip(self.ranks, told):
            if (low < 0 or high >= n) and (low, high) != (0, 0):
                row = low if low < 0 else high
                raise DimError(
                    f"{self.note.op}: index out of range in self: rank {rank} looks up row {row} of a table of {n} rows"
                )

    def exchange(self, flat: torch.Tensor, expected: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        return exchange(flat, expected, sent, self.group, self.note)

    def fetch(self, sparse: bool = False) -> torch.Tensor:
        """Return the whole rows in the order of the ids; differentiable."""
        shards = [shard.tensor for shard in self.table.local_shards()]
        pieces = [rows_of(tile, asked, sparse) for row in self.received for asked, tile in zip(row, shards)]
        flat = torch.cat(pieces) if pieces else self.table._anchor.reshape(-1)
        widths = [s.shape[1] for s in shards]
        sent = [sum(n * w for n, w in zip(row, widths)) for row in self.counts]
        expected = [sum(self.per_tile[i] * self.widths[i] for i in mine) for mine in self.tiles_of]
        return self._assembled(self.exchange(flat, expected, sent))

    def _assembled(self, got: torch.Tensor) -> torch.Tensor:
        """Join pieces of rows, which come tile by tile, to rows: tiles of the same rows stand side by side."""
        bands: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
        parts = got.split([n * w for n, w in zip(self.per_tile, self.widths)])
        for part, n, w, column, where in zip(parts, self.per_tile, self.widths, self.columns, self.wanted):
            if n and w:
                bands.setdefault((where.start, where.stop), []).append((column, part.view(n, w)))
        if not bands:
            return got.new_empty(0, self.table.size(1)) + got.sum() * 0
        if all(a[1] == b[0] for a, b in itertools.pairwise(sorted(bands))):  # they follow one another
            rows = [torch.cat([p for _, p in sorted(side, key=lambda s: s[0])], 1) for _, side in sorted(bands.items())]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        return self._scattered(bands, got)

    def _scattered(self, bands: Any, got: torch.Tensor) -> torch.Tensor:
        """Join pieces of tiles whose rows overlap only in part: each piece is put in its place."""
        total = max(stop for _, stop in bands)
        out = got.new_zeros(total, self.table.size(1))
        for (start, stop), side in bands.items():
            for column, part in side:
                out = torch.slice_scatter(
                    out, torch.slice_scatter(out[start:stop], part, 1, column, column + part.shape[1]), 0, start, stop
                )
        return out

    # -- max_norm -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def shorten_rows(self, max_norm: float, norm_type: float) -> None:
        """Scale the rows asked for that are longer than `max_norm`, in place: norms of pieces travel to who asks,
        scales travel back. All ranks that ask for a row get the same."""
        shards = [shard.tensor for shard in self.table.local_shards()]
        largest = norm_type == float("inf")
        power = [
            (tile[asked].abs().amax(1) if largest else tile[asked].abs().pow(norm_type).sum(1))
            if tile.shape[1]
            else tile.new_zeros(len(asked))
            for row in self.received
            for asked, tile in zip(row, shards)
        ]
        like = shards[0] if shards else self.table._anchor.detach()
        flat = torch.cat([like.new_empty(0), *power])
        got = self.exchange(flat, self.ids_sent, self.ids_received).split(self.per_tile)
        total = max((where.stop for where in self.wanted), default=0)
        norms = like.new_zeros(total)
        for part, where in zip(got, self.wanted):
            norms[where] = torch.maximum(norms[where], part) if largest else norms[where] + part
        norms = norms if largest else norms.pow(1 / norm_type)
        scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))
        scales = torch.cat([like.new_empty(0), *(scale[where] for where in self.wanted)])
        back = self.exchange(scales, self.ids_received, self.ids_sent).split(self.ids_received)
        factors = [like.new_ones(len(tile)) for tile in shards]
        for part, row, counts in zip(back, self.received, self.counts):
            for piece, asked, factor in zip(part.split(counts), row, factors):
                factor[asked] = piece
        for tile, factor in zip(shards, factors):
            tile.mul_(factor.unsqueeze(1))
