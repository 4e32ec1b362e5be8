"""Train a small GPT with mixture-of-experts layers, expert-parallel and data-parallel, next to one device.

    python examples/moe.py                                     4 simulated ranks in this process
    torchrun --nproc-per-node 4 examples/moe.py                4 real processes (gloo)
    python examples/moe.py --mesh 2x4 --experts 6 --capacity 1.25

The batch is cut over both axes of the mesh; the experts are cut over "ep", everything else is replicated. In each MoE
layer tokens travel along "ep" to the ranks that hold their experts and back. The model knows nothing of meshes.
"""

import argparse
import copy
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import Replicate, Shard
from shardwise.parallel import MixtureOfExperts

TEXT = Path(__file__).parent / "data" / "sonnets.txt"


class Block(nn.Module):
    def __init__(self, width, heads, experts, capacity):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.moe = MixtureOfExperts(width, 2 * width, experts, k=2, capacity_factor=capacity)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        y, balance = self.moe(self.norm2(x))
        return x + y, balance


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width, heads, layers, experts, capacity):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts, capacity) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x, balance = self.token(tokens) + self.position.weight[: tokens.shape[1]], 0
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss + 0.01 * balance / len(self.blocks)


def lay_out(model, mesh):
    def partition(path, module, mesh):
        if isinstance(module, MixtureOfExperts):
            for name in ("up", "down", "up_bias", "down_bias"):
                part = shardwise.distribute_tensor(getattr(module, name).detach(), mesh, (Replicate(), Shard(0)))
                setattr(module, name, nn.Parameter(part))

    return shardwise.distribute_module(model, mesh, partition)


def lay_out_batch(batch, mesh):
    # Every rank has drawn the same batch, so each can keep its part: nothing to send.
    return [shardwise.distribute_tensor(t, mesh, (Shard(0), Shard(0)), src_data_rank=None) for t in batch]


def batches(options, text):
    """Endless (tokens, next tokens), the same on every rank."""
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        starts = torch.randint(len(data) - options.context, (options.batch,), generator=generator)
        rows = torch.stack([data[start : start + options.context + 1] for start in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def difference(one, many):
    return (many.full_tensor() - one).abs().max().item()


def train(options, mesh, say=print):
    """Train on one device and on the mesh; the largest differences of losses, gradients and parameters."""
    torch.manual_seed(options.seed)
    text, sizes = TEXT.read_text(), (options.context, options.width, options.heads, options.layers, options.experts)
    one = GPT(len(set(text)), *sizes, options.capacity).double()
    many = lay_out(copy.deepcopy(one), mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=options.lr) for model in (one, many)]
    apart = {"losses": 0.0, "gradients": 0.0, "parameters": 0.0}
    for step, batch in zip(range(options.steps), batches(options, text)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        want = one(*batch)
        want.backward()
        with shardwise.debug.ledger() as log:
            loss = many(*lay_out_batch(batch, mesh))
            loss.backward()
        pairs = list(zip(one.parameters(), many.parameters()))
        apart["losses"] = max(apart["losses"], difference(want.detach(), loss.detach()))
        apart["gradients"] = max([apart["gradients"], *(difference(p.grad, q.grad) for p, q in pairs)])
        for optimizer in optimizers:
            optimizer.step()
        apart["parameters"] = max([apart["parameters"], *(difference(p.detach(), q.detach()) for p, q in pairs)])
        if step % max(1, options.steps // 10) == 0 or step + 1 == options.steps:
            sent = sum(e.bytes for e in log if e.op in ("dispatch", "combine"))
            say(f"step {step + 1:3}  loss {loss.item():.6f}  {sent:,} of {log.total_bytes:,} bytes moved were tokens")
    return apart


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", help="dp x ep (default: 2x2, or 2 x ranks/2 under torchrun)")
    parser.add_argument("--capacity", type=float, help="capacity factor (default: no token is dropped)")
    parser.add_argument("--lr", type=float, default=3e-3)
    numbers = {"steps": 20, "batch": 8, "context": 32, "width": 32, "heads": 4, "layers": 2, "experts": 6, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    dp = math.gcd(ranks or 4, 2)
    shape = tuple(map(int, options.mesh.split("x"))) if options.mesh else (dp, (ranks or 4) // dp)
    if ranks:
        mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    else:
        mesh = shardwise.simulate(shape, axis_names=("dp", "ep"))
    quiet = ranks and dist.get_rank()
    apart = train(options, mesh, (lambda line: None) if quiet else print)
    if not quiet:
        print("largest difference from one device: " + ", ".join(f"{k} {v:.1e}" for k, v in apart.items()))
        print("equal to one device" if max(apart.values()) < 1e-10 else "NOT EQUAL to one device")
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
