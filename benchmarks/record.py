"""What recording a run costs: training steps with and without `shardwise.debug.record`, on gloo processes.

    python benchmarks/record.py                # the GPT of benchmarks/train.py on 4 processes
    python benchmarks/record.py --rounds 100 --only "shardwise, layouts alone"
    python benchmarks/record.py --width 32 --context 8 --batch 4 --vocabulary 64 --rounds 200   # less work

Recorded and unrecorded steps take turns in the same processes, in the order off, on, on, off. A ratio is two recorded
steps over the two unrecorded ones beside them, and the table has the median of these ratios: what slows a machine for
a while slows neighbours alike. Beside the wall clock is the processor time of the threads that train, in all processes:
what recording costs where other programs keep the cores busy. Gloo's own threads are left out of it, since they spin
while they wait. "Sure to" is half the width of a 90 % interval of that median. "Costs" is the median difference of that
processor time, per step and process: what is recorded does not depend on the sizes of tensors, so small ones tell it
most surely.
"""

import argparse
import gc
import random
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
    """Seconds, and processor seconds of the training threads of all ranks, of each step: four turns a round."""
    join(rank, parts, folder, options.device)
    step = peers_of(PEERS[peer])[peer](options, rank, parts)
    run = Path(folder, "run")
    took = torch.zeros(options.rounds * 4, 2, dtype=torch.float64)
    with record(run, ops=not options.no_ops) as recording:
        for _ in range(3):
            step()  # the first one names everything
        recording._stop()
        gc.collect()
        gc.disable()
        for i in range(len(took)):
            recorded = i % 4 in (1, 2)
            if recorded:
                recording._start()
            dist.barrier()
            start, busy = time.perf_counter(), time.thread_time()
            step()
            took[i, 0], took[i, 1] = time.perf_counter() - start, time.thread_time() - busy
            if recorded:
                recording._stop()
        recording._start()
    dist.all_reduce(took)
    if rank == 0:
        found, steps = read_run(run).ranks[0], options.rounds * 2 + 3
        results.put(((took / parts).tolist(), len(found.events) / steps, len(found.ops) / steps))
    dist.barrier()
    dist.destroy_process_group()


def ratios(took, i):
    """Of each round, its two recorded steps over its two unrecorded ones."""
    return [(took[n + 1][i] + took[n + 2][i]) / (took[n][i] + took[n + 3][i]) for n in range(0, len(took), 4)]


def differences(took):
    """Of each round, by how much processor time a recorded step takes longer."""
    return [(took[n + 1][1] + took[n + 2][1] - took[n][1] - took[n + 3][1]) / 2 for n in range(0, len(took), 4)]


def spread(values):
    """Half the width of a 90 % interval of the median, by drawing the values again and again."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return (medians[949] - medians[50]) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo or NCCL processes")
    parser.add_argument("--only", help="one of: " + ", ".join(PEERS))
    parser.add_argument("--no-ops", action="store_true", help="collectives and modules only")
    for name, value in (SMALL | {"rounds": 40}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    console = Console(width=120)
    head = ("", "step, ms", "recorded, median", "processor time, median", "sure to", "costs, us", "events", "ops")
    for peer in [options.only] if options.only else PEERS:
        with console.status(peer):
            took, events, ops = on_processes(measure, options.ranks, peer, options)
        walls, busy = (ratios(took, i) for i in range(2))
        plain = statistics.median(t[0] for t in took[0::4] + took[3::4])
        wall, cost = statistics.median(walls), statistics.median(busy)
        table = Table(*head)
        table.add_row(
            *(peer, f"{plain * 1e3:.1f}", f"{wall:.3f}x", f"{cost:.3f}x"),
            *(f"{spread(busy):.3f}", f"{statistics.median(differences(took)) * 1e6:.0f}"),
            *(f"{events:.0f}", f"{ops:.0f}"),
        )
        console.print(table)


if __name__ == "__main__":
    main()
