"""What holds for a stretch of the program: `strict()`, and the op whose program is running."""

from __future__ import annotations

import threading
from typing import Any

from shardwise.errors import StrictError
from shardwise.layout import Layout

_state = threading.local()


class _Functions(threading.local):
    applying = False  # whether a torch.autograd.Function is being applied, by the entry that knows distributed tensors


functions = _Functions()


class strict:
    """Raise on any communication the program did not ask for: as a context manager, or a switch.

    >>> with strict():
    ...     pass
    >>> strict.enable(); strict.disable()
    """

    def __enter__(self) -> strict:
        _state.depth = getattr(_state, "depth", 0) + 1
        return self

    def __exit__(self, *exc: Any) -> None:
        _state.depth -= 1

    @staticmethod
    def enable() -> None:
        _state.switched = True

    @staticmethod
    def disable() -> None:
        _state.switched = False


def is_strict() -> bool:
    return getattr(_state, "depth", 0) > 0 or getattr(_state, "switched", False)


class relaxed:
    """Inside: communication counts as asked for (what the library does on an explicit request)."""

    def __enter__(self) -> None:
        self.saved = (getattr(_state, "depth", 0), getattr(_state, "switched", False))
        _state.depth, _state.switched = 0, False

    def __exit__(self, *exc: Any) -> None:
        _state.depth, _state.switched = self.saved


class running:
    """Inside, the library computes the op `op` by a short program of other ops. Moves that this program makes are not
    moves that the user asked for, so `strict()` refuses them in the name of `op`."""

    def __init__(self, op: str) -> None:
        self.op = op

    def __enter__(self) -> None:
        self.outer, _state.op = getattr(_state, "op", None), self.op

    def __exit__(self, *exc: Any) -> None:
        _state.op = self.outer


def running_op() -> str | None:
    """The op whose program is running, if any."""
    return getattr(_state, "op", None)


def refuse_in_program(op: str, here: Layout, there: str) -> None:
    """Under strict(): say what the program of an op would move."""
    places = ", ".join(map(str, here.placements))
    raise StrictError(
        f"{op} would communicate under strict(): on the way it moves a tensor of shape {here.shape} from "
        f"[{places}] to {there}. Redistribute its operands first so that no dim it works along is cut"
    )


class implicit_replication:
    """Inside: plain tensors that meet distributed ones count as replicated, under strict() too."""

    def __enter__(self) -> implicit_replication:
        _state.replicating = getattr(_state, "replicating", 0) + 1
        return self

    def __exit__(self, *exc: Any) -> None:
        _state.replicating -= 1


def refuses_plain() -> bool:
    """Whether a plain tensor may not meet a distributed one."""
    return is_strict() and not getattr(_state, "replicating", 0)
