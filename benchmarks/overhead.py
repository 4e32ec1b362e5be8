"""What a distributed tensor costs on top of a plain one: plain torch, torch's DTensor and shardwise in one run.

One process, every mesh axis of size 1, small tensors: nothing is communicated and the kernels are short, so what is
left is the price of the wrapper.

    python benchmarks/overhead.py [--quick] [--only ops ops-grad fwd-bwd adamw first-call] [--json FILE]
"""

import argparse
import functools
import importlib
import json
import logging
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _timing import comparison, first_calls, warm
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# ------------------------------------------------------------------ the peers


@dataclass(frozen=True)
class Peer:
    """A way to lay out a tensor: the module with distribute_tensor, Shard and Replicate, or None for plain torch."""

    module: str | None
    axes: int = 1

    def place(self, tensor: torch.Tensor, cut: str) -> torch.Tensor:
        """`cut` "rows": dim 0 over the first axis. "columns": dim -1 over the last of several axes. "": nowhere."""
        if self.module is None:
            return tensor.clone()
        library = importlib.import_module(self.module)
        placements = [library.Replicate() for _ in range(self.axes)]
        if cut == "rows":
            placements[0] = library.Shard(0)
        elif cut == "columns" and self.axes > 1:
            placements[-1] = library.Shard(tensor.ndim - 1)
        return library.distribute_tensor(tensor, mesh_of_one(self.axes), placements)


@functools.cache
def mesh_of_one(axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", (1,) * axes, mesh_dim_names=tuple("abcd"[:axes]))


PEERS = {"torch": None, "DTensor": "torch.distributed.tensor", "shardwise": "shardwise"}


# ------------------------------------------------------------------ the ops


@dataclass(frozen=True)
class Operand:
    """`shape` may hold "n", the size that is new in the first-call test."""

    shape: tuple[int | str, ...]
    cut: str = ""
    dtype: torch.dtype = torch.float32

    def make(self, peer: Peer, n: int, requires_grad: bool = False) -> torch.Tensor:
        shape = [n if size == "n" else size for size in self.shape]
        if self.dtype == torch.bool:
            return peer.place(torch.rand(shape) > 0.5, self.cut)
        if self.dtype == torch.int64:
            return peer.place(torch.randint(8, shape), self.cut)
        tensor = peer.place(torch.randn(shape), self.cut)
        return tensor.requires_grad_() if requires_grad else tensor


X = Operand(("n", 32), "rows")
BATCH = Operand(("n", 8, 16), "rows")
BATCH_T = Operand(("n", 16, 8), "rows")
HEADS = Operand(("n", 4, 8, 8), "rows")
MASK = Operand(("n", 32), "rows", torch.bool)
INDEX = Operand(("n",), "rows", torch.int64)
RIGHT = Operand((32, 32), "columns")
WEIGHT = Operand((32, 32))
VECTOR = Operand((32,))

OPS: dict[str, tuple[Callable, *tuple[Operand, ...]]] = {
    "add": (torch.add, X, X),
    "mul": (torch.mul, X, X),
    "relu": (torch.relu, X),
    "gelu": (F.gelu, X),
    "where": (torch.where, MASK, X, X),
    "mm": (torch.mm, X, RIGHT),
    "linear": (F.linear, X, WEIGHT, VECTOR),
    "bmm": (torch.bmm, BATCH, BATCH_T),
    "view": (lambda x: x.view(-1, 4, 8), X),
    "reshape": (lambda x: x.reshape(-1, 128), BATCH),
    "transpose": (lambda x: x.transpose(0, 1), X),
    "slice": (lambda x: x[:, 4:20], X),
    "select": (lambda x: x[:, 3], X),
    "cat": (lambda x, y: torch.cat([x, y], 1), X, X),
    "sum": (lambda x: x.sum(1), X),
    "mean": (lambda x: x.mean(-1), X),
    "softmax": (lambda x: torch.softmax(x, -1), X),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), X, VECTOR, VECTOR),
    "embedding": (lambda i, w: F.embedding(i, w), INDEX, WEIGHT),
    "sdpa": (F.scaled_dot_product_attention, HEADS, HEADS, HEADS),
}


def op_call(peer: Peer, name: str, n: int = 16, requires_grad: bool = False) -> Callable[[], object]:
    function, *operands = OPS[name]
    args = [operand.make(peer, n, requires_grad) for operand in operands]
    return lambda: function(*args)


# ------------------------------------------------------------------ small programs


