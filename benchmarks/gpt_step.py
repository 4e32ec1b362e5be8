"""Time one eager training step of a GPT on one GPU: plain torch, torch's DTensor, shardwise; a mesh of one rank.

python benchmarks/gpt_step.py
"""

import argparse
import gc
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def build(library, mesh, options):
    torch.manual_seed(0)
    model = GPT(options.vocabulary, options.context, options.width, options.heads, options.layers)
    model = model.to(device=options.device, dtype=torch.bfloat16)
    tokens = torch.randint(options.vocabulary, (options.batch, options.context + 1), device=options.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if library is not None:
        model = library.distribute_module(model, mesh)
        inputs, targets = (library.distribute_tensor(t, mesh, [library.Shard(0)]) for t in (inputs, targets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        if options.optimizer:
            optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step, options):
    sync = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    for _ in range(options.steps):
        step()
    sync()
    return (time.perf_counter() - start) / options.steps * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in {
        "layers": 12,
        "width": 768,
        "heads": 12,
        "context": 1024,
        "batch": 8,
        "vocabulary": 50304,
        "steps": 10,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--freeze", action="store_true", help="keep what is alive out of garbage collection")
    parser.add_argument("--optimizer", action="store_true", help="include the AdamW step")
    options = parser.parse_args()

    import torch.distributed.tensor as peer

    import shardwise

    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = shardwise.init_device_mesh(options.device, (1,))
    steps = {"torch": build(None, None, options), "shardwise": build(shardwise, mesh, options)}
    try:
        steps["DTensor"] = build(peer, mesh, options)
        steps["DTensor"]()
    except Exception as error:  # the peer may lack an op; say so in its row
        steps.pop("DTensor", None)
        print(f"DTensor: {type(error).__name__}: {error}")
    best = {name: float("inf") for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    if options.freeze:
        gc.collect()
        gc.freeze()
    for _ in range(5):
        for name, step in steps.items():
            best[name] = min(best[name], timed(step, options))
    model = f"{options.layers} layers x {options.width}, batch {options.batch} x {options.context}"
    table = Table("library", "step (ms)", "/ torch", title=f"{model}, bf16, {options.device}")
    for name, value in best.items():
        table.add_row(name, f"{value:.2f}", f"{value / best['torch']:.3f}x")
    Console(width=100).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
