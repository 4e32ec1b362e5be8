"""Time random numbers by counter next to plain torch's: what one rank draws of a tensor.

python benchmarks/random_numbers.py [--quick] [--device cuda]
"""

import argparse
import functools
import time

import torch
from _timing import shown
from rich.console import Console
from rich.table import Table

from shardwise.random import distributions as draws
from shardwise.random.fill import fill_tile

CASES = {
    "rand float32": (torch.float32, draws.uniform(), lambda x: x.uniform_()),
    "rand float64": (torch.float64, draws.uniform(), lambda x: x.uniform_()),
    "randn float32": (torch.float32, draws.normal(), lambda x: x.normal_()),
    "randn float64": (torch.float64, draws.normal(), lambda x: x.normal_()),
    "randn bfloat16": (torch.bfloat16, draws.normal(), lambda x: x.normal_()),
    "dropout mask": (torch.float32, draws.dropout(0.1), lambda x: x.bernoulli_(0.9).div_(0.9)),
    "bernoulli_": (torch.float32, draws.bernoulli(0.3), lambda x: x.bernoulli_(0.3)),
    "exponential_": (torch.float32, draws.exponential(), lambda x: x.exponential_()),
    "randint 100": (torch.int64, draws.integer(torch.int64, 0, 100), lambda x: x.random_(0, 100)),
}


def best(call, seconds, sync):
    """The least time of a call, in seconds."""
    call()
    found, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        sync()
        start = time.perf_counter()
        call()
        sync()
        found = min(found, time.perf_counter() - start)
    return found


def compared(n, dtype, what, fill, device, seconds, sync):
    """Seconds of plain torch and of ours for n new elements."""
    new = lambda: torch.empty(n, dtype=dtype, device=device)
    mine = best(lambda: fill_tile(new(), (0,), (n,), what, 12345), seconds, sync)
    return best(lambda: fill(new()), seconds, sync), mine


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cuda = options.device == "cuda"
    sync = torch.cuda.synchronize if cuda else lambda: None
    seconds = 0.3 if options.quick else 1.5
    unit, digits = (1e6, "us") if cuda else (1e3, "ms")
    table = Table("numbers", "elements", f"torch ({digits})", f"shardwise ({digits})", "/ torch", title=options.device)
    for n in (10**6, 10**7):
        for name, (dtype, what, fill) in shown(CASES.items(), f"{n:,} numbers"):
            plain, mine = compared(n, dtype, what, fill, options.device, seconds, sync)
            table.add_row(name, f"{n:,}", f"{plain * unit:.2f}", f"{mine * unit:.2f}", f"{mine / plain:.2f}x")
        rows = n // 512
        part = torch.empty(rows, 512, device=options.device)
        call = functools.partial(fill_tile, part, (0, 512), (rows, 4096), draws.normal(), 5)
        mine = best(call, seconds, sync)
        table.add_row("randn, 512 of 4096 columns", f"{part.numel():,}", "", f"{mine * unit:.2f}", "")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
