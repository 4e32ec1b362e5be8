"""Train a small character-level GPT on a mesh, next to the same model on one device.

    python examples/train_gpt.py                  8 simulated ranks in this process, a 2x4 mesh
    python examples/train_gpt.py --ranks 4        4 real processes (gloo), a 2x2 mesh
    torchrun --nproc-per-node 4 examples/train_gpt.py     the same, by hand

The model below knows nothing of meshes. `lay_out` gives its parameters their layouts: attention heads and the hidden
layer of the MLP are cut over the axis "tp"; the batch is cut over "dp". All communication follows from that.
"""

import argparse
import copy
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import shardwise
from shardwise import Replicate, Shard

TEXT = Path(__file__).parent / "data" / "sonnets.txt"

# ------------------------------------------------------------------ the model, as for one device


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        heads = (layer(y).unflatten(-1, (-1, self.head_width)) for layer in (self.query, self.key, self.value))
        q, k, v = (head.transpose(1, 2) for head in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


# ------------------------------------------------------------------ its layout

CUT_OVER_TP = {  # which dim of a linear layer's weight and bias is cut; every other parameter is replicated
    **{name: {"weight": 0, "bias": 0} for name in ("query", "key", "value", "up")},
    **{name: {"weight": 1} for name in ("project", "down")},
}


def lay_out(model, mesh):
    def partition(path, module, mesh):
        for name, dim in CUT_OVER_TP.get(path.rpartition(".")[2], {}).items():
            whole = getattr(module, name).detach()
            setattr(module, name, nn.Parameter(shardwise.distribute_tensor(whole, mesh, (Replicate(), Shard(dim)))))

    return shardwise.distribute_module(model, mesh, partition)


def lay_out_batch(batch, mesh):
    # Every rank has drawn the same batch, so each can keep its part: nothing to send.
    return [shardwise.distribute_tensor(t, mesh, (Shard(0), Replicate()), src_data_rank=None) for t in batch]


# ------------------------------------------------------------------ training


def batches(options):
    """Endless (tokens, next tokens), each batch x context; the same on every rank."""
    text = TEXT.read_text()
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        starts = torch.randint(len(data) - options.context, (options.batch,), generator=generator)
        rows = torch.stack([data[start : start + options.context + 1] for start in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def train_step(model, optimizer, tokens, targets):
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(options, mesh, console):
    """Both models, step by step: the laid-out model, the two loss curves, and the ledger of the last step."""
    torch.manual_seed(options.seed)
    vocabulary = len(set(TEXT.read_text()))
    one = GPT(vocabulary, options.context, options.width, options.heads, options.layers).to(options.dtype)
    many = lay_out(copy.deepcopy(one), mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=options.lr) for model in (one, many)]
    curve_one, curve_many, log = [], [], ()
    columns = (BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress("training", *columns, console=console, disable=console.quiet) as progress:
        bar = progress.add_task("", total=options.steps)
        for _, batch in zip(range(options.steps), batches(options)):
            if not console.quiet:  # the comparison needs one process
                curve_one.append(train_step(one, optimizers[0], *batch).item())
            with shardwise.debug.ledger() as log:
                loss = train_step(many, optimizers[1], *lay_out_batch(batch, mesh))
            curve_many.append(loss.full_tensor().item())
            progress.update(bar, advance=1, description=f"loss {curve_many[-1]:.4f}")
    return many, curve_one, curve_many, log


# ------------------------------------------------------------------ what it prints


def table(title, *columns, rows, right=(), caption=None):
    result = Table(title=title, title_justify="left", title_style="bold", caption=caption, caption_justify="left")
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*map(str, row))
    return result


def parameter_table(model, mesh):
    rows = (
        (name, list(p.shape), ", ".join(map(str, p.placements)), list(p.layout.local_shape(0)))
        for name, p in model.named_parameters()
    )
    title = "\nParameters over " + " x ".join(f"{name} ({size})" for name, size in zip(("dp", "tp"), mesh.shape))
    return table(title, "parameter", "shape", "placements", "shape on rank 0", rows=rows)


def sparkline(curve, width=64):
    low, high = min(curve), max(curve)
    points = [curve[i * len(curve) // width] for i in range(width)] if len(curve) > width else curve
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (loss - low) / (high - low or 1))] for loss in points)


def curve_table(one, many):
    shown = sorted({round(i * (len(one) - 1) / 8) for i in range(9)})
    rows = [(i + 1, f"{one[i]:.6f}", f"{many[i]:.6f}", f"{abs(one[i] - many[i]):.1e}") for i in shown]
    return table("\nLoss", *(head := ("step", "one device", "mesh", "difference")), rows=rows, right=head)


def ledger_table(log, received_by):
    total, count = Counter(), Counter()
    for entry in log:
        file, _, line = str(entry.source).rpartition(":")
        source = f"{Path(file).stem}:{line}"  # the table fits into 80 columns
        key = (entry.op, "backward" if entry.backward else "forward", entry.kind, str(entry.axis), source)
        total[key] += entry.bytes
        count[key] += 1
    rows = [(*key[:4], f"{size:,}", count[key], key[4]) for key, size in total.items()]
    caption = f"{sum(total.values()):,} bytes in {sum(count.values())} collectives, received by {received_by}"
    head = ("op", "pass", "collective", "axis", "bytes", "n", "line")
    return table("\nCommunication of one step", *head, rows=rows, right=("bytes", "n"), caption=caption)


# ------------------------------------------------------------------ one process or many


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="run on this many local processes instead of simulated ranks")
    parser.add_argument("--mesh", help="dp x tp, such as 2x4 (default: 2x4 simulated, 2 x ranks/2 on processes)")
    parser.add_argument("--dtype", default=torch.float64, type=lambda name: getattr(torch, name))
    parser.add_argument("--lr", type=float, default=3e-3)
    sizes = {"steps": 150, "batch": 16, "context": 64, "width": 64, "heads": 4, "layers": 2, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks or 0))
    mesh = options.mesh or (f"{math.gcd(ranks, 2)}x{ranks // math.gcd(ranks, 2)}" if ranks else "2x4")
    options.mesh = tuple(int(size) for size in mesh.split("x"))
    if len(options.mesh) != 2 or (ranks and math.prod(options.mesh) != ranks):
        parser.error(f"--mesh {mesh} is not a dp x tp mesh" + (f" of {ranks} ranks" if ranks else ""))
    return options


def main():
    options = parse()
    launched = "WORLD_SIZE" in os.environ
    if options.ranks and not launched:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        sys.exit(subprocess.call([*launcher, *sys.argv], env={"OMP_NUM_THREADS": "1", **os.environ}))
    if launched:
        mesh = shardwise.init_device_mesh("cpu", options.mesh, mesh_dim_names=("dp", "tp"))
    else:
        mesh = shardwise.simulate(options.mesh, axis_names=("dp", "tp"))
    console = Console(quiet=launched and dist.get_rank() != 0)

    model, one, many, log = train(options, mesh, console)

    if not console.quiet:
        console.print(parameter_table(model, mesh))
        console.print(ledger_table(log, "rank 0" if launched else f"all {math.prod(options.mesh)} ranks"))
        console.print(curve_table(one, many))
        console.print(f"one device  {sparkline(one)}\nmesh        {sparkline(many)}")
        gap = max(abs(a - b) for a, b in zip(one, many))
        console.print(f"\nThe largest difference between the two loss curves is [bold]{gap:.1e}[/].")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
