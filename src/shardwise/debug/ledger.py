"""The ledger: every communication of a stretch of the program, forward and backward."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.comm.record import Entry, listeners


class Ledger:
    """What was communicated, in order. Iterate it, index it, print it."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def __enter__(self) -> Ledger:
        self._heard = listeners()
        self._heard.append(self.entries.append)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._heard.remove(self.entries.append)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, i: int) -> Entry:
        return self.entries[i]

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def table(self) -> Table:
        """Equal communications of one source line together, as a rich table."""
        out = Table("op", "collective", "axis", "pass", "count", "bytes", "source", "reason")
        counts: Counter[tuple[str, ...]] = Counter()
        sizes: Counter[tuple[str, ...]] = Counter()
        for e in self.entries:
            row = (e.op, e.kind, e.axis, "backward" if e.backward else "forward", e.source, e.reason)
            counts[row] += 1
            sizes[row] += e.bytes
        for key, count in counts.items():
            *left, source, reason = key
            out.add_row(*left, str(count), f"{sizes[key]:,}", source, reason)
        return out

    def __repr__(self) -> str:
        head = f"{len(self)} communications, {self.total_bytes:,} bytes"
        if not self.entries:
            return head
        console = Console(width=160, file=io.StringIO())
        console.print(self.table())
        return f"{head}\n{console.file.getvalue()}"  # type: ignore[attr-defined]


def ledger() -> Ledger:
    """``with shardwise.debug.ledger() as log:`` records every communication inside."""
    return Ledger()
