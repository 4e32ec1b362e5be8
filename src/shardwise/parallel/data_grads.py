"""Gradients of several parameters reduced together, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise import surface
from shardwise.comm.simulation import RankTensor
from shardwise.layout import Layout, Partial
from shardwise.layout.placement import REPLICATE, Shard
from shardwise.parallel.data_copies import Entry
from shardwise.parallel.data_home import DataAxis
from shardwise.parallel.data_rows import Rows
from shardwise.wrapper import wrap


class GradBucket:
    """The gradients of some parameters. It is full once every one has come, and empty again once they are reduced."""

    def __init__(self, entries: Sequence[Entry], data: DataAxis, reduce_dtype: torch.dtype | None) -> None:
        self.entries, self.data = list(entries), data
        self.cut = data.size > 1 and any(e.home.dim is not None for e in entries)
        self.kept_as = entries[0].home.own.dtype
        self.dtype = reduce_dtype or entries[0].dtype
        parts = data.size if self.cut else 1
        dims = [e.home.dim if self.cut else None for e in entries]
        self.rows = [Rows([tuple(e.leaves[r].shape) for e in entries], dims, parts) for r in range(len(data.coords))]
        self.length = max(rows.length for rows in self.rows) + len(self.entries)  # and a flag for each: has one come?
        device = entries[0].home.own.device
        shape = (parts, self.length)
        self.given = Layout.make(data.mesh, [Partial()], shape, self.dtype, None, device)
        self.target: list[Any] = [Shard(0) if self.cut else REPLICATE]
        self.sent: Any = None
        self.ones = torch.ones(len(self.entries), dtype=self.dtype, device=device)
        self.leaves = self.missing = len({id(leaf) for e in self.entries for leaf in e.leaves})

    @torch.no_grad()
    def start(self, scale: float) -> None:
        """Begin to reduce what the leaves have, and let go of it."""
        self.lacking = False
        local = [self._packed(r, scale) for r in range(len(self.rows))]
        for entry in self.entries:
            for leaf in entry.leaves:
                leaf.grad = None
        value = RankTensor(local) if self.data.mesh.comm.simulated else local[0]
        self.sent = wrap(value, self.given).redistribute(placements=self.target, async_op=True)

    def _packed(self, rank: int, scale: float) -> torch.Tensor:
        """The gradients of a rank's leaves as rows, with zeros where there is none."""
        leaves = [entry.leaves[rank] for entry in self.entries]
        grads, flags = [leaf.grad for leaf in leaves], self.ones
        if any(grad is None for grad in grads):
            self.lacking = True
            flags = torch.tensor([float(g is not None) for g in grads], dtype=self.dtype).to(self.ones.device)
        filled = [torch.zeros_like(v) if g is None else g for g, v in zip(grads, leaves, strict=True)]
        packed = self.rows[rank].packed(filled, flags, self.length, self.dtype)
        return packed.mul_(scale) if scale != 1 else packed

    @torch.no_grad()
    def finish(self) -> None:
        """Give the parameters their gradients, on top of what they have."""
        local, self.sent = self.sent._local, None
        arrived = [row[0] for row in (local.ranks if isinstance(local, RankTensor) else (local,))]
        places = self.data.coords if self.cut else [0] * len(self.data.coords)
        came = [True] * len(self.entries)
        if self.lacking:  # someone else may have had what this rank lacks
            end = sum(self.rows[0].counts[places[0]])
            came = [flag > 0 for flag in arrived[0][end : end + len(self.entries)].tolist()]
        parts = [
            rows.kept(row.to(self.kept_as), place) for rows, row, place in zip(self.rows, arrived, places, strict=True)
        ]
        for i, entry in enumerate(self.entries):
            if came[i]:
                _add_gradient(entry.param, [mine[i] for mine in parts])


def _add_gradient(param: Any, parts: list[torch.Tensor]) -> None:
    comm, mine = param._layout.mesh.comm, surface.leaf_local(param)
    local = RankTensor(parts) if comm.simulated else parts[0]
    for value, part in zip(comm.values(mine), comm.pick(comm.structure(mine), local), strict=True):
        if value.grad is None:
            value.grad = part
        else:
            value.grad.add_(part)
