"""An exact all-to-all of flat tensors over a table's process group, in the ledger and differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.messages import as_bytes
from shardwise.comm.record import Note, for_backward, record, recorders, recording_to, user_line
from shardwise.sharded.groups import Group

Counts = Sequence[int]  # of elements, by rank of the group


class TilesAxis:
    """A mesh axis for the ledger: what it calls the ranks of a process group."""

    axis_names = ("tiles",)


class _Exchange(torch.autograd.Function):
    """The exchange as an autograd node; the gradient goes back the same way."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, note: Note, heard: Any, take: Counts, give: Counts, flat: torch.Tensor
    ) -> torch.Tensor:
        ctx.plan = (group, note, heard, user_line() if heard else None, take, give)
        return _all_to_all(flat, take, give, group, note, heard)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        group, note, heard, source, take, give = ctx.plan
        with recording_to(heard):
            back = _Exchange.apply(group, for_backward(note, source), heard, give, take, grad.contiguous())
        return None, None, None, None, None, back


def exchange(flat: torch.Tensor, take: Sequence[int], give: Sequence[int], group: Group, note: Note) -> torch.Tensor:
    """Send `give[r]` elements of `flat` to rank r of the group, and return the `take[r]` elements that come from each.

    Differentiable where `flat` needs grad, which must be on all ranks or on none.
    """
    if flat.requires_grad and torch.is_grad_enabled():
        return _Exchange.apply(group, note, recorders(), list(take), list(give), flat)
    return _all_to_all(flat.detach(), list(take), list(give), group, note, recorders())


def _all_to_all(flat: torch.Tensor, take: Counts, give: Counts, group: Group, note: Note, heard: Any) -> torch.Tensor:
    out = flat.new_empty(sum(take))
    if heard:
        me = dist.get_rank(group)
        record(TilesAxis(), "all_to_all", 0, (sum(take) - take[me]) * flat.element_size(), note)  # type: ignore[arg-type]
    width = flat.element_size()
    dist.all_to_all_single(
        as_bytes(out), as_bytes(flat), [n * width for n in take], [n * width for n in give], group=group
    )
    return out