class Block(nn.Module):
    """A pre-norm transformer block. Attention is spelled out and not causal, so that every peer can run it:

    torch 2.13's DTensor refuses `scaled_dot_product_attention(..., is_causal=True)` on the CPU.
    """

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            f(y).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * self.scale, -1)
        y = torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.project(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def linear_program(peer: Peer) -> Callable[[], object]:
    x, y = X.make(peer, 16), X.make(peer, 16)
    weight, bias = WEIGHT.make(peer, 16, True), VECTOR.make(peer, 16, True)

    def call():
        weight.grad = bias.grad = None
        (torch.relu(F.linear(x, weight, bias)) + y).sum().backward()

    return call


def block_program(peer: Peer) -> Callable[[], object]:
    block = Block()
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(peer.place(parameter.detach(), "")))
    x = Operand((2, 16, 32), "rows").make(peer, 0)
    parameters = list(block.parameters())

    def call():
        for parameter in parameters:
            parameter.grad = None
        block(x).sum().backward()

    return call


def adamw_program(peer: Peer) -> Callable[[], object]:
    parameters = [nn.Parameter(WEIGHT.make(peer, 0)) for _ in range(10)]
    for parameter in parameters:
        parameter.grad = WEIGHT.make(peer, 0)
    return torch.optim.AdamW(parameters).step


# ------------------------------------------------------------------ the tables


@dataclass(frozen=True)
class Effort:
    repeats: int
    slice_seconds: float
    new_sizes: int
    limit_seconds: float


FULL = Effort(repeats=15, slice_seconds=0.004, new_sizes=9, limit_seconds=1.0)
QUICK = Effort(repeats=3, slice_seconds=0.002, new_sizes=3, limit_seconds=0.1)


def bench(programs: dict[str, Callable[[Peer], Callable]], effort: Effort, status) -> dict:
    rows = {}
    for name, program in programs.items():
        status.update(name)
        makers = {label: functools.partial(program, Peer(module)) for label, module in PEERS.items()}
        rows[name] = warm(makers, repeats=effort.repeats, slice_seconds=effort.slice_seconds)
    return rows


def bench_ops(effort, status):
    with torch.no_grad():
        return bench({name: functools.partial(op_call, name=name) for name in OPS}, effort, status)


def bench_ops_grad(effort, status):
    programs = {name: functools.partial(op_call, name=name, requires_grad=True) for name in OPS}
    return bench(programs, effort, status)


def bench_fwd_bwd(effort, status):
    return bench({"linear, relu, add, sum": linear_program, "transformer block": block_program}, effort, status)


def bench_adamw(effort, status):
    return bench({"AdamW step, 10 parameters": adamw_program}, effort, status)


@torch.no_grad()
def bench_first_call(effort, status):
    rows = {}
    sizes = [40 + 8 * i for i in range(effort.new_sizes + 1)]
    for name in OPS:
        for axes in range(1, 5):
            status.update(f"{name}, {axes} axes")
            found = {label: Peer(module, axes) for label, module in PEERS.items() if module}
            makers = {label: functools.partial(op_call, peer, name) for label, peer in found.items()}
            rows[f"{name}, {axes} {'axis' if axes == 1 else 'axes'}"] = first_calls(
                makers, sizes, limit_seconds=effort.limit_seconds
            )
    return rows


TABLES = {  # name: title, unit, what ratios are to, function
    "ops": ("Warm ops, no grad", "us", "torch", bench_ops),
    "ops-grad": ("Warm ops, recording a graph (forward only)", "us", "torch", bench_ops_grad),
    "fwd-bwd": ("Forward and backward", "us", "torch", bench_fwd_bwd),
    "adamw": ("Optimizer", "us", "torch", bench_adamw),
    "first-call": ("First call with a new shape", "ms", None, bench_first_call),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a look, not a measurement")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="these tables only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there too, in seconds")
    options = parser.parse_args()

    console = Console()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    start = time.monotonic()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=0, world_size=1)
        for name in options.only:
            title, unit, base, function = TABLES[name]
            with console.status(name) as status:
                found[name] = function(QUICK if options.quick else FULL, status)
            console.print(comparison(title, found[name], unit=unit, base=base), "")
        dist.destroy_process_group()
    environment = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.platform()}
    seconds = time.monotonic() - start
    console.print(", ".join(f"{key} {value}" for key, value in environment.items()), f"- took {seconds:.0f} s")
    if options.json:
        options.json.write_text(json.dumps({"environment": environment, "seconds": found}, default=str, indent=2))


if __name__ == "__main__":
    main()
