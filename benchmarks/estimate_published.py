"""Estimates beside torchtitan's published tables of Llama 3.1 (`python benchmarks/estimate.py published`).

Source: github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (commit 31a17bf), December 2024.
Their memory is what CUDA's allocator had reserved at most; so is ours, with that allocator played
(`src/shardwise/forecast/allocator.py`) as their scripts set it up: expandable segments, and streams of their own for
what torch's fully_shard gathers and for the gradients that it reduces. Their machines: 8 H100 of 96 GB HBM2e with
2.4 TB/s and 500 W each, NVLink, 400 Gb/s of network a GPU.

The model is written here, after the description of the architecture: RMSNorm, rotary embeddings in float32, grouped
keys and values, gated MLP. float8 and torch.compile are not played: those rows are marked.
"""

import resource
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwise
from shardwise import Replicate, Shard
from shardwise.forecast import Figure, Hardware
from shardwise.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
)

GIB = 2**30
SIZES = {  # width, layers, heads, hidden
    "8B": (4096, 32, 32, 14336),
    "70B": (8192, 80, 64, 28672),
    "405B": (16384, 126, 128, 53248),
}
KEY_HEADS, WORDS = 8, 128256


@dataclass(frozen=True)
class Row:
    """A published figure: what was run, and what came out."""

    size: str
    mesh: tuple[int, int, int]  # dp, pp, tp
    batch: int  # sequences of a data-parallel rank
    length: int
    recompute: str
    how: str
    speed: float  # tokens per second of a GPU
    memory: float  # GiB
    differs: str = ""  # what of it is not played

    @property
    def is_played(self):
        return not self.differs


COMPILED = "float8, torch.compile"
ROWS = (
    Row("8B", (8, 1, 1), 2, 8192, "selective", "FSDP", 5762, 82.4),
    Row("8B", (128, 1, 1), 2, 8192, "selective", "FSDP", 5605, 67.0),
    Row("8B", (8, 1, 1), 1, 32768, "full", "FSDP", 3890, 83.9, COMPILED),
    Row("70B", (32, 1, 8), 16, 8192, "full", "FSDP + TP", 829, 71.9, COMPILED),
    Row("405B", (8, 8, 8), 32, 8192, "full", "FSDP + TP + 1F1B", 100, 82.5, COMPILED + ", async TP"),
)


# -- the model ------------------------------------------------------------------------------------------
def rotary(length, width, theta=500000.0):
    angles = torch.outer(torch.arange(length).float(), theta ** (-torch.arange(0, width, 2).float() / width))
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x, places):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * places[:, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width, self.groups = width // heads, heads // KEY_HEADS
        self.query, self.project = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, KEY_HEADS * self.head_width, bias=False) for _ in range(2))

    def forward(self, x, places):
        q, k, v = (f(x).unflatten(-1, (-1, self.head_width)) for f in (self.query, self.key, self.value))
        q, k = rotated(q, places), rotated(k, places)
        k, v = (t.unsqueeze(3).expand(-1, -1, -1, self.groups, -1).flatten(2, 3) for t in (k, v))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, hidden), (width, hidden), (hidden, width))
        )

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width, hidden)

    def forward(self, x, places):
        x = x + self.attention(self.norm1(x), places)
        return x + self.mlp(self.norm2(x))


SAVED = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def selective():
    """Keeps attention and every other matrix product; the rest is recomputed."""
    counts = {False: 0, True: 0}

    def policy(context, func, *args, **kwargs):
        if func is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if counts[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """All of a model, or one stage of it: the first has the embedding, the last the head."""

    def __init__(self, size, length, recompute, layers=None, first=True, last=True):
        super().__init__()
        width, every, heads, hidden = SIZES[size]
        self.token = nn.Embedding(WORDS, width) if first else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers or every))
        self.norm = nn.RMSNorm(width) if last else nn.Identity()
        self.head = nn.Linear(width, WORDS, bias=False) if last else nn.Identity()
        self.register_buffer("places", rotary(length, width // heads), persistent=False)
        self.how = {"context_fn": selective} if recompute == "selective" else {}

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, self.places, use_reentrant=False, **self.how)
        return self.head(self.norm(x))


STYLES = {
    "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    "blocks.*.norm?": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    "blocks.*.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
}
STYLES |= {f"blocks.*.{name}": ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value")}
STYLES |= {f"blocks.*.{name}": ColwiseParallel() for name in ("mlp.gate", "mlp.up")}
STYLES |= {f"blocks.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.project", "mlp.down")}


def laid_out(model, mesh, stages):
    if mesh["tp"].size() > 1:
        styles = {name: style for name, style in STYLES.items() if not (stages > 1 and name in ("norm", "head"))}
        parallelize_module(model, mesh["tp"], styles)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        # as torchtitan: under a pipeline parameters stay after the forward, and those of the last block always
        after = stages == 1 and i < len(model.blocks) - 1
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=after)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=stages == 1)


