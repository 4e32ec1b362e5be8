"""Train a GPT with dropout on 1, 2, 4 and 8 ranks and in five layouts: the same losses everywhere.

    python examples/gpt_dropout.py                       simulated ranks in this process
    python examples/gpt_dropout.py --steps 10 --quiet    fewer steps, the summary only

The model draws in four places: its parameters, the embedding's dropout, the attention's and the residual's. A random
number depends on the seed and on its element's place in the global tensor, so neither ranks nor layouts change it.
"""

import argparse

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Replicate, Shard

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH, DROPOUT = 29, 12, 32, 4, 2, 6, 0.1
R = Replicate()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.project, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        heads = (layer(y).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value))
        q, k, v = (head.transpose(1, 2) for head in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=DROPOUT if self.training else 0.0)
        x = x + self.drop(self.project(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, save_memory=False):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.save_memory = save_memory

    def forward(self, tokens):
        x = self.drop(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.save_memory else block(x)
        return self.head(self.norm(x))


# ------------------------------------------------------------------ layouts: of a parameter, and of the batch


def tensor_parallel(name):
    layer, kind = name.split(".")[-2:]
    if layer in ("query", "key", "value", "up"):
        return Shard(0)
    return Shard(1) if layer in ("project", "down") and kind == "weight" else R


LAYOUTS = {
    "data parallel": (lambda name: [R], [Shard(0)]),
    "tensor parallel": (lambda name: [tensor_parallel(name)], [R]),
    "sequence parallel": (lambda name: [R], [Shard(1)]),
    "sharded parameters": (lambda name: [Shard(0)], [Shard(0)]),
    "data x tensor parallel": (lambda name: [R, tensor_parallel(name)], [Shard(0), R]),
}
MESHES = {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 4)}  # of the last one; the others have one axis


def lay_out(model, mesh, places):
    def partition(path, module, mesh):
        for name, parameter in list(module.named_parameters(recurse=False)):
            laid_out = shardwise.distribute_tensor(parameter.detach(), mesh, places(f"{path}.{name}"))
            module.register_parameter(name, nn.Parameter(laid_out))

    return shardwise.distribute_module(model, mesh, partition)


def batches(seed):
    generator = torch.Generator().manual_seed(seed)  # data has a stream of its own
    while True:
        rows = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
        rows[:, 1::2] = (rows[:, :-1:2] * 7 + 3) % VOCABULARY  # every other token can be learned
        yield rows[:, :-1], rows[:, 1:]


def train(mesh, layout, steps, seed=0, save_memory=False):
    """The losses, on a mesh, in one of the layouts."""
    places, where = LAYOUTS[layout]
    with torch.device("meta"):
        model = GPT(save_memory).double()
    lay_out(model, mesh, places)
    shardwise.manual_seed(seed)
    shardwise.materialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _, batch in zip(range(steps), batches(seed)):
        tokens, targets = (shardwise.distribute_tensor(t, mesh, where, src_data_rank=None) for t in batch)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="the summary only")
    parser.add_argument("--save-memory", action="store_true", help="with activation checkpointing")
    options = parser.parse_args()
    console = Console()
    want = train(shardwise.simulate((1,)), "data parallel", options.steps, options.seed)
    table = Table("layout", "ranks", "first loss", "last loss", "largest difference", title="GPT with dropout, float64")
    worst = 0.0
    for layout, (_, where) in LAYOUTS.items():
        for ranks in (1, 2, 4, 8):
            mesh = shardwise.simulate((ranks,) if len(where) == 1 else MESHES[ranks])
            got = train(mesh, layout, options.steps, options.seed, options.save_memory)
            gap = max(abs(a - b) for a, b in zip(got, want))
            worst = max(worst, gap)
            table.add_row(layout, str(ranks), f"{got[0]:.9f}", f"{got[-1]:.9f}", f"{gap:.1e}")
    if not options.quiet:
        console.print(table)
    console.print(f"{options.steps} steps: the largest difference between any two of the runs' losses is {worst:.1e}.")
    raise SystemExit(worst > 1e-9)


if __name__ == "__main__":
    main()
