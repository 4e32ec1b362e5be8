"""Moves as autograd sees them: one node a move, whose backward runs each step's partner in reverse.

Because a partner's partner is the step itself, second derivatives come out exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.base import Comm, Step
from shardwise.comm.record import Note, for_backward, listeners, record_step, recording_to, user_line
from shardwise.errors import CommError


class _Move(torch.autograd.Function):
    """Inputs and outputs are the distinct plain tensors of a local value before and after the steps."""

    @staticmethod
    def forward(ctx: Any, box: list[Any], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        comm, steps, local, note, run = box
        heard = listeners()
        result = run(comm, steps, local, note, heard)
        outs = comm.values(result)
        if any(out is value for out in outs for value in values):  # autograd wants outputs of its own
            outs = tuple(out.view_as(out) for out in outs)
        ctx.comm, ctx.steps, ctx.note = comm, steps, note
        ctx.before, ctx.after = comm.structure(local), comm.structure(result)
        ctx.heard, ctx.source = heard, user_line() if heard else None
        box.append(ctx.after)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        comm = ctx.comm
        partners = [step.partner for step in reversed(ctx.steps)]
        note = for_backward(ctx.note, ctx.source)
        with recording_to(ctx.heard):
            back = run_steps(comm, partners, comm.assemble(ctx.after, grads), note)
        return None, *comm.pick_gradients(ctx.before, back)


def run_steps(
    comm: Comm, steps: Sequence[Step], local: Any, note: Note, heard: list[Any] | None = None, run: Any = None
) -> Any:
    """The local value after the steps; recorded by autograd where its tensors are. `run` is how steps are run: now."""
    run = run or _run
    if not steps:
        return local
    if torch.is_grad_enabled():
        values = comm.values(local)
        if any(v.requires_grad for v in values):
            if comm.simulated:
                local.used = True
            box = [comm, steps, local, note, run]
            outs = _Move.apply(box, *values)
            return comm.assemble(box[-1], outs)
    return run(comm, steps, local, note, listeners() if heard is None else heard)


def _run(comm: Comm, steps: Sequence[Step], local: Any, note: Note, heard: list[Any]) -> Any:
    for step in steps:
        record_step(comm, step, note, heard)
        try:
            local = comm.run(step, local)
        except CommError as error:
            raise CommError(f"{note.op}{' (backward)' if note.backward else ''}: {error}") from error.__cause__
    return local


class Started:
    """Runs steps as far as can be without waiting: the first exchange is begun, the tensor it will fill is there.
    `finish` waits, runs what is left and fills it. A first step may write over the source if that is given away."""

    def __init__(self, giving: bool = False) -> None:
        self.giving = giving
        self.finish: Callable[[], Any] = lambda: None

    def __call__(self, comm: Any, steps: Sequence[Step], local: Any, note: Note, heard: list[Any]) -> Any:
        for i, step in enumerate(steps):
            if step.kind != "local" and comm.can_start(step, local):
                record_step(comm, step, note, heard)
                out, arrive = comm.start(step, local, self.giving and i == 0)
                rest = steps[i + 1 :]
                self.finish = arrive
                if rest:
                    first, out = out, comm.filled_later(rest[-1], out)
                    self.finish = lambda: _fill(out, arrive, comm, rest, first, note, heard)  # noqa: B023
                return out
            local = _run(comm, [step], local, note, heard)
        return local


@torch.no_grad()
def _fill(
    out: Any, arrive: Callable[[], Any], comm: Any, rest: Sequence[Step], first: Any, note: Note, heard: list[Any]
) -> None:
    arrive()
    out.copy_(_run(comm, rest, first, note, heard))
