"""Moves that bring nothing new: a second one of the same tensor, and one that undoes another."""

from __future__ import annotations

from shardwise.captures.aliasing import Memory
from shardwise.captures.program import Move, Program, Ref, Statement
from shardwise.move.exchange import Exchange


def merge_equal_moves(program: Program) -> None:
    """Make a move once where several equal ones of one tensor are made, if nobody writes to it or to the results."""
    if not _has_moves(program, 2):
        return
    memory = Memory(program)
    known: list[tuple[int, Statement]] = []
    new: dict[Ref, Ref] = {}
    kept: list[Statement] = []
    for at, statement in enumerate(program.statements):
        statement.replace_refs(new)
        if isinstance(statement.func, Move) and all(ref is not None for ref in statement.outs):
            first = next((p for p in known if _is_repeated(p, (at, statement), memory)), None)
            if first is not None:
                new.update(zip(statement.outs, first[1].outs, strict=True))  # type: ignore[arg-type]
                continue
            known.append((at, statement))
        kept.append(statement)
    _rename_outputs(program, new)
    program.statements[:] = kept


def _is_repeated(earlier: tuple[int, Statement], later: tuple[int, Statement], memory: Memory) -> bool:
    before, after = earlier[1], later[1]
    if before.args != after.args or not after.func.is_like(before.func):  # type: ignore[attr-defined]
        return False
    sources = list(after.refs())
    results = [ref for ref in (*before.outs, *after.outs) if ref is not None]
    return not memory.is_written(sources, earlier[0], later[0]) and not memory.is_written(results)


def drop_inverse_moves(program: Program) -> None:
    """Take the tensor itself where a move brings back what another moved away, if nobody writes to any of them."""
    if not _has_moves(program, 2):
        return
    memory = Memory(program)
    made_by: dict[Ref, tuple[int, Statement]] = {}
    new: dict[Ref, Ref] = {}
    kept: list[Statement] = []
    for at, statement in enumerate(program.statements):
        statement.replace_refs(new)
        if isinstance(statement.func, Move):
            there = next((made_by[ref] for ref in statement.refs() if ref in made_by), None)
            if there is not None and _undoes(statement, there[1]) and None not in statement.outs:
                refs = [*there[1].refs(), *statement.refs(), *(r for r in statement.outs if r is not None)]
                if not memory.is_written(refs, there[0]):
                    new.update(zip(statement.outs, there[1].args, strict=True))  # type: ignore[arg-type]
                    continue
            for ref in statement.outs:
                if ref is not None:
                    made_by[ref] = (at, statement)
        kept.append(statement)
    _rename_outputs(program, new)
    program.statements[:] = kept


def _undoes(back: Statement, there: Statement) -> bool:
    """Whether one exchange of tiles leads back to where the other came from."""
    one, other = there.func, back.func
    if not isinstance(one, Move) or not isinstance(other, Move) or one.comm is not other.comm:
        return False
    if list(back.args) != list(there.outs) or one.before != other.after:
        return False
    if len(one.steps) != 1 or len(other.steps) != 1:
        return False
    away, home = one.steps[0], other.steps[0]
    if not isinstance(away, Exchange) or not isinstance(home, Exchange) or away.reduces or home.reduces:
        return False
    return away.src.placements == home.dst.placements and away.dst.placements == home.src.placements


def _has_moves(program: Program, count: int) -> bool:
    return sum(isinstance(statement.func, Move) for statement in program.statements) >= count


def _rename_outputs(program: Program, new: dict[Ref, Ref]) -> None:
    program.outputs[:] = [new.get(ref, ref) for ref in program.outputs]
