"""Estimates beside the truth.

    python benchmarks/estimate.py bytes              programs of tests/outline, every rank: ledgers beside simulation
    python benchmarks/estimate.py operators          operators of the proof: layouts, shapes, dtypes, bytes
    python benchmarks/estimate.py published          torchtitan's tables of Llama 3.1 (estimate_published.py)
    python benchmarks/estimate.py --cuda             one rank's program on this GPU: peak memory and time of a step

`--cuda` runs each configuration on the GPU on a mesh of one rank, and estimates the same program on an outlined mesh of
one rank: peaks beside torch.cuda.max_memory_allocated, times beside the clock. Give --hardware a file that
`shardwise calibrate` wrote on the same machine.
"""

import argparse
import itertools
import math
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from shardwise import outline, simulate
from shardwise.testing.outlined import compare_without_values
from shardwise.testing.spread import combinations
from shardwise.testing.subjects import subjects

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from estimate_gpu import compare_on_gpu  # noqa: E402
from estimate_published import compare_published  # noqa: E402

AXES = ("dp", "tp")
# Simulated ranks share buffers as long as the longest of them needs; processes, and outlined ranks, do not.
OTHERWISE_IN_SIMULATION = ("zero_and_tensor",)


# -- bytes ------------------------------------------------------------------------------------------
def compare_bytes(console, shape=(2, 4)):
    from tests.outline.programs import PROGRAMS, entries  # the repository's own programs

    table, wrong = Table("program", "communications", "bytes", "equal"), 0
    for name, program in track(PROGRAMS.items(), "programs"):
        if name in OTHERWISE_IN_SIMULATION:
            continue
        expected = entries(program, simulate(shape, axis_names=AXES))
        ranks = []
        for rank in range(math.prod(shape)):
            with outline(shape, axis_names=AXES, play=rank, assume={"experts": "even"}) as mesh:
                ranks.append(entries(program, mesh))
        found = [(*same[0][:-1], sum(one[-1] for one in same)) for same in zip(*ranks, strict=True)]
        wrong += found != expected
        total = sum(entry[-1] for entry in expected)
        table.add_row(name, str(len(expected)), f"{total:,}", "yes" if found == expected else "NO")
    console.print(table)
    return wrong


# -- operators --------------------------------------------------------------------------------------
def compare_operators(console, seconds, only=None, part="1/1"):
    known = subjects()
    mine, parts = map(int, part.split("/"))
    names = [name for name in known if only is None or only in name][mine - 1 :: parts]
    verdicts, started = Counter(), time.monotonic()
    with Progress(console=console) as progress:
        task = progress.add_task("operators", total=len(names))
        for name in names:
            if time.monotonic() - started > seconds:
                console.print(f"stopped after {seconds} s at {name}, number {names.index(name)} of {len(names)}")
                break
            for sample, shape in itertools.product(known[name].samples("function", 2), ((3,), (2, 2))):
                for layouts in combinations(sample.tensors, shape, limit=3, seed=name):
                    outcome = compare_without_values(sample, shape, layouts)
                    verdicts[outcome.verdict] += 1
                    if outcome.verdict == "wrong":
                        console.print(f"{name} {layouts}: {outcome.message[:300]}")
            progress.advance(task)
    console.print(dict(verdicts))
    return verdicts["wrong"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("bytes", "operators", "published"), default="bytes")
    parser.add_argument("--cuda", action="store_true", help="compare with this machine's GPU")
    parser.add_argument("--hardware", default="h200-sxm")
    parser.add_argument("--details", help="for --cuda: a JSON file for what was measured and estimated, op by op")
    parser.add_argument("--seconds", type=float, default=600, help="for operators")
    parser.add_argument("--only", help="operators, or published rows, with this in their names")
    parser.add_argument("--layers", type=int, help="fewer layers of the published models, for a quick look")
    parser.add_argument("--part", default="1/1", help="of the operators: 2/5 is the second of every five")
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=180)
    if options.cuda:
        return compare_on_gpu(console, options.hardware, options.details)
    if options.what == "operators":
        return compare_operators(console, options.seconds, options.only, options.part)
    if options.what == "published":
        return compare_published(console, options.only, options.layers)
    return compare_bytes(console)


if __name__ == "__main__":
    sys.exit(main())
