"""An exact all-to-all of flat tensors over a table's process group, in the ledger and differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note, for_backward, listeners, record, user_line
from shardwise.comm.wire import as_bytes


class TilesAxis:
    """What the ledger calls the axis of a process group."""

    axis_names = ("tiles",)


class _Exchange(torch.autograd.Function):
    """The gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, group: Any, note: Note, heard: Any, take: Any, give: Any, flat: torch.Tensor) -> torch.Tensor:
        ctx.plan = (group, note, heard, user_line() if heard else None, take, give)
        return _all_to_all(flat, take, give, group, note, heard)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        group, note, heard, source, take, give = ctx.plan
        back = _Exchange.apply(group, for_backward(note, source), heard, give, take, grad.contiguous())
        return None, None, None, None, None, back


def exchange(flat: torch.Tensor, take: Sequence[int], give: Sequence[int], group: Any, note: Note) -> torch.Tensor:
    """`give[r]` elements go to each rank of the group, `take[r]` come from it. Differentiable where `flat` needs grad:
    it does on all ranks or on none."""
    if flat.requires_grad and torch.is_grad_enabled():
        return _Exchange.apply(group, note, listeners(), list(take), list(give), flat)
    return _all_to_all(flat.detach(), list(take), list(give), group, note, listeners())


def _all_to_all(flat: torch.Tensor, take: Any, give: Any, group: Any, note: Note, heard: Any) -> torch.Tensor:
    out = flat.new_empty(sum(take))
    if heard:
        me = dist.get_rank(group)
        record(TilesAxis(), "all_to_all", 0, (sum(take) - take[me]) * flat.element_size(), note)  # type: ignore[arg-type]
    width = flat.element_size()
    dist.all_to_all_single(
        as_bytes(out), as_bytes(flat), [n * width for n in take], [n * width for n in give], group=group
    )
    return out
