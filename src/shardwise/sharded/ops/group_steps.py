"""Steps of plain tensors over a table's process group, for the one autograd node of moves: flat tensors exchanged by
exact counts, and a value that each rank uses a part of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.comm.guard import Guard
from shardwise.comm.messages import Along, along_group, as_bytes, start_swap
from shardwise.comm.record import Note
from shardwise.move.run import run_steps
from shardwise.move.steps import Step
from shardwise.move.tiles import TensorLists, Tensors
from shardwise.sharded.groups import Group

Counts = Sequence[int]  # of elements, by rank of the group

_LISTS = TensorLists()


@dataclass(frozen=True, eq=False)
class GroupStep(Step):
    """A step of one tensor on each rank of a group; `size` is the bytes of an element or, of a sum, of all."""

    group: Group
    size: int

    where = "tiles"

    def guard(self, along: Along) -> Guard:
        """What the collective runs inside of."""
        return Guard(along, self.kind, f"tiles of {len(along.ranks)} ranks", f" on rank {dist.get_rank()}")

    def bytes_received(self, comm: object) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class FlatExchange(GroupStep):
    """`give[r]` elements go to rank r of the group, `take[r]` come from it; the gradient goes back the same way."""

    take: Counts
    give: Counts

    kind = "all_to_all"

    def run(self, comm: object, local: Tensors) -> list[torch.Tensor]:
        out = local[0].new_empty(sum(self.take))
        take, give = ([n * self.size for n in counts] for counts in (self.take, self.give))
        along = along_group(self.group, out.device)
        with self.guard(along):
            start_swap(as_bytes(out), take, as_bytes(local[0].contiguous()), give, along).wait()
        return [out]

    @property
    def partner(self) -> FlatExchange:
        return FlatExchange(self.group, self.size, self.give, self.take)

    def bytes_received(self, comm: object) -> int:
        return (sum(self.take) - self.take[dist.get_rank(self.group)]) * self.size


class Spread(GroupStep):
    """A value that is the same on all ranks, of which each uses a part: nothing moves, the gradients add up."""

    def run(self, comm: object, local: Tensors) -> list[torch.Tensor]:
        return [local[0].view_as(local[0])]

    @property
    def partner(self) -> Sum:
        return Sum(self.group, self.size)


class Sum(GroupStep):
    """The sum over the ranks of a group; its gradient is spread."""

    kind = "all_reduce"

    def run(self, comm: object, local: Tensors) -> list[torch.Tensor]:
        out = local[0].clone(memory_format=torch.contiguous_format)
        with self.guard(along_group(self.group, out.device)) as guard:
            guard.meet()
            dist.all_reduce(torch.view_as_real(out) if out.is_complex() else out, group=self.group)
        return [out]

    @property
    def partner(self) -> Spread:
        return Spread(self.group, self.size)

    def bytes_received(self, comm: object) -> int:
        ranks = dist.get_world_size(self.group)
        return 2 * (ranks - 1) * self.size // ranks


def exchange(flat: torch.Tensor, take: Counts, give: Counts, group: Group, note: Note) -> torch.Tensor:
    """Send `give[r]` elements of `flat` to rank r of the group, and return the `take[r]` elements that come from each.
    Differentiable where `flat` needs grad, which must be on all ranks or on none."""
    step = FlatExchange(group, flat.element_size(), list(take), list(give))
    return run_steps(_LISTS, (step,), (flat,), note)[0]


def spread(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a plain tensor whose gradient is the sum of all ranks' gradients."""
    return run_steps(_LISTS, (Spread(group, value.nbytes),), (value,), Note("spread"))[0]
