"""Fetching rows of a table that is cut into any tiles: ids travel to the owners, rows travel back.

Each rank asks for the rows it needs, each once. Three exchanges: how many ids, the ids, the pieces of rows; the last is
differentiable, so gradients travel as the rows did, the other way. A row that is cut by columns comes in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note, for_backward, listeners, record, user_line
from shardwise.move.tile_exchange import as_bytes
from shardwise.sharded.owners import ranks_of
from shardwise.sharded.tensor import ShardedTensor


class _Axis:
    axis_names = ("tiles",)


class _Exchange(torch.autograd.Function):
    """An exact all-to-all of a flat tensor; its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, group: Any, note: Note, heard: Any, take: Any, give: Any, flat: torch.Tensor) -> torch.Tensor:
        ctx.plan = (group, note, heard, user_line() if heard else None, take, give)
        return _all_to_all(flat, take, give, group, note, heard)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        group, note, heard, source, take, give = ctx.plan
        back = _Exchange.apply(group, for_backward(note, source), heard, give, take, grad.contiguous())
        return None, None, None, None, None, back


def _all_to_all(flat: torch.Tensor, take: Any, give: Any, group: Any, note: Note, heard: Any) -> torch.Tensor:
    """`give[r]` elements go to each rank of the group, `take[r]` come from it."""
    out = flat.new_empty(sum(take))
    if heard:
        me = dist.get_rank(group)
        record(_Axis(), "all_to_all", 0, (sum(take) - take[me]) * flat.element_size(), note)  # type: ignore[arg-type]
    width = flat.element_size()
    dist.all_to_all_single(
        as_bytes(out), as_bytes(flat), [n * width for n in take], [n * width for n in give], group=group
    )
    return out


