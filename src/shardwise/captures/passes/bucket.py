"""Sums over the same ranks that come one after the other travel together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.captures.aliasing import Memory
from shardwise.captures.program import Move, Program, Statement
from shardwise.comm.record import Note
from shardwise.move.steps import AllReduce

_SMALL = 1 << 20  # bytes of a tensor: larger ones gain nothing
_MOST = 1 << 24  # bytes that travel together


def bucket_reductions(program: Program) -> None:
    """Sum many small tensors in one all-reduce. Numbers may be added up in another order."""
    statements = program.statements
    memory = Memory(program)
    kept: list[Statement] = []
    waiting: list[tuple[int, Statement]] = []
    for at, statement in enumerate(statements):
        is_small = _is_small_sum(statement)
        depends = {ref for _, s in waiting for ref in s.outs}
        uses = depends & set(statement.refs())
        touched = waiting and memory.is_written([r for _, s in waiting for r in s.refs()], waiting[0][0], at + 1)
        fits = not waiting or (is_small and _go_together(waiting[0][1], statement))
        if waiting and (uses or touched or statement.outside or (is_small and not fits) or _is_other_move(statement)):
            kept += _together([s for _, s in waiting])
            waiting = []
        if is_small and (not waiting or _bytes(waiting) + statement.func.bytes <= _MOST):  # type: ignore[attr-defined]
            waiting.append((at, statement))
        elif is_small:
            kept += _together([s for _, s in waiting])
            waiting = [(at, statement)]
        else:
            kept.append(statement)
    kept += _together([s for _, s in waiting])
    statements[:] = kept


def _is_other_move(s: Statement) -> bool:
    return isinstance(s.func, Move) and not _is_small_sum(s)


def _is_small_sum(s: Statement) -> bool:
    move = s.func
    if not isinstance(move, Move) or move.comm.simulated or len(move.steps) != 1:
        return False
    step = move.steps[0]
    return isinstance(step, AllReduce) and step.reduce_op == "sum" and move.bytes <= _SMALL and s.outs[0] is not None


def _go_together(one: Statement, other: Statement) -> bool:
    a, b = one.func.steps[0], other.func.steps[0]  # type: ignore[attr-defined]
    same = one.func.comm is other.func.comm and a.axes == b.axes  # type: ignore[attr-defined]
    return same and a.layout.dtype == b.layout.dtype and a.layout.device == b.layout.device


def _bytes(waiting: list[tuple[int, Statement]]) -> int:
    return sum(s.func.bytes for _, s in waiting)  # type: ignore[attr-defined]


def _together(group: list[Statement]) -> list[Statement]:
    if len(group) < 2:
        return group
    moves: list[Move] = [s.func for s in group]  # type: ignore[misc]
    note = Note(f"{len(group)} sums", "bucketed", group[0].func.note.backward, group[0].source)  # type: ignore[attr-defined]
    bucket = Bucket(moves, note)
    made = Statement(bucket, tuple(s.args[0] for s in group), outs=[s.outs[0] for s in group], single=False)
    made.label, made.source, made.note = "all_reduce", group[0].source, note
    return [made]


class Bucket(Move):
    """Several sums over the same ranks as one."""

    def __init__(self, moves: list[Move], note: Note) -> None:
        first = moves[0]
        super().__init__(first.run, first.comm, first.steps, first.before, first.after, note)
        self._moves = moves

    @property
    def bytes(self) -> int:
        return sum(move.bytes for move in self._moves)

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = torch.cat([value.reshape(-1) for value in values])
        together: Callable[..., torch.Tensor] = self.run
        whole = together(self.comm, self.steps, flat, self.note)
        parts = whole.split([value.numel() for value in values])
        return tuple(part.reshape(value.shape) for part, value in zip(parts, values, strict=True))

    def is_like(self, other: object) -> bool:
        return False
