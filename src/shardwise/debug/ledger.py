"""The ledger: every communication of a stretch of the program, forward and backward."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from shutil import get_terminal_size

from rich.console import Console
from rich.table import Table

from shardwise.comm.record import Entry, Recorder
from shardwise.drawing import page_table, size_name

HEADER = ("op", "collective", "axis", "pass", "count", "bytes", "source", "reason")
_SHOWN = 30  # rows that a repr has
_MOST_ROWS = 200  # that a notebook shows
_SMALL = 'style="font-size:13px"'


class Ledger:
    """What was communicated, in order. Iterate it, index it, print it.

    It records what its program does while it is open: in the thread that opened it, and in the backward passes of what
    was done in that thread, in whichever thread those run. What other threads do on their own is not in it.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # the communications, oldest first
        self._open: list[Recorder] = []  # one for each `with` it is in

    def __enter__(self) -> Ledger:
        recorder = Recorder(self.entries.append)
        recorder.open()
        self._open.append(recorder)
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.pop().close()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, i: int) -> Entry:
        return self.entries[i]

    @property
    def total_bytes(self) -> int:
        """Bytes received in all of them."""
        return sum(entry.bytes for entry in self.entries)

    def rows(self) -> list[tuple[str, ...]]:
        """Equal communications of one source line together; the columns are those of `HEADER`."""
        counts: Counter[tuple[str, ...]] = Counter()
        sizes: Counter[tuple[str, ...]] = Counter()
        for e in self.entries:
            row = (e.op, e.kind, e.axis, "backward" if e.backward else "forward", e.source, e.reason)
            counts[row] += 1
            sizes[row] += e.bytes
        return [(*key[:4], str(count), f"{sizes[key]:,}", *key[4:]) for key, count in counts.items()]

    def table(self, most: int | None = None) -> Table:
        """Return the rows as a rich table.

        Args:
            most: How many of them; the others are counted in the last line.
        """
        rows = self.rows()
        columns = _columns(rows)
        out = Table()
        for name in HEADER[:columns]:  # in a narrow terminal, lines and reasons are folded, and nothing is cut off
            out.add_column(name, overflow="fold", no_wrap=name not in ("source", "reason"))
        for row in rows[:most]:
            out.add_row(*row[:columns])
        if most is not None and len(rows) > most:
            out.caption = f"... and {len(rows) - most:,} more rows: .table() has them all"
        return out

    def _repr_html_(self) -> str:
        rows = self.rows()
        columns = _columns(rows)
        table = (
            page_table(HEADER[:columns], [row[:columns] for row in rows[:_MOST_ROWS]], numbers=(4, 5)) if rows else ""
        )
        more = f"<div>... and {len(rows) - _MOST_ROWS:,} more rows</div>" if len(rows) > _MOST_ROWS else ""
        return f"<div {_SMALL}>{len(self)} communications, {size_name(self.total_bytes)}{table}{more}</div>"

    def __rich__(self) -> Table:
        return self.table(_SHOWN)

    def __repr__(self) -> str:
        head = f"{len(self)} communications, {self.total_bytes:,} bytes"
        if not self.entries:
            return head
        out = io.StringIO()
        Console(width=min(160, get_terminal_size((160, 24)).columns), file=out).print(self.table(_SHOWN))
        return f"{head}\n{out.getvalue()}"


def _columns(rows: list[tuple[str, ...]]) -> int:
    """How many columns say something: reasons are shown only where there are some."""
    return len(HEADER) if any(row[-1] for row in rows) else len(HEADER) - 1


def ledger() -> Ledger:
    """Return a ledger, which records every communication inside of its ``with`` block.

    Example:
        >>> import shardwise, torch
        >>> x = shardwise.ones(8, device_mesh=shardwise.simulate(4), placements=[shardwise.Shard(0)])
        >>> with ledger() as log:
        ...     total = x.redistribute(placements=[shardwise.Replicate()])
        >>> [(entry.kind, entry.bytes) for entry in log]
        [('all_gather', 96)]
    """
    return Ledger()
