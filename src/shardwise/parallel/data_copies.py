"""The tensors a module computes with while its parameters are kept elsewhere or otherwise: whole along the data axis,
of the compute dtype, each with a gradient of its own that nobody has summed yet.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.autograd.leaves import leaf_local, leaf_values, loose_writes
from shardwise.comm.bridge import share
from shardwise.comm.rank_tensor import RankTensor
from shardwise.comm.record import Note
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE, Shard
from shardwise.move import run_move, start_move
from shardwise.move.steps import Spread
from shardwise.parallel.data_freed import Freed
from shardwise.parallel.data_home import DataAxis, Home
from shardwise.parallel.data_rows import Rows
from shardwise.torch_private import foreach_copy_
from shardwise.wrapper import wrap


class Entry:
    """One parameter: the DTensor that the optimizer sees, who uses it, and the leaves (one for each rank played here)
    that stand in for it inside the forward."""

    leaves: list[torch.Tensor]

    def __init__(self, param: Any, home: Home, owners: list[tuple[torch.nn.Module, str]], dtype: torch.dtype) -> None:
        self.param, self.home, self.owners, self.dtype = param, home, owners, dtype
        self.mark: Any = None  # what the gradient was when some of it was left unreduced

    def __deepcopy__(self, memo: Any) -> Entry:
        made = Entry.__new__(Entry)
        memo[id(self)] = made
        made.__dict__.update(self.__getstate__())
        made.param, made.owners = copy.deepcopy(self.param, memo), copy.deepcopy(self.owners, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A copy gets leaves of its own when it is first used."""
        return {k: v for k, v in self.__dict__.items() if k != "leaves"} | {"mark": None}

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return leaf_values(self.param)

    def local(self) -> Any:
        """The leaves as the local value of the ranks played here."""
        return RankTensor(self.leaves) if self.home.own.mesh.comm.simulated else self.leaves[0]

    def plain(self) -> Any:
        """What stands in for the parameter where every rank computes on a batch of its own."""
        inner = self.home.inner
        return self.local() if inner is None else wrap(self.local(), inner.replace(dtype=self.dtype, stride=None))

    def typed(self, data: DataAxis) -> Any:
        """What stands in for it where the batch is a DTensor: Replicate over the data axis.

        Its gradient must reach the leaves as parts of a sum. A call that is split over the data axis gives each rank
        a part: such a call gets the leaf itself. Any other use gives every rank the whole: there one share counts."""
        axis, layout = self.home.axis, self.home.whole.replace(dtype=self.dtype)
        comm = layout.mesh.comm
        replicas = [a for a, p in enumerate(layout.placements) if p.is_replicate()]
        leaf = share(comm, self.local(), [a for a in replicas if a != axis])
        if not self.leaves[0].requires_grad or data.size == 1:
            return wrap(share(comm, leaf, replicas), layout)
        shares = [_OneShare.apply(value, 1 / data.size) for value in comm.values(leaf)]
        local = share(comm, comm.rebuild(leaf, shares), replicas)
        tensor = wrap(local, layout)
        version = comm.first(local)._version
        others = [a for a in replicas if a != axis and layout.mesh.shape[a] > 1]
        tensor._spreads = {}
        for chosen in range(1 << len(others)):
            rest = tuple(a for i, a in enumerate(others) if chosen >> i & 1)
            value = run_move(leaf, comm, (Spread(layout, rest),), Note("data_parallel")) if rest else leaf
            tensor._spreads[(tuple(sorted((axis, *rest))),)] = (local, version, value)
        return tensor


