"""Running a plan between tiles on a process group, where each rank has a list of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.guard import Guard
from shardwise.comm.messages import Group, along_group
from shardwise.comm.record import Note, recorders
from shardwise.errors import MoveError
from shardwise.move.run import run_now, run_steps
from shardwise.move.steps import Step
from shardwise.move.tiles import TilePlan
from shardwise.move.transfer import Transfer, begins_its_memory

Tensors = Sequence[torch.Tensor]


class TensorLists:
    """A backend whose local value is a list of tensors: the tiles of one rank."""

    simulated = False

    def values(self, local: Tensors) -> tuple[torch.Tensor, ...]:
        return tuple(local)

    def structure(self, local: Tensors) -> list[torch.Size]:
        return [x.shape for x in local]

    def assemble(self, structure: Any, values: Tensors) -> list[torch.Tensor]:
        return list(values)

    def pick_gradients(self, structure: Sequence[torch.Size], local: Tensors) -> tuple[torch.Tensor, ...]:
        """A rank without tiles passes an empty tensor, of whatever shape."""
        return tuple(x.view(shape) if not x.numel() else x for x, shape in zip(local, structure, strict=True))


_LISTS = TensorLists()


@dataclass(frozen=True, eq=False)
class TileStep(Step):
    """The tiles of one rank of a group after a plan, from those before; written `into` tensors, if there are any."""

    plan: TilePlan
    group: Group
    into: list[torch.Tensor] | None = None

    where = "tiles"

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "local" if self.plan.is_local else "all_to_all"

    @property
    def partner(self) -> TileStep:
        return TileStep(self.plan.reverse, self.group)

    def bytes_received(self, comm: Any) -> int:
        return self.plan.bytes_in(dist.get_rank())

    def run(self, comm: Any, local: Tensors) -> list[torch.Tensor]:
        me, along = dist.get_rank(), along_group(self.group, local[0].device)
        self._check(me, along.ranks, local)
        if self.plan.is_local:
            out = Transfer(self.plan, local, me, along, self.into).finish()
        else:
            with Guard(along, self.kind, f"tiles of {len(along.ranks)} ranks", f" on rank {me}"):
                out = Transfer(self.plan, local, me, along, self.into).finish()
        return out or [local[0].new_empty(0)]

    def _check(self, me: int, ranks: Sequence[int], parts: Tensors) -> None:
        if not self.plan.all_ranks.issubset(ranks):
            missing = sorted(self.plan.all_ranks - set(ranks))
            raise MoveError(f"ranks {missing} hold or need tiles, but the group has the ranks {list(ranks)}")
        tiles = len(self.plan.sources.rows_of(me))
        if len(parts) != max(1, tiles):
            raise MoveError(f"rank {me} passes {len(parts)} tensors for its {tiles} source tiles")


def run_tiles(
    plan: TilePlan,
    parts: Tensors,
    group: Group | None = None,
    note: Note | None = None,
    into: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """This rank's target tiles, given its source tiles; every rank of the group calls it. Differentiable.

    A rank that holds no source passes one empty tensor: it says dtype and device, and carries the graph, so that the
    rank takes part in the backward pass. A rank without targets gets one empty tensor back. A tile that stays where it
    is stays the same tensor. With `into`, the targets are written into these tensors (of the same dtype, on the same
    device) and no graph is recorded.
    """
    note, group = note or Note("reshard"), dist.group.WORLD if group is None else group
    if into is None:
        return run_steps(_LISTS, (TileStep(plan, group),), tuple(parts), note)
    if all(map(begins_its_memory, into)):
        return run_now(_LISTS, (TileStep(plan, group, list(into)),), tuple(parts), note, recorders())
    with torch.no_grad():
        for room, value in zip(into, run_tiles(plan, parts, group, note), strict=True):
            room.copy_(value)
    return list(into)
