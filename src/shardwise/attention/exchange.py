"""How cut keys and values come to the queries: the program's choice."""

from __future__ import annotations

import threading

from shardwise.errors import RuleError

_state = threading.local()


class sequence_exchange:
    """A context manager: inside, cut keys and values are brought to the queries in this way.

    Args:
        way: "gather" (all at once), "ring" (from rank to rank, round a ring) or "auto" (by their size).

    Raises:
        RuleError: `way` is none of these.
    """

    def __init__(self, way: str) -> None:
        if way not in ("auto", "gather", "ring"):
            raise RuleError(f"sequence_exchange: way must be 'auto', 'gather' or 'ring', got {way!r}")
        self.way = way

    def __enter__(self) -> sequence_exchange:
        self.outer, _state.way = current_way(), self.way
        return self

    def __exit__(self, *exc: object) -> None:
        _state.way = self.outer


def current_way() -> str:
    """How keys and values are brought to the queries now, in this thread."""
    return getattr(_state, "way", "auto")


def set_sequence_exchange(way: str) -> None:
    """Set the way from here on, in this thread."""
    _state.way = sequence_exchange(way).way