class _OneShare(torch.autograd.Function):
    """The value, of whose gradient (the same on every rank) each rank takes its share."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, part: float) -> torch.Tensor:
        ctx.part = part
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.part, None


class Copies:
    """The leaves of some parameters of one dtype, gathered and freed together."""

    def __init__(self, entries: Sequence[Entry], data: DataAxis) -> None:
        self.entries, self.data = list(entries), data
        self.dtype, self.kept_as = entries[0].dtype, entries[0].home.own.dtype
        self.cut = data.size > 1 and any(e.home.dim is not None for e in entries)
        self.alias = not self.cut and self.dtype == self.kept_as
        self.coming: Any = None
        self.full = self.alias
        self.versions: tuple[int, ...] | None = None
        self.loose = [loose_writes(entry.param) for entry in self.entries]
        self.values = [value for entry in self.entries for value in entry.values]
        if self.alias:
            self._make_aliases()
        else:
            self._make_room()

    # -- the leaves -----------------------------------------------------------------------------------------
    def _make_aliases(self) -> None:
        """Leaves in the memory of the parameters."""
        for entry in self.entries:
            local = leaf_local(entry.param)
            values = local.ranks if isinstance(local, RankTensor) else (local,)
            if self.data.size == 1:
                self._give_leaves(entry, list(values))
            elif hasattr(entry, "leaves"):
                for leaf, value in zip(entry.leaves, values, strict=True):
                    leaf.data = value.data
            else:
                self._give_leaves(entry, [value.data for value in values])

    def _make_room(self) -> None:
        """Leaves in memory of their own, one stretch for all of them, which is given back between uses."""
        ranks = range(len(self.data.coords))
        grids = [e.home.whole.mesh.comm.played() for e in self.entries]
        shapes = [
            [e.home.whole.local_shape_at(grid[r]) for e, grid in zip(self.entries, grids, strict=True)] for r in ranks
        ]
        dims = [e.home.dim for e in self.entries]
        self.rows = [Rows(shapes[r], dims, self.data.size) for r in ranks]
        self.length = max(rows.length for rows in self.rows)
        self.layout = Layout.make(
            self.data.mesh, [Shard(0)], (self.data.size, self.length), self.dtype, None, self._device
        )
        self.rooms = [torch.empty(0, dtype=self.dtype, device=self._device) for _ in ranks]
        leaves: list[list[torch.Tensor]] = [[] for _ in self.entries]
        self.sinks = []
        for r in ranks:
            total = sum(map(math.prod, shapes[r]))
            room = self.rooms[r] = torch.empty(total, dtype=self.dtype, device=self._device)
            at, targets = 0, []
            for i, shape in enumerate(shapes[r]):
                n = math.prod(shape)
                # .data: a version counter of its own, so that filling the room again does not look like a write to a
                # tensor that autograd has saved
                leaves[i].append(room.data[at : at + n].view(shape))
                targets.append(room[at : at + n].view(shape))
                at += n
            rows = self.rows[r]
            if self.cut:  # of what every row has, the first is enough
                parts = [(i, part) for i, target in enumerate(targets) for part in rows.in_whole(i, target)]
                targets = [part[0] if dims[i] is None else part for i, part in parts]
            self.sinks.append(targets)
            room.untyped_storage().resize_(0)
        for entry, mine in zip(self.entries, leaves, strict=True):
            self._give_leaves(entry, mine)
        self._call_leaves(Freed)
        self.flat = self._flatten() if self.cut and not self.data.mesh.comm.simulated else None
        self.in_row = self.flat is not None

    @property
    def _device(self) -> torch.device:
        return self.entries[0].home.own.device

    @staticmethod
    def _give_leaves(entry: Entry, leaves: list[torch.Tensor]) -> None:
        """Simulated ranks that hold the same along the inner axes share one leaf, as everywhere."""
        inner = entry.home.inner
        if len(leaves) > 1 and inner is not None:
            replicas = [a for a, p in enumerate(inner.placements) if p.is_replicate()]
            leaves = list(inner.mesh.comm.first_of_replicas(RankTensor(leaves), replicas).ranks)
        entry.leaves = leaves

    def _flatten(self) -> list[torch.Tensor]:
        """The parameters' own memory as one row, so that gathering it needs no copy; the views of it they now have."""
        self.row = torch.zeros(self.length, dtype=self.kept_as, device=self._device)
        views = self.rows[0].kept(self.row, self.data.coords[0])
        for entry, view in zip(self.entries, views, strict=True):
            (value,) = entry.values
            view.copy_(value.detach())
            value.data = view
        return views

    # -- gathering ------------------------------------------------------------------------------------------
    def _now(self) -> tuple[int, ...]:
        """What changes when a parameter is written."""
        loose = [loose_writes(entry.param) for entry in self.entries]
        if loose != self.loose:
            self._written_loosely()
            self.loose = loose
        return (*loose, *(value._version for value in self.values))

    def _written_loosely(self) -> None:
        """After ``param.data``: it must still be what it was, and leaves in its memory must follow it."""
        for entry in self.entries:
            now, home = entry.param._layout, entry.home.own
            if (now.placements, now.shape, now.dtype) != (home.placements, home.shape, home.dtype):
                raise LayoutError(
                    f"data_parallel: a parameter of shape {home.shape}, {home.dtype}, {list(home.placements)} became "
                    f"{now.shape}, {now.dtype}, {list(now.placements)}; change it (model.to(...), param.data = ...) "
                    f"before data_parallel()"
                )
        self.values = [value for entry in self.entries for value in entry.values]
        if self.alias:
            self._make_aliases()
        elif self.flat is not None:
            views = zip(self.values, self.flat, strict=True)
            self.in_row = all(v.data_ptr() == view.data_ptr() or not view.numel() for v, view in views)

    @torch.no_grad()
    def start(self) -> None:
        """Begin to gather, unless that is done or under way."""
        now = self._now()
        if self.alias or ((self.full or self.coming is not None) and self.versions == now):
            return
        self.versions, self.full = now, False
        if self.cut:
            mine = [row.unsqueeze(0) for row in self._own_rows()]
            local = RankTensor(mine) if self.data.mesh.comm.simulated else mine[0]
            whole = self.layout.replace(placements=[REPLICATE])
            self.coming = start_move(local, self.layout, whole, Note("data_parallel"))
        else:
            self.coming = None, _at_once

    def _own_rows(self) -> list[torch.Tensor]:
        """What each rank played here keeps, as a row."""
        if self.in_row:
            return [self.row.to(self.dtype)]
        rows = []
        for r, row in enumerate(self.rows):
            parts = [self._value(e, r) for e in self.entries]
            room = torch.zeros(self.length, dtype=self.dtype, device=self._device)
            foreach_copy_(row.kept(room, self.data.coords[r]), parts)
            rows.append(room)
        return rows

    @staticmethod
    def _value(entry: Entry, rank: int) -> torch.Tensor:
        local = leaf_local(entry.param)
        return (local.ranks[rank] if isinstance(local, RankTensor) else local).detach()

    @torch.no_grad()
    def finish(self) -> None:
        """The leaves hold the parameters."""
        if self.full:
            return
        self.start()
        (came, wait), self.coming = self.coming, None
        wait()
        for r, room in enumerate(self.rooms):
            storage = room.untyped_storage()
            if not storage.nbytes():
                storage.resize_(room.numel() * room.itemsize)
            if self.cut:
                matrix = (came.ranks[r] if isinstance(came, RankTensor) else came).contiguous()
                sources = [part for i in range(len(self.entries)) for part in self._arrived(r, i, matrix)]
            else:
                sources = [self._value(entry, r) for entry in self.entries]
            if sources:
                foreach_copy_(self.sinks[r], sources)
        self.full = True
        self._call_leaves(torch.Tensor)

    def _arrived(self, rank: int, i: int, matrix: torch.Tensor) -> list[torch.Tensor]:
        parts = self.rows[rank].in_matrix(i, matrix)
        return parts if self.entries[i].home.dim is not None else [part[0] for part in parts]

    def _call_leaves(self, kind: type[torch.Tensor]) -> None:
        for entry in self.entries:
            for leaf in entry.leaves:
                leaf.__class__ = kind

    def held(self) -> list[torch.Tensor]:
        """The memory of the leaves, where it is theirs."""
        return self.rooms if self.full and not self.alias else []

    def free(self) -> None:
        """Give the memory back; what autograd has saved finds it filled again before it is used."""
        if self.alias:
            return
        if self.coming is not None:
            self.coming[1]()
        self.coming = None
        if self.full:
            for room in self.rooms:
                room.untyped_storage().resize_(0)
            self.full = False
            self._call_leaves(Freed)


def _at_once() -> None:
    """Nothing to wait for."""
