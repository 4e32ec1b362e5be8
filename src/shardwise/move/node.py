"""Running the steps of a move: one node of autograd per move, whose backward runs each step's partner in reverse.

Because a partner's partner is the step itself, second derivatives come out exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from shardwise.comm.record import Note, for_backward, listeners, tell, user_line
from shardwise.errors import CommError
from shardwise.move.steps import Step

Run = Callable[[Any, Sequence[Step], Any, Note, list[Any]], Any]


class Holder(Protocol):
    """What a node asks of a backend: the plain tensors inside of a local value, and local values made of them."""

    simulated: bool

    def values(self, local: Any) -> tuple[torch.Tensor, ...]: ...

    def structure(self, local: Any) -> Any: ...

    def assemble(self, structure: Any, values: Sequence[torch.Tensor | None]) -> Any: ...

    def pick_gradients(self, structure: Any, local: Any) -> tuple[torch.Tensor, ...]: ...


class _Move(torch.autograd.Function):
    """Inputs and outputs are the distinct plain tensors of a local value before and after the steps."""

    @staticmethod
    def forward(ctx: Any, call: list[Any], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        comm, steps, local, note, run = call
        ledgers = listeners()
        result = run(comm, steps, local, note, ledgers)
        ctx.comm, ctx.steps, ctx.note = comm, steps, note
        ctx.comm_after = after = _comm_after(comm, steps)
        outs = after.values(result)
        if any(out is value for out in outs for value in values):  # autograd wants outputs of its own
            outs = tuple(out.view_as(out) for out in outs)
        ctx.before, ctx.after = comm.structure(local), after.structure(result)
        ctx.ledgers, ctx.source = ledgers, user_line() if ledgers else None
        call.append(ctx.after)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        partners = [step.partner for step in reversed(ctx.steps)]
        note = for_backward(ctx.note, ctx.source)
        back = run_steps(ctx.comm_after, partners, ctx.comm_after.assemble(ctx.after, grads), note, ctx.ledgers)
        return None, *ctx.comm.pick_gradients(ctx.before, back)


def _comm_after(comm: Any, steps: Sequence[Step]) -> Any:
    for step in steps:
        comm = step.comm_after(comm)
    return comm


def run_steps(
    comm: Any,
    steps: Sequence[Step],
    local: Any,
    note: Note,
    ledgers: list[Any] | None = None,
    run: Run | None = None,
) -> Any:
    """The local value after the steps; recorded by autograd where its tensors are.

    Args:
        comm: The backend that holds `local`.
        steps: What to do, one after the other.
        local: What the ranks of this process hold.
        note: On whose behalf, for the ledger.
        ledgers: Who is told of it; those open in this thread if not given.
        run: How the steps are run: one after the other and waited for, if not given.
    """
    if not steps:
        return local
    if torch.is_grad_enabled():
        values = comm.values(local)
        if any(v.requires_grad for v in values):
            if comm.simulated:
                local.used = True
            call = [comm, steps, local, note, run or run_now]
            outs = _Move.apply(call, *values)
            return _comm_after(comm, steps).assemble(call[-1], outs)
    return (run or run_now)(comm, steps, local, note, listeners() if ledgers is None else ledgers)


def run_now(comm: Any, steps: Sequence[Step], local: Any, note: Note, ledgers: list[Any]) -> Any:
    """The local value after the steps, outside of autograd."""
    for step in steps:
        if ledgers:
            _record(comm, step, note, ledgers)
        try:
            local = step.run(comm, local)
        except CommError as error:
            raise CommError(f"{note.op}{' (backward)' if note.backward else ''}: {error}") from error.__cause__
        comm = step.comm_after(comm)
    return local


def _record(comm: Any, step: Step, note: Note, ledgers: list[Any]) -> None:
    if ledgers and step.kind != "local":
        tell(step.where, step.kind, step.bytes_received(comm), note, ledgers)


class Started:
    """Runs steps as far as can be without waiting: the first exchange is begun, the tensor it will fill is there.

    `finish` waits, runs what is left and fills it. With `owned`, a first step may write over the source.
    """

    def __init__(self, owned: bool = False) -> None:
        self.owned = owned
        self.finish: Callable[[], Any] = lambda: None

    def __call__(self, comm: Any, steps: Sequence[Step], local: Any, note: Note, ledgers: list[Any]) -> Any:
        for i, step in enumerate(steps):
            begun = step.start(comm, local, self.owned and i == 0) if step.kind != "local" else None
            if begun is None:
                local = run_now(comm, [step], local, note, ledgers)
                continue
            _record(comm, step, note, ledgers)
            out, self.finish = begun
            rest = steps[i + 1 :]
            return self._filled_later(comm, rest, out, note, ledgers) if rest else out
        return local

    def _filled_later(
        self, comm: Any, rest: Sequence[Step], first: torch.Tensor, note: Note, ledgers: list[Any]
    ) -> torch.Tensor:
        """Room for what the other steps will make of the first one's result, and a `finish` that fills it."""
        shape = rest[-1].result.local_shape_at(comm.coords)  # type: ignore[attr-defined]
        arrive, out = self.finish, first.new_empty(shape)

        @torch.no_grad()
        def fill() -> None:
            arrive()
            out.copy_(run_now(comm, rest, first, note, ledgers))

        self.finish = fill
        return out
