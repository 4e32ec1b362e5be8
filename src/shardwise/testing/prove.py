"""``python -m shardwise.testing.prove``: try every operator and module of PyTorch's databases on every kind of layout.

Resumable: every operator's record is appended to a file as it comes in, and those that are there are not tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import shardwise
from shardwise.testing.pool import pool_of
from shardwise.testing.proof import FULL, QUICK, Effort, prove
from shardwise.testing.report import markdown, table, totals
from shardwise.testing.subjects import subjects


def main(arguments: list[str] | None = None) -> int:
    """Run the proof; the exit status says whether every operator was right."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.prove", description=__doc__)
    parser.add_argument("--only", help="operators to try, separated by commas")
    parser.add_argument("--quick", action="store_true", help="few samples and layouts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--fresh", action="store_true", help="forget what was tried before")
    parser.add_argument("--out", type=Path, default=Path("build/prove"), help="folder of the records")
    parser.add_argument("--device", default="cpu", help="where the tensors live (default: cpu)")
    parser.add_argument("--docs", type=Path, help="write the operators' page here")
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else FULL
    names = _chosen(options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / f"{'only' if options.only else 'quick' if options.quick else 'full'}.jsonl"
    if options.fresh or options.only:
        kept.unlink(missing_ok=True)
    records = _records(kept)
    _run([name for name in names if name not in records], effort, options, kept, records)
    result = _result([records[name] for name in names if name in records], effort)
    (options.out / "proof.json").write_text(json.dumps(result, indent=1))
    console = Console()
    console.print(table(result, everything=bool(options.only)))
    console.print(f"records: {options.out / 'proof.json'}")
    if options.docs:
        options.docs.write_text(markdown(result))
    return 0 if totals(result)["not right"] == 0 else 1


def _chosen(only: str | None) -> list[str]:
    everything = subjects()
    if only is None:
        return list(everything)
    wanted = only.split(",")
    found = [name for name in everything if name in wanted or name.partition(" ")[0] in wanted]
    unknown = [w for w in wanted if not any(w in (name, name.partition(" ")[0]) for name in found)]
    if unknown:
        sys.exit(f"--only: PyTorch's database has no operator {', '.join(map(repr, unknown))}")
    return found


def _records(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]  # the last may be half written
    return {record["name"]: record for record in map(json.loads, lines)}


def _run(names: list[str], effort: Effort, options: Any, kept: Path, records: dict[str, Any]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    with progress, kept.open("a") as file, pool_of(options.jobs) as pool:
        bar = progress.add_task("proving", total=len(names))
        tasks = {pool.submit(prove, name, effort, options.device): name for name in names}
        for task in as_completed(tasks):
            record = task.result().as_dict()
            records[record["name"]] = record
            file.write(json.dumps(record) + "\n")
            file.flush()
            progress.update(bar, advance=1, description=f"proving {record['name'][:30]:30}")


def _result(records: list[dict[str, Any]], effort: Effort) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "shardwise": shardwise.__version__,
        "meshes": [list(shape) for shape in effort.layouts],
        "operators": sorted(records, key=lambda record: record["name"]),
    }


if __name__ == "__main__":
    sys.exit(main())
