"""Gradients of several parameters reduced together, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise import surface
from shardwise.comm.record import Note
from shardwise.comm.simulation import RankTensor
from shardwise.errors import AutogradError
from shardwise.layout import Layout, Partial
from shardwise.layout.placement import REPLICATE, Shard
from shardwise.move import start_move
from shardwise.parallel.data_copies import Entry
from shardwise.parallel.data_home import DataAxis
from shardwise.parallel.data_rows import Rows


class GradBucket:
    """The gradients of some parameters. Each is taken from its leaf as it comes, into the rows that are then reduced;
    the bucket is full once none is `missing`, and empty again once they are on their way."""

    def __init__(self, entries: Sequence[Entry], data: DataAxis, reduce_dtype: torch.dtype | None) -> None:
        self.entries, self.data = list(entries), data
        self.cut = data.size > 1 and any(e.home.dim is not None for e in entries)
        self.kept_as = entries[0].home.own.dtype
        self.dtype = reduce_dtype or entries[0].dtype
        parts = data.size if self.cut else 1
        dims = [e.home.dim if self.cut else None for e in entries]
        ranks = range(len(data.coords))
        self.rows = [Rows([tuple(e.leaves[r].shape) for e in entries], dims, parts) for r in ranks]
        self.even = all(rows.even and rows.length == self.rows[0].length for rows in self.rows)
        self.length = max(rows.length for rows in self.rows) + len(entries)  # and a flag for each: has one come?
        self.device = entries[0].home.own.device
        self.given = Layout.make(data.mesh, [Partial()], (parts, self.length), self.dtype, None, self.device)
        self.target = self.given.replace(placements=[Shard(0) if self.cut else REPLICATE])
        self.spots: dict[int, list[tuple[int, int]]] = {}  # by leaf: the ranks whose it is, and its number
        for i, entry in enumerate(entries):
            for r, leaf in enumerate(entry.leaves):
                self.spots.setdefault(id(leaf), []).append((r, i))
        self.matrices: list[torch.Tensor] | None = None
        self.finish_move: Callable[[], Any] | None = None
        self.begin()

    def begin(self) -> None:
        """Another backward pass."""
        self.missing = set(self.spots)
        self.came: set[int] = set()  # leaves whose gradient is in the rows

    # -- taking ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def take(self, leaf: torch.Tensor, scale: float) -> None:
        """The gradient of a leaf, times `scale`, into the rows."""
        if self.finish_move is not None:
            raise AutogradError(
                f"data_parallel: a parameter of shape {tuple(leaf.shape)} got another gradient in one backward pass "
                f"after the first was sent: it is shared by reentrant checkpoints; use checkpoint(use_reentrant=False)"
            )
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        grad = grad.to_dense() if grad.layout != torch.strided else grad
        for r, i in self.spots[id(leaf)]:
            rows, matrix = self.rows[r], self._room()[r]
            for into, part in zip(rows.in_matrix(i, matrix), rows.in_whole(i, grad), strict=True):
                if id(leaf) in self.came:
                    into.add_(part, alpha=scale)
                elif scale != 1 and part.dtype == into.dtype:
                    torch.mul(part, scale, out=into)
                else:
                    into.copy_(part).mul_(scale) if scale != 1 else into.copy_(part)
        self.came.add(id(leaf))

    def _room(self) -> list[torch.Tensor]:
        if self.matrices is None:
            make = torch.empty if self.even else torch.zeros  # no row has holes, or they are added up too
            shape = self.given.shape
            self.matrices = [make(shape, dtype=self.dtype, device=self.device) for _ in self.rows]
        return self.matrices

    def _take_the_rest(self, scale: float) -> None:
        """What waits since earlier passes, and zeros where there is nothing."""
        for entry in self.entries:
            for leaf in entry.leaves:
                if id(leaf) not in self.came:
                    self.take(leaf, scale)
        matrices = self._room()
        for key, spots in self.spots.items():
            if key not in self.came:
                for r, i in spots:
                    for into in self.rows[r].in_matrix(i, matrices[r]):
                        into.zero_()

    # -- reducing -------------------------------------------------------------------------------------------
    @torch.no_grad()
    def start(self, scale: float) -> None:
        """Begin to reduce what the leaves had."""
        if len(self.came) < len(self.spots):
            self._take_the_rest(scale)
        self.lacking = len(self.came) < len(self.spots)
        matrices, self.matrices = self._room(), None
        for r, matrix in enumerate(matrices):
            flags = matrix[:, self.length - len(self.entries) :]
            if self.lacking:
                here = [float(id(entry.leaves[r]) in self.came) for entry in self.entries]
                flags.copy_(torch.tensor(here, dtype=self.dtype))
            else:
                flags.fill_(1)
        value = RankTensor(matrices) if self.data.mesh.comm.simulated else matrices[0]
        note = Note("data_parallel", backward=True)
        self.sum, self.finish_move = start_move(value, self.given, self.target, note, owned=True)

    def drop(self) -> None:
        """Wait for what was started, and forget it."""
        if self.finish_move is not None:
            self.finish_move()
        self.sum = self.finish_move = None

    @torch.no_grad()
    def finish(self) -> None:
        """Give the parameters their gradients, on top of what they have."""
        if self.finish_move is not None:
            self.finish_move()
        local, self.sum, self.finish_move = self.sum, None, None
        arrived = [rows[0] for rows in (local.ranks if isinstance(local, RankTensor) else (local,))]
        places = self.data.coords if self.cut else [0] * len(self.data.coords)
        came = [True] * len(self.entries)
        if self.lacking:  # someone else may have had what this rank lacks
            came = [flag > 0 for flag in arrived[0][self.length - len(self.entries) :].tolist()]
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
