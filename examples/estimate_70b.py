"""What will it cost on 65,536 ranks? A dense model of 70 B parameters and a mixture of experts of 1 T, estimated with
their own training steps, without a GPU and without memory for them.

    python examples/estimate_70b.py                      both models (a minute on two cores)
    python examples/estimate_70b.py --model dense --batch 2 --save dense.trace.json
"""

import argparse
import contextlib
import resource
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_module
from shardwise.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    MixtureOfExperts,
    RowwiseParallel,
    data_parallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
)


class Attention(nn.Module):
    def __init__(self, width, heads, key_heads):
        super().__init__()
        self.head_width = width // heads
        self.query, self.project = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, key_heads * self.head_width, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.project(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, heads, key_heads, feed_forward):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, heads, key_heads), feed_forward

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.feed_forward(self.norm2(x))
        return x + (y[0] if isinstance(y, tuple) else y)


class Transformer(nn.Module):
    def __init__(self, vocabulary, width, heads, key_heads, layers, feed_forward):
        super().__init__()
        self.token, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.blocks = nn.Sequential(*(Block(width, heads, key_heads, feed_forward()) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


TENSOR = {"token": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(use_local_output=False)}
TENSOR |= {f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
TENSOR |= {f"blocks.*.feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
TENSOR |= {f"blocks.*.{name}": RowwiseParallel() for name in ("attention.project", "feed_forward.down")}


def shard_all(model, mesh):
    """ZeRO 3 in bfloat16, a unit for each block."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def training(model, tokens, targets, cut_loss=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        with loss_parallel() if cut_loss else contextlib.nullcontext():  # the logits stay cut over the vocabulary
            F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def dense(mesh, batch=1, length=8192, layers=80, width=8192, hidden=28672, vocabulary=128256):
    """Llama-3-like 70 B: tensor parallel over "tp", ZeRO 3 over "shard", copies over "replica"."""
    model = Transformer(vocabulary, width, width // 128, 8, layers, lambda: GatedMLP(width, hidden))
    parallelize_module(model, mesh["tp"], TENSOR)
    shard_all(model, mesh["replica", "shard"])
    tokens, targets = (torch.zeros(batch, length, dtype=torch.int64) for _ in range(2))
    return model, training(model, tokens, DTensor.from_local(targets, mesh["tp"], [Replicate()]), cut_loss=True)


def mixture(mesh, batch=1, length=4096, layers=61, width=7168, hidden=4608, experts=256, vocabulary=131072):
    """1 T parameters: experts over "ep", tokens too; ZeRO 3 over "dp"."""
    ep = mesh["ep"]
    model = Transformer(
        vocabulary, width, width // 128, width // 128, layers, lambda: MixtureOfExperts(width, hidden, experts, 8)
    )

    def place(name, module, _):
        if isinstance(module, MixtureOfExperts):
            for key in ("up", "down", "up_bias", "down_bias"):
                module.register_parameter(
                    key, nn.Parameter(shardwise.distribute_tensor(getattr(module, key).detach(), ep, [Shard(0)]))
                )

    distribute_module(model, ep, place)
    data_parallel(model, mesh["dp"], "parameters", compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rows = (batch * ep.size(), length)
    tokens, targets = (
        shardwise.zeros(*rows, dtype=torch.int64, device_mesh=ep, placements=[Shard(0)]) for _ in range(2)
    )
    return model, training(model, tokens, targets)


MODELS = {
    "dense": (dense, (64, 8, 128), ("replica", "tp", "shard"), 64 * 128),
    "mixture": (mixture, (1024, 64), ("dp", "ep"), 65536),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append", help="by default both")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--save", help="a .json or .trace.json file for the last report")
    options = parser.parse_args()
    console = Console()
    for name in options.model or MODELS:
        build, shape, axes, data_ranks = MODELS[name]
        started = time.perf_counter()
        more = {"layers": options.layers} if options.layers else {}
        with shardwise.outline(shape, axis_names=axes, device="cuda", assume={"experts": "even"}) as mesh:
            length = 8192 if name == "dense" else 4096
            model, step = build(mesh, batch=options.batch, length=length, **more)
            parameters = sum(p.numel() for p in model.parameters())
            tokens = options.batch * length * data_ranks
            report = shardwise.estimate(step, hardware=options.hardware, tokens=tokens, warmup=0)
        for table in report.tables():
            console.print(table)
        seconds, memory = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        spent = f"{seconds:.0f} s ({time.process_time():.0f} s of one core since the start), {memory:.2f} GiB"
        console.print(f"{name}: {parameters / 1e9:,.1f} B parameters on {mesh.size():,} ranks, estimated in {spent}")
        if options.save:
            report.save(options.save)


if __name__ == "__main__":
    main()
