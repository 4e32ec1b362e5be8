"""Ops on long lists of tensors: plain torch, torch's DTensor and shardwise in one run.

One process and a mesh of one rank, so that nothing is communicated: what is left is the price of looking at every
tensor of a list. The column `simulated` is the same on two simulated ranks, which do the local work of both.

    python benchmarks/lists.py [--counts 250 500 1000 2000] [--size 16] [--quick] [--json FILE]
"""

import argparse
import functools
import json
import logging
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _timing import Missing, comparison, first_calls, warm
from overhead import PEERS, Peer
from rich.console import Console
from torch import nn

import shardwise

OPS: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "stack": torch.stack,
    "cat": torch.cat,
    "_foreach_norm": torch._foreach_norm,
    "_foreach_mul": lambda tensors: torch._foreach_mul(tensors, 2.0),
    "_foreach_add_": lambda tensors: torch._foreach_add_(tensors, 1.0),
}
FEW = 250  # as many as torch's DTensor is asked for: it would take minutes for more


class Simulated(Peer):
    """Two ranks in this process."""

    def place(self, tensor: torch.Tensor, cut: str) -> torch.Tensor:
        return shardwise.distribute_tensor(tensor, two_ranks(), [shardwise.Shard(0)])


@functools.cache
def two_ranks():
    return shardwise.simulate((2,))


def peers(count: int) -> dict[str, Peer]:
    found = {label: Peer(module) for label, module in PEERS.items()} | {"simulated": Simulated(None)}
    return {label: peer for label, peer in found.items() if label != "DTensor" or count <= FEW}


def call_of(name: str, peer: Peer, count: int, size: int) -> Callable[[], object]:
    tensors = [peer.place(torch.randn(8, size), "rows") for _ in range(count)]
    if name != "clip_grad_norm_":
        return lambda: OPS[name](tensors)
    parameters = [nn.Parameter(t) for t in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)


def with_all_columns(row: dict) -> dict:
    return {label: row.get(label, Missing(f"over {FEW}")) for label in ["torch", "DTensor", "simulated", "shardwise"]}


@torch.no_grad()
def bench(counts: list[int], size: int, repeats: int, status) -> tuple[dict, dict]:
    """Warm calls, and first calls of a new size."""
    warm_rows, first_rows = {}, {}
    for name in [*OPS, "clip_grad_norm_"]:
        for count in counts:
            row = f"{name}, {count:,}"
            status.update(row)
            makers = {p: functools.partial(call_of, name, peer, count, size) for p, peer in peers(count).items()}
            warm_rows[row] = with_all_columns(warm(makers, repeats=repeats, slice_seconds=0.01))
            fresh = {p: functools.partial(call_of, name, peer, count) for p, peer in peers(count).items()}
            found = first_calls(fresh, [size + i for i in range(1, 4)], limit_seconds=2)
            first_rows[row] = with_all_columns(found)
    return warm_rows, first_rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", nargs="+", type=int, default=[250, 500, 1000, 2000], help="lengths of the lists")
    parser.add_argument("--size", type=int, default=16, help="every tensor is 8 x this")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there too, in seconds")
    options = parser.parse_args()

    console = Console(width=None if sys.stdout.isatty() else 150)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=0, world_size=1)
        with console.status("") as status:
            found = bench(options.counts, options.size, 3 if options.quick else 10, status)
        dist.destroy_process_group()
    console.print(comparison(f"Warm, tensors of 8 x {options.size}", found[0], unit="ms", base="torch"), "")
    console.print(comparison("First call with a new shape", found[1], unit="ms", base=None), "")
    environment = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.platform()}
    seconds = time.monotonic() - start
    console.print(", ".join(f"{key} {value}" for key, value in environment.items()), f"- took {seconds:.0f} s")
    if options.json:
        names = ("warm", "first call")
        data = {"environment": environment, "seconds": dict(zip(names, found, strict=True))}
        options.json.write_text(json.dumps(data, default=str, indent=2))


if __name__ == "__main__":
    main()
