"""``python -m shardwise.testing.faults``: put faults into programs of real processes, and see how those end."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from shardwise.testing.faults.kinds import kinds
from shardwise.testing.faults.run import inject, table


def main(arguments: list[str] | None = None) -> int:
    """Put faults into programs; the exit status says whether all ended right."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many faults (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of ranks, places and values")
    parser.add_argument("--jobs", type=int, default=3, help="how many at a time (default: 3)")
    parser.add_argument("--only", default="", help="kinds whose names have this in them")
    options = parser.parse_args(arguments)
    wanted = [kind for kind in kinds() if options.only in kind.name]
    found = inject(wanted, options.count, options.seed, options.jobs, show=True)
    console = Console()
    console.print(table(found))
    right = sum(not trial.wrong for trial in found)
    console.print(f"{right} of {len(found)} faults of {len(wanted)} kinds ended right")
    for trial in found:
        if trial.wrong:
            print(f"{trial.kind.name}: {trial.size} ranks, rank {trial.faulty}, seed {trial.seed}: {trial.wrong}")
    return 0 if right == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
