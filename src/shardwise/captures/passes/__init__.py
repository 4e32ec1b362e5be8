"""Passes over captured programs: each takes a program and changes it, and says in a line what it does.

`DEFAULT` keep every bit as eager runs have it. `bucket` may add numbers up in another order, so it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwise.captures.passes.bucket import bucket_reductions
from shardwise.captures.passes.clean import drop_aliases, drop_unused
from shardwise.captures.passes.overlap import overlap_moves
from shardwise.captures.passes.repeated import drop_inverse_moves, merge_equal_moves
from shardwise.captures.program import Program
from shardwise.errors import ShardwiseError, check_type

Pass = Callable[[Program], None]

PASSES: dict[str, Pass] = {
    "aliases": drop_aliases,
    "merge": merge_equal_moves,
    "inverse": drop_inverse_moves,
    "unused": drop_unused,
    "bucket": bucket_reductions,
    "overlap": overlap_moves,
    "cuda_graph": lambda program: setattr(program, "is_graph", True),  # `cuda_graph.py` runs it so
}
DEFAULT = ("aliases", "merge", "inverse", "unused")


class UnknownPass(ShardwiseError, ValueError):
    """There is no pass of that name."""


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names of passes in the order in which they run.

    Raises:
        UnknownPass: For a name that no pass has.
    """
    check_type(names, (str, list, tuple, set, frozenset), "capture: passes", f"give some of {', '.join(PASSES)}")
    chosen = [names] if isinstance(names, str) else list(names)
    for name in chosen:
        if not isinstance(name, str) or name not in PASSES:
            raise UnknownPass(f"capture: there is no pass {name!r}; passes are {', '.join(PASSES)}")
    return tuple(name for name in PASSES if name in chosen)


def run_passes(program: Program, names: Iterable[str]) -> list[tuple[str, int, int, int, float]]:
    """Run passes on a program: after each its name, and how many statements, moves and bytes there are, and the
    seconds that the moves take."""
    found = [("as captured", *_size(program))]
    for name in check_names(names):
        PASSES[name](program)
        found.append((name, *_size(program)))
    return found


def _size(program: Program) -> tuple[int, int, int, float]:
    moves = program.moves()
    return len(program.statements), len(moves), sum(m.bytes for m in moves), sum(m.seconds for m in moves)
