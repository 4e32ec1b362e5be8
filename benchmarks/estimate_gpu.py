"""Estimates beside one GPU (`python benchmarks/estimate.py --cuda --hardware mine.json`): peak memory and time of a
step of one rank's program, in twelve configurations of a GPT.

`--details FILE` writes what was measured and estimated, op by op: the time by the clock, how long the host took to
start a step, kernels of one step as torch.profiler saw them, and every op that the estimate counts.
"""

import gc
import json
import os
import statistics
import time
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import outline
from shardwise.forecast import Hardware
from shardwise.forecast.measuring import host_seconds
from shardwise.parallel import data_parallel


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
        tokens = torch.randint(32768, (batch, 1024))
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


def measured(settings, details):
    """Peak memory, the time of a step on the GPU, and how long the host then takes to start an op. Cores that others
    use, too, change their pace within a second, so the two are measured in turns and the best of each counts."""
    mesh = shardwise.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = program(mesh, "cuda", **settings)
    for _ in range(3):
        step()
    tiny, times, starts = torch.zeros(1, device="cuda"), [], []
    for _ in range(8):
        starts.append(host_seconds(tiny, tiny.device))
        started = time.perf_counter()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / 3)
    peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
    more = {"reserved": reserved} | (profiled(step) if details else {})
    return peak, min(times), min(starts), more


def profiled(step):
    """How long the host takes to start a step, and what the device does in it."""
    hosts = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
        torch.cuda.synchronize()
    ops = [
        (e.key, [s for s in e.input_shapes if s][:3], e.count, round(e.self_device_time_total, 1))
        for e in profile.key_averages(group_by_input_shape=True)
        if e.self_device_time_total > 0 and "aten::" in e.key
    ]
    kernels = Counter()
    for e in profile.key_averages():
        if e.self_device_time_total > 0 and "::" not in e.key[:8]:
            kernels[e.key[:60]] += round(e.self_device_time_total, 1)
    ops.sort(key=lambda row: -row[-1])
    return {"host": statistics.median(hosts), "ops": ops[:80], "kernels": kernels.most_common(40)}


def estimated(settings, hardware):
    """The report of the same program on an outlined mesh of one rank."""
    with outline(1, axis_names=("dp",), device="cuda") as mesh:
        return shardwise.estimate(program(mesh, "cuda", **settings), hardware=hardware)


def recorded(report):
    """Every op that an estimate counts: what there is of them, and their order."""
    kinds, order = {}, []
    for event in report.time.events:
        key = [type(event).__name__]
        if hasattr(event, "flops"):
            key = [event.name, event.dtype, event.kind, event.phase, event.flops, event.nbytes, event.grids,
                   event.sizes, event.tensors, event.views, event.modules, event.distributed]  # fmt: skip
        order.append(kinds.setdefault(json.dumps(key), len(kinds)))
    return {"kinds": [json.loads(key) for key in kinds], "order": order}


def with_host(hardware, seconds):
    """The hardware with a host that takes `seconds` to start an op, and as much more or less for everything else."""
    share = seconds / hardware.host.value
    scaled = {name: replace(figure, value=figure.value * share) for name, figure in hardware.hosts.items()}
    return replace(hardware, host=replace(hardware.host, value=seconds), hosts=scaled)


def compare_on_gpu(console, hardware, details=None):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl", rank=0, world_size=1)
    hardware, known = Hardware.load(hardware), []
    columns = ["configuration", "peak GB", "estimated", "error", "step ms", "estimated", "host", "device", "ops"]
    table = Table(*columns, "error", "host's pace", "reserved GB", "estimated")
    memory, times, kept = [], [], []  # errors of the peak, of a step's time, and of what the allocator reserves
    for settings in track(CONFIGURATIONS, "configurations"):
        peak, seconds, start, more = measured(settings, details)
        report = estimated(settings, with_host(hardware, start))
        spent = report.time
        memory.append(report.memory.peak / peak - 1)
        kept.append(report.memory.reserved / more["reserved"] - 1)
        times.append(spent.total / seconds - 1)
        said = " ".join(f"{v}".removeprefix("torch.") for v in settings.values())
        table.add_row(
            said, f"{peak / 1e9:.3f}", f"{report.memory.peak / 1e9:.3f}", f"{memory[-1]:+.1%}", f"{seconds * 1e3:.2f}",
            f"{spent.total * 1e3:.2f}", f"{spent.host * 1e3:.2f}", f"{spent.compute * 1e3:.2f}",
            str(len(spent.events)), f"{times[-1]:+.1%}", f"{start / hardware.host.value:.2f}",
            f"{more['reserved'] / 1e9:.3f}", f"{report.memory.reserved / 1e9:.3f}",
        )  # fmt: skip
        known.append({"configuration": said, "step": seconds, "peak": peak, "estimated": spent.total} | more)
        if details:
            known[-1] |= recorded(report)
    console.print(table)
    mean = lambda errors: sum(map(abs, errors)) / len(errors)
    console.print(f"memory: mean {mean(memory):.1%}, worst {max(map(abs, memory)):.1%}; time: mean {mean(times):.1%}")
    console.print(f"memory that the allocator reserves: mean {mean(kept):.1%}, worst {max(map(abs, kept)):.1%}")
    if details:
        with open(details, "w") as file:
            json.dump(known, file, separators=(",", ":"))
    dist.destroy_process_group()
    return 0
