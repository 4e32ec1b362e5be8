"""Moves begin as soon as their source is there and are waited for when somebody needs them; ops run in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.captures.aliasing import Memory
from shardwise.captures.program import Move, Program, Ref, Statement
from shardwise.comm.record import recorders
from shardwise.move.run import Started

_IN_FLIGHT = 2  # moves that may be under way at once: a third begins when the first has arrived

Handle = tuple[Any, Callable[[], Any]]  # the local value there will be, and what waits for it


class Begin:
    """Begins a move; gives a handle."""

    def __init__(self, move: Move) -> None:
        self.moves = (move,)

    def __call__(self, *values: torch.Tensor) -> Handle:
        (move,), started = self.moves, Started()
        local = move.comm.assemble(move.before, values)
        return started(move.comm, move.steps, local, move.note, recorders()), started.finish


class Wait:
    """Waits for a move that was begun; gives its results."""

    def __init__(self, move: Move) -> None:
        self.move = move

    def __call__(self, handle: Handle) -> tuple[torch.Tensor, ...]:
        local, finish = handle
        finish()
        return self.move.comm_after.values(local)


def overlap_moves(program: Program) -> None:
    """Begin moves early and wait for them late. The order in which they begin, and every sum, stays as it is."""
    statements, memory = program.statements, Memory(program)
    used_at = _first_uses(program)
    begins: dict[int, list[int]] = {}  # statement before which a move begins -> numbers of moves
    waits: dict[int, list[int]] = {}  # statement before which it is waited for
    in_order: list[tuple[int, int]] = []  # of the moves so far: where they begin, where they are waited for
    barrier = 0
    for at, statement in enumerate(statements):
        if statement.outside or (isinstance(statement.func, Move) and not _may_overlap(statement)):
            barrier = at + 1
            continue
        if not isinstance(statement.func, Move):
            continue
        earliest = max(barrier, memory.ready(statement.refs(), at))
        if in_order:
            earliest = max(earliest, in_order[-1][0])
        if len(in_order) >= _IN_FLIGHT:
            earliest = max(earliest, in_order[-_IN_FLIGHT][1])
        latest = min(used_at.get(ref, len(statements)) for ref in statement.outs if ref is not None)
        latest = min(latest, memory.next_write(statement.refs(), at), _next_outside(statements, at))
        earliest = min(earliest, at)
        begins.setdefault(earliest, []).append(at)
        waits.setdefault(max(latest, at + 1), []).append(at)
        in_order.append((earliest, max(latest, at + 1)))
    _rewrite(program, begins, waits)


def _may_overlap(statement: Statement) -> bool:
    return type(statement.func) is Move and not statement.func.comm.simulated and None not in statement.outs


def _first_uses(program: Program) -> dict[Ref, int]:
    found: dict[Ref, int] = {}
    for at, statement in enumerate(program.statements):
        for ref in statement.refs():
            found.setdefault(ref, at)
    return found


def _next_outside(statements: list[Statement], at: int) -> int:
    return next((i for i in range(at + 1, len(statements)) if statements[i].outside), len(statements))


def _rewrite(program: Program, begins: dict[int, list[int]], waits: dict[int, list[int]]) -> None:
    statements = program.statements
    number = max((ref.number for s in statements for ref in s.outs if ref is not None), default=0)
    handles: dict[int, Ref] = {}
    moved = {at for group in begins.values() for at in group}
    kept: list[Statement] = []
    for at in range(len(statements) + 1):
        for waiting in waits.get(at, ()):
            old = statements[waiting]
            wait = Statement(Wait(old.func), (handles[waiting],), outs=old.outs, single=False)  # type: ignore[arg-type]
            wait.label, wait.source, wait.note = "wait", old.source, old.note
            kept.append(wait)
        for begun in begins.get(at, ()):
            old = statements[begun]
            number += 1
            handles[begun] = Ref(number)
            begin = Statement(Begin(old.func), old.args, outs=[handles[begun]])  # type: ignore[arg-type]
            begin.label, begin.source, begin.note = f"begin_{old.label}", old.source, old.note
            kept.append(begin)
        if at < len(statements) and at not in moved:
            kept.append(statements[at])
    program.statements[:] = kept
