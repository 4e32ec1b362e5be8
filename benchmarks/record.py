"""What recording a run costs: training steps with and without `shardwise.debug.record`, on gloo processes.

    python benchmarks/record.py                # the GPT of benchmarks/train.py on 4 processes
    python benchmarks/record.py --rounds 30 --only "shardwise, layouts alone"

Recorded and unrecorded rounds take turns in the same processes. A ratio is one round over the mean of the two around
it, and the table has their median: what slows a machine for a while slows neighbours alike. The processor time beside
it (all threads of all processes) says what a step costs where other programs keep the cores busy.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from train import SMALL, join, on_processes, peers_of

from shardwise.debug import record
from shardwise.reports import read_run

PEERS = {
    "shardwise, parallel styles": "tensor",
    "shardwise, layouts alone": "tensor",
    "shardwise none": "data",
    "shardwise parameters (ZeRO 3)": "zero-3",
}


def measure(rank, parts, folder, peer, options, results):
    """Seconds and processor seconds of each round, unrecorded and recorded in turn."""
    join(rank, parts, folder)
    step = peers_of(PEERS[peer])[peer](options, rank, parts)
    run = Path(folder, "run")
    took = []
    for _ in range(3):
        step()
    for i in range(2 * options.rounds + 1):
        gc.collect()
        dist.barrier()
        recorded = i % 2 == 1
        if recorded:
            recording = record(run, ops=not options.no_ops)
            recording.__enter__()
            step()  # the first step names everything
            dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(options.steps):
            step()
        busy = torch.tensor(time.process_time() - busy, dtype=torch.float64)
        dist.all_reduce(busy)
        took.append(((time.perf_counter() - start) / options.steps, float(busy) / options.steps))
        if recorded:
            recording.__exit__(None, None, None)
    if rank == 0:
        found = read_run(run).ranks[0]
        results.put((took, len(found.events) / (options.steps + 1), len(found.ops) / (options.steps + 1)))
    dist.barrier()
    dist.destroy_process_group()


def ratios(took, i):
    """Each recorded round over the mean of its neighbours."""
    return [2 * took[n][i] / (took[n - 1][i] + took[n + 1][i]) for n in range(1, len(took) - 1, 2)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", help="one of: " + ", ".join(PEERS))
    parser.add_argument("--no-ops", action="store_true", help="collectives and modules only")
    for name, value in (SMALL | {"rounds": 12, "steps": 4}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    console = Console(width=120)
    table = Table("", "step, ms", "recorded, median", "processor time, median", "events a step", "ops a step")
    for peer in [options.only] if options.only else PEERS:
        with console.status(peer):
            took, events, ops = on_processes(measure, options.ranks, peer, options)
        wall, busy = (statistics.median(ratios(took, i)) for i in range(2))
        plain = statistics.median(t[0] for t in took[::2])
        table.add_row(peer, f"{plain * 1e3:.1f}", f"{wall:.3f}x", f"{busy:.3f}x", f"{events:.0f}", f"{ops:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
