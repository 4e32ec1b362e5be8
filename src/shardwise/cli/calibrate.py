"""`shardwise calibrate`: measure this machine's device and write a description that `shardwise estimate` reads."""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from shardwise.cli.help import Help
from shardwise.forecast.hardware import Hardware, HardwareError, known
from shardwise.forecast.measuring import measured
from shardwise.mesh import UserMesh
from shardwise.parallel import data_parallel


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "calibrate", help="measure this machine for estimates", description=__doc__, formatter_class=Help
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--like", help=f"take the links between devices from one of {', '.join(known())}")
    parser.add_argument("--save", default="hardware.json", help="the file to write (default: hardware.json)")
    parser.set_defaults(run=run)


def _laid_out(module: nn.Module, mesh: UserMesh) -> nn.Module:
    """Data parallelism in bfloat16, as programs have it: gradients are copied into buffers by hooks."""
    return data_parallel(module, mesh, compute_dtype=torch.bfloat16)


def run(options: argparse.Namespace, console: Console) -> int:
    found: Hardware | None = None
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("measuring", total=None)
            for what, described in measured(options.device, options.like, _laid_out):
                progress.update(task, description=f"measured {what}")
                found = described or found
    except HardwareError as error:
        print(f"shardwise calibrate: {error}", file=sys.stderr)
        return 2
    assert found is not None
    found.save(options.save)
    table = Table("figure", "value", "basis", "from", title=found.name)
    rows = {"memory (bytes)": found.memory, "memory bandwidth (bytes/s)": found.bandwidth, "launch (s)": found.launch}
    rows |= {f"{dtype} (flop/s)": figure for dtype, figure in found.flops.items()} | {"host (s)": found.host}
    rows |= {f"host: {name} (s)": figure for name, figure in found.hosts.items()}
    for name, figure in rows.items():
        table.add_row(name, f"{figure.value:,.4g}", figure.basis, figure.source)
    console.print(table)
    console.print(f"written to {options.save}; use it with --hardware {options.save}")
    return 0
