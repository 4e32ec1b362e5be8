"""torch.compile leaves this package's frames alone.

If Dynamo traced the engine, caches and layouts would become constants of a graph. It skips this package instead, so
that every op on a DTensor is a graph break and runs as in eager mode: the same answer, no speed-up. Dynamo is slow to
import and most programs never need it, so this package is added to its list when the program imports Dynamo.
"""

from __future__ import annotations

from shardwise.imports import when_imported


def keep_out() -> None:
    """Have Dynamo skip this package, now or once it is imported."""
    when_imported("torch._dynamo.trace_rules", lambda rules: rules.add("shardwise"))