def whole_step(row, mesh, layers=None):
    """A step of a model that is not cut into stages."""
    model = laid_out(Llama(row.size, row.length, row.recompute, layers), mesh, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = torch.zeros(row.batch, row.length, dtype=torch.int64)
    is_cut = mesh["tp"].size() > 1

    def step():
        with loss_parallel() if is_cut else nullcontext():
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            del logits  # as their train.py does
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def micro_batches_played(row):
    return min(row.batch, row.mesh[1] + 1)


def first_stage_step(row, mesh, layers):
    """A step of the first stage in the order 1F1B: as many micro-batches of one sequence as there are stages are under
    way. One more than that is played. What stages send each other is left out: it is small beside the rest."""
    stages = mesh["pp"].size()
    played = micro_batches_played(row)
    model = laid_out(Llama(row.size, row.length, row.recompute, layers, last=False), mesh, stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = torch.zeros(1, row.length, dtype=torch.int64)

    def step():
        under_way = []
        for i in range(played + stages):
            if i >= stages:
                done = under_way.pop(0)
                model.set_requires_gradient_sync(i == played + stages - 1)
                done.backward(torch.empty_like(done))
                del done
            if i < played:
                under_way.append(model(tokens))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- beside the tables ----------------------------------------------------------------------------------
def their_hardware():
    said = "benchmarks/llama3_h100_202412_torchtitan.md"
    return replace(
        Hardware.load("h100-sxm"),
        name="H100 of torchtitan's tables",
        memory=Figure(96e9, "published", said),
        bandwidth=Figure(2.4e12, "published", said),
    )


# PYTORCH_CUDA_ALLOC_CONF in run_llama_train.sh of their commit 9dec370; fully_shard's streams: pytorch/pytorch#129721
STREAMS = {"gathered parameters": "all-gather", "exchange buffers": "all-gather", "gradients": "reduce-scatter"}


def estimated(row, layers=None):
    """Tokens per second of a GPU, the memory that the allocator reserves in GiB, and the report."""
    stages = row.mesh[1]
    with shardwise.outline(row.mesh, axis_names=("dp", "pp", "tp"), device="cuda") as mesh:
        if stages > 1:
            build = partial(first_stage_step, layers=layers or -(-SIZES[row.size][1] // stages))
        else:
            build = partial(whole_step, layers=layers)
        report = shardwise.estimate(build(row, mesh), hardware=their_hardware(), mesh=mesh, warmup=0)
    seconds = report.time.total
    if stages > 1:  # the first stage waits for the others
        seconds *= (row.batch + stages - 1) / micro_batches_played(row)
    ranks, reserved = row.mesh[1] * row.mesh[2], report.memory.reserved_on(STREAMS, is_expandable=True)
    return row.batch * row.length / seconds / ranks, reserved / GIB, report


def compare_published(console, only=None, layers=None):
    table = Table(
        *(
            "model",
            "ranks",
            "how",
            "GiB",
            "reserved",
            "error",
            "tensors",
            "tokens/s/GPU",
            "estimated",
            "error",
            "not played",
        ),
        title="torchtitan's tables, December 2024; their GiB are reserved ones",
    )
    for row in ROWS:
        said = f"{row.size} {row.mesh}"
        if only and only not in said:
            continue
        started = time.process_time()
        speed, memory, report = estimated(row, layers)
        table.add_row(
            row.size, "x".join(map(str, row.mesh)), f"{row.how}, batch {row.batch} of {row.length:,}, {row.recompute}",
            f"{row.memory:.1f}", f"{memory:.1f}", f"{memory / row.memory - 1:+.0%}",
            f"{report.memory.peak / GIB:.1f}",
            f"{row.speed:,.0f}", f"{speed:,.0f}", f"{speed / row.speed - 1:+.0%}", row.differs,
        )  # fmt: skip
        shares = ", ".join(f"{k} {v / GIB:.1f}" for k, v in report.memory.categories.items() if v)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        console.print(
            f"{said}: {shares} GiB; MFU {report.mfu:.0%}; {time.process_time() - started:.0f} s, {peak:.2f} GiB"
        )
        console.print(
            f"  compute {report.time.compute:.2f} s, communication {report.time.communication:.2f} s, of which exposed "
            f"{report.time.exposed:.2f} s, step {report.time.total:.2f} s"
        )
    console.print(table)
    return 0
