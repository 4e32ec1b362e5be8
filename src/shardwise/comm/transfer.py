"""A routed step on a process group: pack what others need, one collective a round, put what came where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.base import Coords
from shardwise.comm.boxes import Box, box_shape, pick, place
from shardwise.comm.simulation import reduce_parts
from shardwise.comm.swap import start_swap
from shardwise.comm.wire import WIRE, as_wire, numel, width

# torch 2.13 has new names for these two
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Transfer:
    """One run of a routed step; `peers` are the coordinates of those who take part, `ranks` their global ranks, both in
    the order of `group`, if there is one. The first round is under way once this is made; `finish` waits, runs the
    others and returns the new local tensor."""

    def __init__(
        self,
        step: Any,
        local: torch.Tensor,
        me: Coords,
        peers: Sequence[Coords],
        ranks: Sequence[int],
        group: Any,
    ) -> None:
        self.step, self.local, self.me, self.peers, self.ranks, self.group = step, local, me, peers, ranks, group
        self.whole: Box = tuple(((0, n),) if n else () for n in local.shape)
        self.out = local.new_empty(step.result_shape(me))
        cls = type(self)  # no bound methods kept: they would keep the tensors until the next collection of cycles
        if group is None:
            self.how: Any = cls._swap
        elif step.stacks and list(peers) == sorted(peers):
            self.how = cls._stack
        elif step.kind == "all_gather" and step.even:
            self.how = cls._gather
        elif self._reduces_natively():
            self.how = cls._reduce
        elif step.slices and step.rounds == 1 and list(peers) == sorted(peers):
            self.how = cls._slice
        else:
            self.how = cls._swap
        self.under_way = self.how(self, 0)

    def finish(self) -> torch.Tensor:
        for round in range(self.step.rounds):
            work, arrive, _kept = self.under_way
            if work is not None:
                work.wait()
            self.under_way = self.how(self, round + 1) if round + 1 < self.step.rounds else None  # travels meanwhile
            arrive()
        return self.out

    # Each way begins a round: (work to wait for, what to do then, memory to keep until then).
    def _stack(self, round: int) -> Any:
        """The parts, one rank after another, are the result."""
        if not self.out.numel():
            return None, _nothing, None
        mine = as_wire(self.local)
        work = getattr(dist, ALL_GATHER)(as_wire(self.out), mine, group=self.group, async_op=True)
        return work, _nothing, mine

    def _gather(self, round: int) -> Any:
        """Everyone sends the same to all, and as much as the others."""
        mine = pick(self.local, self.step.part(self.whole, round)).contiguous()
        if not mine.numel():
            return None, _nothing, None
        rows = mine.new_empty((len(self.peers), *mine.shape))
        work = getattr(dist, ALL_GATHER)(as_wire(rows), as_wire(mine), group=self.group, async_op=True)
        return work, lambda: self._place(round, dict(zip(self.peers, rows, strict=True))), mine

    def _reduce(self, round: int) -> Any:
        """Parts of a sum that the backend adds up."""
        if self.step.slices and list(self.peers) == sorted(self.peers):
            packed = self.local.contiguous().view(-1)
        else:
            sent = self.step.outgoing(self.me)
            packed = torch.cat([pick(self.local, sent[peer]).reshape(-1) for peer in self.peers])
        work = getattr(dist, REDUCE_SCATTER)(self.out.view(-1), packed, group=self.group, async_op=True)
        return work, _nothing, packed

    def _slice(self, round: int) -> Any:
        """Parts of a sum, sent from where they lie and added up here."""
        if not self.out.numel():
            return None, _nothing, None
        mine = as_wire(self.local)
        parts = self.local.new_empty((len(self.peers), *self.out.shape))
        sizes = [mine.numel() // len(self.peers)] * len(self.peers)
        work = start_swap(as_wire(parts), sizes, mine, sizes, self.ranks, self.group)
        return work, lambda: self._add_up(parts), mine

    def _add_up(self, parts: torch.Tensor) -> None:
        torch.add(parts[0], parts[1], out=self.out)
        for part in parts[2:]:
            self.out.add_(part)

    def _reduces_natively(self) -> bool:
        step = self.step
        return (
            step.kind == "reduce_scatter"
            and step.even
            and step.rounds == 1
            and step.reduce_op == "sum"
            and self.local.dtype in WIRE
            and dist.get_backend(self.group) == "nccl"
        )

    def _swap(self, round: int) -> Any:
        """Exactly what each rank needs from each."""
        step, me = self.step, self.me
        sent = {peer: step.part(box, round) for peer, box in step.outgoing(me).items() if peer != me}
        came = {p: step.part(box, round) for sources, box in step.incoming(me) for p in sources if p != me}
        counts = [numel(box_shape(sent[p])) if p in sent else 0 for p in self.peers]
        sizes = [numel(box_shape(came[p])) if p in came else 0 for p in self.peers]
        packed, received = self.local.new_empty(sum(counts)), self.local.new_empty(sum(sizes))
        for peer, into in zip(self.peers, packed.split(counts), strict=True):
            if peer in sent:
                into.view(box_shape(sent[peer])).copy_(pick(self.local, sent[peer]))
        wide = width(self.local.dtype)
        sizes_on_wire, counts_on_wire = [n * wide for n in sizes], [n * wide for n in counts]
        work = start_swap(as_wire(received), sizes_on_wire, as_wire(packed), counts_on_wire, self.ranks, self.group)
        parts = {p: x for p, x in zip(self.peers, received.split(sizes), strict=True) if p in came}
        return work, lambda: self._place(round, parts), packed

    def _place(self, round: int, parts: dict[Coords, torch.Tensor]) -> None:
        for sources, box in self.step.incoming(self.me):
            into = self.step.part(box, round)
            shape = box_shape(into)
            taken = [self._mine(round) if p == self.me else parts[p].view(shape) for p in sources]
            place(self.out, into, taken[0] if len(taken) == 1 else reduce_parts(taken, self.step.reduce_op))

    def _mine(self, round: int) -> torch.Tensor:
        return pick(self.local, self.step.part(self.step.outgoing(self.me)[self.me], round))


def _nothing() -> None:
    return None
