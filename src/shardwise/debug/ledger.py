"""The ledger: every communication of a stretch of the program, forward and backward."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from shardwise.comm.record import Entry, Recorder


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
        out = io.StringIO()
        Console(width=160, file=out).print(self.table())
        return f"{head}\n{out.getvalue()}"


def ledger() -> Ledger:
    """A ledger, which records every communication inside of its ``with`` block.

    Example:
        >>> import shardwise, torch
        >>> x = shardwise.ones(8, device_mesh=shardwise.simulate(4), placements=[shardwise.Shard(0)])
        >>> with ledger() as log:
        ...     total = x.redistribute(placements=[shardwise.Replicate()])
        >>> [(entry.kind, entry.bytes) for entry in log]
        [('all_gather', 96)]
    """
    return Ledger()
