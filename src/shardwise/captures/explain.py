"""What a captured function does, for people: its collectives with their lines and bytes, and what the passes did."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from shardwise.captures.passes.overlap import Begin, Wait
from shardwise.captures.program import Program
from shardwise.drawing import size_name

PassLine = tuple[str, int, int, int, float]  # name, statements, moves, bytes, seconds of moves


def explain(
    programs: Sequence[tuple[Program, Sequence[PassLine]]],
    eager: dict[str, int],
    not_graphs: Sequence[str] = (),
    regions: dict[str, int] | None = None,
) -> str:
    """The text of `Captured.explain()`."""
    out = io.StringIO()
    console = Console(file=out, width=120)
    for number, (program, passes) in enumerate(programs):
        console.print(f"program {number}: {len(program.statements)} statements, {len(program.state)} tensors of state")
        console.print(_pass_table(passes))
        table = _move_table(program)
        console.print(table if table.row_count else "It communicates nothing.")
    for reason in not_graphs:
        console.print(f"no CUDA graph: {reason}")
    for reason, count in (regions or {}).items():
        console.print(f"eager between captured parts, {count} times: {reason}")
    for reason, count in eager.items():
        console.print(f"eager, {count} calls: {reason}")
    if not programs and not eager:
        console.print("Not called yet: the first call is captured.")
    return out.getvalue()


def _pass_table(passes: Sequence[PassLine]) -> Table:
    header = ("pass", "statements", "moves", "bytes", "estimated time of moves")
    table = Table(*header, title="passes", title_justify="left")
    for name, statements, moves, size, seconds in passes:
        table.add_row(name, str(statements), str(moves), size_name(size), f"{seconds * 1e6:,.0f} us")
    return table


def _move_table(program: Program) -> Table:
    table = Table(title="collectives", title_justify="left")
    for name in ("collective", "axis", "bytes", "for", "pass", "source", "overlaps with"):
        table.add_column(name, overflow="fold")  # a line number is never cut off
    for at, statement in enumerate(program.statements):
        for move in statement.moves:
            way = "backward" if move.note.backward else "forward"
            beside = _beside(program, at) if isinstance(statement.func, Begin) else ""
            source = (move.note.source or statement.source).removeprefix(f"{os.getcwd()}{os.sep}")
            table.add_row(move.kind, move.where, size_name(move.bytes), move.note.op, way, source, beside)
    return table


def _beside(program: Program, begun: int) -> str:
    """How many ops run while a move is under way, and the first of them."""
    handle = program.statements[begun].outs[0]
    names: list[str] = []
    for statement in program.statements[begun + 1 :]:
        if isinstance(statement.func, Wait) and statement.args == (handle,):
            break
        if statement.is_op:
            names.append(statement.label)
    return f"{len(names)} ops: {', '.join(dict.fromkeys(names[:3]))}" if names else "nothing"
