"""What recording a run costs: training steps with and without `shardwise.debug.record`, on gloo processes.

    python benchmarks/record.py                # the GPT of benchmarks/train.py on 4 processes
    python benchmarks/record.py --sure 0.005 --seconds 600 --only "shardwise, layouts alone"
    python benchmarks/record.py --width 32 --context 8 --batch 4 --vocabulary 64   # less work
    python benchmarks/record.py --instructions # what Python does for it, counted: the same on every machine

Recorded and unrecorded steps take turns in the same processes, in the order off, on, on, off. A ratio is two recorded
steps over the two unrecorded ones beside them, and the table has the median of these ratios: what slows a machine for
a while slows neighbours alike. Beside the wall clock is the processor time of the threads that train, in all processes:
what recording costs where other programs keep the cores busy. Gloo's own threads are left out of it, since they spin
while they wait. "Sure to" is half the width of a 90 % interval of that median: rounds go on until it is at most
`--sure`, or `--seconds` have passed. "Costs" is the median difference of that processor time, per step and process:
what is recorded does not depend on the sizes of tensors, so small ones tell it most surely.

`--instructions` counts the instructions of Python's that one step takes with and without recording, in one process that
plays rank 0 of a group whose other ranks do not exist.
"""

import argparse
import collections
import gc
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore
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
    took = torch.zeros(0, 2, dtype=torch.float64)
    with record(run, ops=not options.no_ops) as recording:
        for _ in range(3):
            step()  # the first one names everything
        recording._stop()
        gc.collect()
        gc.disable()
        until = time.monotonic() + options.seconds
        while not len(took) or not is_enough(took, until, options):
            took = torch.cat([took, take_turns(step, recording, options.rounds) / parts])
        recording._start()
    if rank == 0:
        found, steps = read_run(run).ranks[0], len(took) / 2 + 3
        counts = (events[-1].number / steps if events else 0 for events in (found.events, found.ops))
        results.put((took.tolist(), *counts))
    dist.barrier()
    dist.destroy_process_group()


def take_turns(step, recording, rounds):
    """What the steps of some rounds took on all ranks together."""
    took = torch.zeros(rounds * 4, 2, dtype=torch.float64)
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
    dist.all_reduce(took)
    return took


def is_enough(took, until, options):
    """Whether the ratio is known well enough, or time is up, by the clock of the first rank."""
    enough = spread(ratios(took.tolist(), 1)) <= options.sure or time.monotonic() > until
    said = torch.tensor([float(enough)])
    dist.broadcast(said, 0)
    return bool(said)


def count_instructions(peer, options):
    """Instructions of Python's that a step takes alone, and how many more when it is recorded."""
    step = peers_of(PEERS[peer])[peer](options, 0, options.ranks)
    with tempfile.TemporaryDirectory() as run, record(run, ops=not options.no_ops) as recording:
        for _ in range(3):
            step()
        recording._memory._next, recording._memory._left = float("inf"), 0  # looks now and then, not at every step
        recorded = instructions_of(step)
        recording._stop()
        alone = instructions_of(step)
        recording._start()
    return alone, recorded - alone


def instructions_of(step):
    counts = collections.Counter()

    def each(frame, event, arg):
        counts[event] += 1
        return each

    def enter(frame, event, arg):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    step()
    sys.settrace(enter)
    try:
        step()
    finally:
        sys.settrace(None)
    return counts["opcode"]


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
    parser.add_argument("--sure", type=float, default=0.01, help="how well the ratio is to be known")
    parser.add_argument("--seconds", type=float, default=400, help="for each peer, at most")
    parser.add_argument("--instructions", action="store_true", help="count Python's instructions, in one process")
    for name, value in (SMALL | {"rounds": 10}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    console = Console(width=120)
    if options.instructions:
        dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
        for peer in [options.only] if options.only else PEERS:
            alone, more = count_instructions(peer, options)
            console.print(f"{peer}: {alone} instructions a step, recording adds {more} ({more / alone:.1%})")
        return
    head = ("", "step, ms", "recorded, median", "processor time, median", "sure to", "costs, us", "events", "ops")
    for peer in [options.only] if options.only else PEERS:
        with console.status(peer):
            took, events, ops = on_processes(measure, options.ranks, peer, options, seconds=options.seconds + 200)
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