class Lookup:
    """The rows `ids` (distinct, ascending) of a table, asked of their owners."""

    def __init__(self, table: ShardedTensor, ids: torch.Tensor, op: str) -> None:
        self.table, self.group, self.note = table, table._process_group, Note(op)
        self.ranks = ranks_of(self.group)
        self._ask(ids)

    def _ask(self, ids: torch.Tensor) -> None:
        """Tell every owner which of its rows are wanted here; hear the same from the others."""
        boxes, ranks = self.table._tiles.boxes, self.table._tiles.ranks
        starts = torch.from_numpy(boxes.starts[:, 0].copy()).to(ids.device)
        ends = torch.from_numpy(boxes.ends[:, 0].copy()).to(ids.device)
        low, high = torch.searchsorted(ids, starts).tolist(), torch.searchsorted(ids, ends).tolist()
        position = {rank: i for i, rank in enumerate(self.ranks)}
        order = sorted(range(len(ranks)), key=lambda t: position[int(ranks[t])])  # stable: a rank's tiles in its order
        self.wanted = [(t, slice(low[t], high[t])) for t in order]  # of each tile, which of our ids
        per_tile = [high[t] - low[t] for t in order]
        tiles_of = [[i for i, t in enumerate(order) if int(ranks[t]) == r] for r in self.ranks]
        limits = [int(ids[0]), int(ids[-1])] if len(ids) else [0, 0]
        asked = [n for mine in tiles_of for n in (*limits, *(per_tile[i] for i in mine))]
        width, world = 2 + len(tiles_of[dist.get_rank(self.group)]), len(self.ranks)
        flat = torch.tensor(asked, dtype=torch.int64, device=ids.device)
        told = self._exchange(flat, [width] * world, [2 + len(t) for t in tiles_of]).view(world, width).tolist()
        self._check_range([(row[0], row[1]) for row in told])
        self.counts = [row[2:] for row in told]  # [rank][my tile]
        rows = [ids[where] - int(boxes.starts[t, 0]) for t, where in self.wanted]
        self.give_ids = [sum(per_tile[i] for i in mine_) for mine_ in tiles_of]
        self.take_ids = [sum(row) for row in self.counts]
        flat = torch.cat([ids.new_empty(0), *rows])
        heard = self._exchange(flat, self.take_ids, self.give_ids)
        self.heard = [list(part.split(row)) for part, row in zip(heard.split(self.take_ids), self.counts)]
        self.widths = [int(boxes.ends[t, 1] - boxes.starts[t, 1]) for t in order]
        self.columns = [int(boxes.starts[t, 1]) for t in order]
        self.per_tile, self.tiles_of = per_tile, tiles_of

    def _check_range(self, limits: list[tuple[int, int]]) -> None:
        """Ids out of range raise on all ranks: else the others would wait."""
        n = self.table.size(0)
        for rank, (low, high) in zip(self.ranks, limits):
            if (low < 0 or high >= n) and (low, high) != (0, 0):
                row = low if low < 0 else high
                raise IndexError(
                    f"{self.note.op}: index out of range in self: rank {rank} looks up row {row} of a table of {n} rows"
                )

    def _exchange(self, flat: torch.Tensor, take: Sequence[int], give: Sequence[int]) -> torch.Tensor:
        return _all_to_all(flat, list(take), list(give), self.group, self.note, listeners())

    def fetch(self, sparse: bool = False) -> torch.Tensor:
        """The rows, whole, in the order of the ids; differentiable."""
        shards = [shard.tensor for shard in self.table.local_shards()]
        pieces = [
            torch.nn.functional.embedding(asked, tile, sparse=sparse).reshape(-1)
            for row in self.heard
            for asked, tile in zip(row, shards)
        ]
        flat = torch.cat(pieces) if pieces else self.table._anchor.reshape(-1)
        widths = [s.shape[1] for s in shards]
        give = [sum(n * w for n, w in zip(row, widths)) for row in self.counts]
        take = [sum(self.per_tile[i] * self.widths[i] for i in mine) for mine in self.tiles_of]
        if torch.is_grad_enabled() and self.table.requires_grad:
            got = _Exchange.apply(self.group, self.note, listeners(), take, give, flat)
        else:
            got = _all_to_all(flat.detach(), take, give, self.group, self.note, listeners())
        return self._assembled(got)

    def _assembled(self, got: torch.Tensor) -> torch.Tensor:
        """Pieces of rows, tile after tile, as rows: tiles with the same rows stand side by side."""
        bands: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
        parts = got.split([n * w for n, w in zip(self.per_tile, self.widths)])
        for part, n, w, column, (_, where) in zip(parts, self.per_tile, self.widths, self.columns, self.wanted):
            if n and w:
                bands.setdefault((where.start, where.stop), []).append((column, part.view(n, w)))
        if not bands:
            return got.new_empty(0, self.table.size(1)) + got.sum() * 0
        if _are_bands(list(bands)):
            rows = [torch.cat([p for _, p in sorted(side, key=lambda s: s[0])], 1) for _, side in sorted(bands.items())]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        return self._scattered(bands, got)

    def _scattered(self, bands: Any, got: torch.Tensor) -> torch.Tensor:
        """Tiles whose rows overlap only in part: each piece is put in its place."""
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
            for row in self.heard
            for asked, tile in zip(row, shards)
        ]
        like = shards[0] if shards else self.table._anchor.detach()
        flat = torch.cat([like.new_empty(0), *power])
        got = self._exchange(flat, self.give_ids, self.take_ids).split(self.per_tile)
        total = max((where.stop for _, where in self.wanted), default=0)
        norms = like.new_zeros(total)
        for part, (_, where) in zip(got, self.wanted):
            norms[where] = torch.maximum(norms[where], part) if largest else norms[where] + part
        norms = norms if largest else norms.pow(1 / norm_type)
        scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))
        scales = torch.cat([like.new_empty(0), *(scale[where] for _, where in self.wanted)])
        back = self._exchange(scales, self.take_ids, self.give_ids).split(self.take_ids)
        factors = [like.new_ones(len(tile)) for tile in shards]
        for part, row, counts in zip(back, self.heard, self.counts):
            for piece, asked, factor in zip(part.split(counts), row, factors):
                factor[asked] = piece
        for tile, factor in zip(shards, factors):
            tile.mul_(factor.unsqueeze(1))


def _are_bands(ranges: list[tuple[int, int]]) -> bool:
    """Whether ranges of rows follow one another."""
    ranges = sorted(ranges)
    return all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))
