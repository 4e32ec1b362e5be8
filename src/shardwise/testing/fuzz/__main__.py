"""``python -m shardwise.testing.fuzz``: run random programs on one device and on meshes, and keep those that differ.

    python -m shardwise.testing.fuzz --minutes 60                  on simulated meshes, one worker per core
    python -m shardwise.testing.fuzz --processes 4 --programs 500  on 4 processes that gloo joins
    python -m shardwise.testing.fuzz --replay build/fuzz/17.txt    one program again

A program that fails is made as short as possible and written to a file, with what it gave and what it should give.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardwise.testing.fuzz.campaign import Found, gloo, simulated
from shardwise.testing.fuzz.judge import INEXACT, NO_ERROR, OTHER_ERROR, RAISED, RIGHT, TORCHS, WRONG, judge
from shardwise.testing.fuzz.program import Program

_MEANINGS = {
    RIGHT: "the same as on one device",
    INEXACT: "plain torch's own result changes with the last bits of the inputs",
    TORCHS: "a known defect of this version of torch (defects.py)",
    WRONG: "another value, gradient, shape, dtype, stride or requires_grad, in silence",
    NO_ERROR: "plain torch raises, we do not",
    OTHER_ERROR: "both raise, not the same kind of error",
    RAISED: "we raise, plain torch does not",
    "hang": "the ranks did not end in time, or one died",
}


def main(arguments: list[str] | None = None) -> int:
    """Run programs; the exit status says whether all were right."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, help="how long (default: until --programs have run)")
    parser.add_argument("--programs", type=int, help="how many (default: 1,000, or as many as fit into --minutes)")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed; the next ones count up")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="workers for simulated meshes")
    parser.add_argument("--processes", type=int, help="run on this many processes instead of simulated meshes")
    parser.add_argument("--device", default="cpu", help="cpu (gloo) or cuda (NCCL), with --processes")
    parser.add_argument("--no-strides", action="store_true", help="do not compare strides")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder of the programs that fail")
    parser.add_argument("--replay", type=Path, help="run only the program in this file, on a simulated mesh")
    options = parser.parse_args(arguments)
    if options.replay:
        program = Program.parse(options.replay.read_text())
        verdict = judge(program, strides=not options.no_strides)
        print(f"{program}\n\n{verdict}")
        return not verdict.right
    counts, refused = _run(options)
    _print(counts, refused)
    return 0 if all(kind in (RIGHT, INEXACT, TORCHS) for kind in counts) else 1


def _run(options: argparse.Namespace) -> tuple[Counter[str], Counter[str]]:
    """How many programs ended in each way: all, and those that plain torch refuses."""
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else None
    wanted = options.programs or (None if deadline else 1000)
    if options.processes:
        campaign = gloo(options.seed, wanted, deadline, options.processes, options.device, not options.no_strides)
    else:
        campaign = simulated(options.seed, wanted, deadline, options.jobs, not options.no_strides)
    options.out.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("programs", total=wanted, said="")
        for found in campaign:
            counts[found.kind] += 1
            refused[found.kind] += found.refused
            if not found.right:
                _keep(options.out, found)
            said = ", ".join(f"{n:,} {kind}" for kind, n in sorted(counts.items()))
            progress.update(bar, advance=1, said=said)
    return counts, refused


def _keep(folder: Path, found: Found) -> None:
    remarks = "\n".join(f"# {line}" for line in found.message.splitlines())
    (folder / f"{found.seed}.txt").write_text(f"{found.text}\n# seed {found.seed}: {found.kind}\n{remarks}\n")


def _print(counts: Counter[str], refused: Counter[str]) -> None:
    table = Table("programs", "share", "", "meaning")
    total = sum(counts.values()) or 1
    for kind, meaning in _MEANINGS.items():
        if counts[kind]:
            table.add_row(f"{counts[kind]:,}", f"{counts[kind] / total:.2%}", kind, meaning)
    Console().print(table)
    if total_refused := refused.total():
        alike = sum(refused[kind] for kind in (RIGHT, INEXACT, TORCHS))
        print(
            f"plain torch raises in {total_refused:,} of these programs; the mesh raises the same kind of error on the "
            f"same line in {alike:,} of them ({alike / total_refused:.2%})"
        )


if __name__ == "__main__":
    sys.exit(main())
