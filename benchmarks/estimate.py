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
import gc
import itertools
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import outline, simulate
from shardwise.parallel import data_parallel
from shardwise.testing.outlined import compare_without_values
from shardwise.testing.spread import combinations
from shardwise.testing.subjects import subjects

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
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


# -- one GPU ----------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers, recompute, vocabulary=32768):
        super().__init__()
        self.token, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.head, self.recompute = nn.Linear(width, vocabulary, bias=False), recompute

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def program(mesh, device, width, layers, batch, shard, recompute, dtype):
    with torch.device(device):
        model = GPT(width, layers, recompute)
        tokens = torch.zeros(batch, 1024, dtype=torch.int64)
    model = data_parallel(model, mesh, shard, compute_dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CONFIGURATIONS = [
    {"width": width, "layers": 12, "batch": batch, "shard": shard, "recompute": recompute, "dtype": dtype}
    for width, batch, shard, recompute, dtype in (
        (768, 8, "none", False, torch.bfloat16), (768, 8, "parameters", False, torch.bfloat16),
        (768, 8, "none", True, torch.bfloat16), (768, 8, "none", False, None),
        (768, 16, "optimizer", False, torch.bfloat16), (768, 32, "parameters", True, torch.bfloat16),
        (1536, 8, "none", False, torch.bfloat16), (1536, 8, "gradients", False, torch.bfloat16),
        (1536, 8, "parameters", True, torch.bfloat16), (1536, 4, "none", False, None),
        (2048, 8, "parameters", False, torch.bfloat16), (2048, 16, "none", True, torch.bfloat16),
    )
]  # fmt: skip


def measured(settings):
    """Peak memory and the time of a step on the GPU."""
    mesh = shardwise.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = program(mesh, "cuda", **settings)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, (time.perf_counter() - started) / 5


def compare_on_gpu(console, hardware):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl", rank=0, world_size=1)
    table, memory, times = (
        Table("configuration", "peak GB", "estimated", "error", "step ms", "estimated", "error"),
        [],
        [],
    )
    for settings in track(CONFIGURATIONS, "configurations"):
        peak, seconds = measured(settings)
        with outline(1, axis_names=("dp",), device="cuda") as mesh:
            report = shardwise.estimate(program(mesh, "cuda", **settings), hardware=hardware)
        memory.append(report.memory.peak / peak - 1)
        times.append(report.time.total / seconds - 1)
        said = " ".join(f"{v}".removeprefix("torch.") for v in settings.values())
        table.add_row(
            said, f"{peak / 1e9:.3f}", f"{report.memory.peak / 1e9:.3f}", f"{memory[-1]:+.1%}", f"{seconds * 1e3:.2f}",
            f"{report.time.total * 1e3:.2f}", f"{times[-1]:+.1%}",
        )  # fmt: skip
    console.print(table)
    mean = lambda errors: sum(map(abs, errors)) / len(errors)
    console.print(f"memory: mean {mean(memory):.1%}, worst {max(map(abs, memory)):.1%}; time: mean {mean(times):.1%}")
    dist.destroy_process_group()
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("bytes", "operators", "published"), default="bytes")
    parser.add_argument("--cuda", action="store_true", help="compare with this machine's GPU")
    parser.add_argument("--hardware", default="h200-sxm")
    parser.add_argument("--seconds", type=float, default=600, help="for operators")
    parser.add_argument("--only", help="operators, or published rows, with this in their names")
    parser.add_argument("--layers", type=int, help="fewer layers of the published models, for a quick look")
    parser.add_argument("--part", default="1/1", help="of the operators: 2/5 is the second of every five")
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=180)
    if options.cuda:
        return compare_on_gpu(console, options.hardware)
    if options.what == "operators":
        return compare_operators(console, options.seconds, options.only, options.part)
    if options.what == "published":
        return compare_published(console, options.only, options.layers)
    return compare_bytes(console)


if __name__ == "__main__":
    sys.exit(main())
