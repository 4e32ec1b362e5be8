"""Estimates beside the truth.

    python benchmarks/estimate.py bytes              programs of tests/outline, every rank: ledgers beside simulation
    python benchmarks/estimate.py operators          every operator of the proof (estimate_operators.py); goes on where
                                                     an earlier run stopped (--fresh: from the beginning)
    python benchmarks/estimate.py published          torchtitan's tables of Llama 3.1 (estimate_published.py)
    python benchmarks/estimate.py --cuda             one rank's program on this GPU: peak memory and time of a step

`--cuda` runs each configuration on the GPU on a mesh of one rank, and estimates the same program on an outlined mesh of
one rank: peaks beside torch.cuda.max_memory_allocated, times beside the clock. Give --hardware a file that
`shardwise calibrate` wrote on the same machine.
"""

import argparse
import math
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from shardwise import outline, simulate

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from estimate_gpu import compare_on_gpu  # noqa: E402
from estimate_operators import compare_operators  # noqa: E402
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("bytes", "operators", "published"), default="bytes")
    parser.add_argument("--cuda", action="store_true", help="compare with this machine's GPU")
    parser.add_argument("--hardware", default="h200-sxm")
    parser.add_argument("--details", help="for --cuda: a JSON file for what was measured and estimated, op by op")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for operators: stop after so many")
    parser.add_argument("--fresh", action="store_true", help="for operators: forget what was tried")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="for operators: processes")
    parser.add_argument("--only", help="operators, or published rows, with this in their names")
    parser.add_argument("--layers", type=int, help="fewer layers of the published models, for a quick look")
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=180)
    if options.cuda:
        return compare_on_gpu(console, options.hardware, options.details)
    if options.what == "operators":
        return compare_operators(console, options.seconds, options.only, options.fresh, options.jobs)
    if options.what == "published":
        return compare_published(console, options.only, options.layers)
    return compare_bytes(console)


if __name__ == "__main__":
    sys.exit(main())
