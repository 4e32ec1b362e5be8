"""Running a plan between tiles, on a process group or in one process: one autograd node, whose backward is the plan
reversed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note, for_backward, listeners, record, recording_to, user_line
from shardwise.errors import CommError, MoveError
from shardwise.move.tile_program import Program

if TYPE_CHECKING:
    from shardwise.move.tiles import TilePlan

_TAG = 0x711E  # the messages of tiles, apart from those a program sends itself


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous flat tensor: one element may come with any stride, but a view of bytes asks for 1."""
    return (flat.as_strided(flat.shape, (1,)) if flat.numel() <= 1 else flat).view(torch.uint8)


class GroupExchange:
    """An exchange over a process group, of exact sizes and any dtype."""

    axis_names: tuple[str, ...] = ("tiles",)

    def __init__(self, group: Any) -> None:
        self.group: Any = group if group is not None else dist.group.WORLD
        self.ranks = dist.get_process_group_ranks(self.group)

    def swap(
        self,
        plan: TilePlan,
        parts: tuple[torch.Tensor, ...],
        note: Note,
        heard: list[Any],
        into: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        mine = plan.program(dist.get_rank())
        self._check(plan, mine, parts)
        if plan.is_local:
            return mine.unpack(parts[0].new_empty(0), parts, into)
        if heard:
            record(self, "all_to_all", 0, mine.received * parts[0].element_size(), note)  # type: ignore[arg-type]
        try:
            if self.sends(parts[0].device):
                return self._by_messages(mine, parts, into)
            return mine.unpack(self._all_to_all(mine, mine.pack(parts)), parts, into)
        except (RuntimeError, ValueError) as error:
            raise CommError(f"exchange of tiles failed on rank {mine.rank} of {self.ranks}: {error}") from error

    def sends(self, device: torch.device) -> bool:
        """Whether messages beat a collective: gloo's collectives go through a thread of their own, its messages do
        not, and a message may be a tile itself. All ranks must answer alike."""
        return device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(self.group)

    def _by_messages(
        self, mine: Program, parts: Sequence[torch.Tensor], into: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """One message a peer, straight out of and into tiles where these allow it. What stays is copied meanwhile."""
        out = mine.prepare(parts, into)
        coming = []
        for message in mine.incoming:
            place = message.landing(out)
            wire = parts[0].new_empty(message.end - message.start) if place is None else place
            work = self.group.recv([wire], self.ranks.index(message.peer), _TAG)
            coming.append((work, None if place is not None else (message, wire)))
        going = [
            self.group.send([message.packed(parts)], self.ranks.index(message.peer), _TAG) for message in mine.outgoing
        ]
        mine.keep(parts, out, into is None)
        for work, packed in coming:
            work.wait()
            if packed is not None:
                packed[0].unpack(packed[1], out)
        for work in going:
            work.wait()
        return out

    def _all_to_all(self, mine: Program, send: torch.Tensor) -> torch.Tensor:
        width, out = send.element_size(), send.new_empty(mine.received)
        dist.all_to_all_single(
            as_bytes(out),
            as_bytes(send),
            [mine.receive_counts.get(r, 0) * width for r in self.ranks],
            [mine.send_counts.get(r, 0) * width for r in self.ranks],
            group=self.group,
        )
        return out

    def _check(self, plan: TilePlan, mine: Program, parts: tuple[torch.Tensor, ...]) -> None:
        if not plan.all_ranks.issubset(self.ranks):
            missing = sorted(plan.all_ranks - set(self.ranks))
            raise MoveError(f"ranks {missing} hold or need tiles, but the group has the ranks {self.ranks}")
        if len(parts) != max(1, mine.sources):
            raise MoveError(f"rank {mine.rank} passes {len(parts)} tensors for its {mine.sources} source tiles")


class Simulated:
    """Every rank in this process: buffers are handed over."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks

    def swap(self, plan: TilePlan, parts: tuple[torch.Tensor, ...], note: Note, heard: list[Any]) -> list[torch.Tensor]:
        flat = iter(parts)
        held = {r: tuple(next(flat) for _ in range(max(1, plan.program(r).sources))) for r in self.ranks}
        sent = {}
        for r in self.ranks:
            program = plan.program(r)
            wires = program.pack(held[r]).split(list(program.send_counts.values()))
            sent.update({(r, to): wire for to, wire in zip(program.send_counts, wires)})
        outs: list[torch.Tensor] = []
        for r in self.ranks:
            wires = [sent[(source, r)] for source in plan.program(r).receive_counts]
            wire = torch.cat(wires) if wires else held[r][0].new_empty(0)
            outs += plan.program(r).unpack(wire, held[r])
        return outs


class Way:
    """A plan, how its buffers travel, and on whose behalf."""

    def __init__(self, plan: TilePlan, exchange: Any, note: Note) -> None:
        self.plan, self.exchange, self.note = plan, exchange, note

    def go(self, parts: tuple[torch.Tensor, ...], heard: list[Any] | None = None) -> list[torch.Tensor]:
        heard = listeners() if heard is None else heard
        if torch.is_grad_enabled() and any(t.requires_grad for t in parts):
            return list(_Moved.apply(self, heard, *parts))
        return self.exchange.swap(self.plan, parts, self.note, heard)


class _Moved(torch.autograd.Function):
    """One node a move; the gradient takes the reverse plan, whose reverse is the plan: second derivatives are exact."""

    @staticmethod
    def forward(ctx: Any, way: Way, heard: list[Any], *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = way.exchange.swap(way.plan, parts, way.note, heard)
        ctx.way, ctx.heard, ctx.source = way, heard, user_line() if heard else None
        ctx.shapes = [p.shape for p in parts]
        return tuple(out.view_as(out) if any(out is p for p in parts) else out for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        way = ctx.way
        back = Way(way.plan.reverse, way.exchange, for_backward(way.note, ctx.source))
        with recording_to(ctx.heard):
            got = back.go(tuple(grads))
        return None, None, *(g.view(shape) if g.numel() == 0 else g for g, shape in zip(got, ctx.shapes))
