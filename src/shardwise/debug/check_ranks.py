"""The checked mode: ranks whose programs differ find out before they communicate, and all say who differs, and how."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardwise.comm.checked import CheckedMove, Checker
from shardwise.comm.guard import compare
from shardwise.comm.record import user_line
from shardwise.errors import check_type

SWITCH = "SHARDWISE_CHECK_RANKS"
_SHOWN = 30  # collectives that a repr lists


class CheckRanks:
    """A stretch of the program in which ranks compare, made by `check_ranks`."""

    def __init__(self, keep: int = 1000, lines: bool = True) -> None:
        check_type(keep, int, "check_ranks: keep", "give how many collectives are kept")
        if keep < 0:
            raise ValueError(f"check_ranks: keep must be an int >= 0, got {keep}")
        self._checker = Checker(keep, lines)
        self._outer: list[Checker] = []

    def __enter__(self) -> CheckRanks:
        self._outer = compare[:]  # type: ignore[assignment]
        compare[:] = [self._checker]
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                self._checker.leave(user_line())
        finally:
            compare[:] = self._outer

    @property
    def record(self) -> Sequence[CheckedMove]:
        """The last collectives of this rank, oldest first: see `CheckedMove` for what is known of each."""
        return tuple(self._checker.record)

    def __repr__(self) -> str:
        kept = self.record
        more = [f"... {len(kept) - _SHOWN} before these: .record has them"] if len(kept) > _SHOWN else []
        return "\n".join([f"{len(kept)} collectives", *more, *map(str, kept[-_SHOWN:])])


def check_ranks(keep: int = 1000, lines: bool = True) -> CheckRanks:
    """Compare, before each collective of its ``with`` block, what all its ranks are about to do.

    All ranks must do the same communication in the same order. If one does not (an `if` on a value that only this rank
    has, a random draw that it skips, another shape or order), the others wait forever or get wrong values. Inside of
    this block, every rank raises `RanksDifferError` instead, before anything is sent. The error is the same on all
    ranks: which rank differs, with its op, layouts and line, and what the others do. A rank that fails, or leaves the
    block early, is named, too.

    Enter and leave it on all ranks. It costs one small message to each rank of a collective, so it can stay on while a
    program is being written. For a whole program set the environment variable ``SHARDWISE_CHECK_RANKS=1``. On a
    simulated mesh there is one program only, and nothing to compare.

    Args:
        keep: How many collectives are kept in `record`.
        lines: Whether ranks must be at the same line of the same file too. Two moves of equal layouts in another order
            are told apart by nothing else. Say False where ranks take different branches on purpose.

    Returns:
        A context manager. Its `record` has the last collectives of this rank, and its repr lists them.

    Example:
        >>> with check_ranks() as checked:
        ...     pass
        >>> len(checked.record)
        0
    """
    return CheckRanks(keep, lines)


_whole = check_ranks().__enter__() if os.environ.get(SWITCH, "") not in ("", "0") else None


def whole_program() -> CheckRanks | None:
    """The block around the whole program, if ``SHARDWISE_CHECK_RANKS=1`` asked for one when it began."""
    return _whole
