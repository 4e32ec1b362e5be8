"""Train a two-tower recommender whose embedding tables are cut four ways, on 4 processes, and check it against one.

    python examples/embedding_tables.py                     4 local processes (gloo)
    torchrun --nproc-per-node=4 examples/embedding_tables.py

A user and an item tower; each looks ids up in two tables and runs a small network on the rows. The tables are sharded

    users       table-wise   the whole table on one rank
    countries   row-wise     chunks of rows
    items       column-wise  chunks of columns
    tags        grid-wise    2 x 2 tiles, one a rank (bags of tags, averaged)

and the networks are replicated, each rank with its own part of the batch. Half-way, every table is moved to another
tiling together with its optimizer state. The losses are those of one process that sees the whole batches.
"""

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise import debug
from shardwise.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedOptimizer,
    ShardedTensor,
    ShardingPlan,
    ShardMetadata,
    named_params_with_sharded_tensor,
    shard_module,
)

ROWS = {"users": 50, "countries": 13, "items": 41, "tags": 17}
WIDTH, BATCH, TAGS = 8, 24, 3
WORLD = 4


class Tower(nn.Module):
    """Two embedding tables and a network on their rows."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second
        self.network = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return self.network(torch.cat([self.first(one), self.second(two)], dim=1))


class Recommender(nn.Module):
    """The score of an item for a user is the product of what their towers say."""

    def __init__(self):
        super().__init__()
        self.user = Tower(nn.Embedding(ROWS["users"], WIDTH), nn.Embedding(ROWS["countries"], WIDTH, padding_idx=0))
        self.item = Tower(nn.Embedding(ROWS["items"], WIDTH), nn.EmbeddingBag(ROWS["tags"], WIDTH, mode="mean"))

    def forward(self, user, country, item, tags):
        return (self.user(user, country) * self.item(item, tags)).sum(dim=1)


TABLES = {
    "users": "user.first.weight",
    "countries": "user.second.weight",
    "items": "item.first.weight",
    "tags": "item.second.weight",
}


# -- how the tables are cut ------------------------------------------------------------------------------------
def rows(ranks):
    return ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in ranks])


def columns(ranks):
    return ChunkShardingSpec(1, [f"rank:{r}/cpu" for r in ranks])


def on_one_rank(n, rank):
    return EnumerableShardingSpec([ShardMetadata([0, 0], [n, WIDTH], f"rank:{rank}/cpu")])


def grid(n, ranks):
    """Four tiles: two bands of rows, two of columns."""
    half = (n + 1) // 2
    corners = [(r, c) for r in ((0, half), (half, n - half)) for c in ((0, WIDTH // 2), (WIDTH // 2, WIDTH // 2))]
    return EnumerableShardingSpec(
        [
            ShardMetadata([row, column], [height, width], f"rank:{rank}/cpu")
            for ((row, height), (column, width)), rank in zip(corners, ranks, strict=True)
        ]
    )


FIRST = {
    "users": on_one_rank(ROWS["users"], 1),
    "countries": rows(range(WORLD)),
    "items": columns(range(WORLD)),
    "tags": grid(ROWS["tags"], range(WORLD)),
}
SECOND = {
    "users": grid(ROWS["users"], [3, 2, 1, 0]),
    "countries": on_one_rank(ROWS["countries"], 2),
    "items": rows([2, 0]),
    "tags": columns([3, 1, 2, 0]),
}


# -- training --------------------------------------------------------------------------------------------------
def batch(step):
    """A batch of every rank together: ids, and whether the user liked the item."""
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, ROWS[name], (BATCH,), generator=generator) for name in ("users", "countries", "items")]
    tags = torch.randint(0, ROWS["tags"], (BATCH, TAGS), generator=generator)
    return *ids, tags, torch.randint(0, 2, (BATCH,), generator=generator).double()


def reference(steps):
    """The losses of one process."""
    torch.manual_seed(0)
    model = Recommender().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        *inputs, liked = batch(step)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(*inputs), liked)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_optimizer(model):
    return ShardedOptimizer(dict(named_params_with_sharded_tensor(model)), torch.optim.Adam, lr=0.02)


def reshard(model, optimizer, specs):
    """Every table in other tiles; its optimizer state follows. The optimizer for the new tiles."""
    state = optimizer.state_dict()
    with torch.no_grad():
        for name, path in TABLES.items():
            model.get_parameter(path).reshard(specs[name])
    moved = make_optimizer(model)
    moved.load_state_dict(state)
    return moved


def train(rank, world, steps):
    """This rank's share: its part of each batch, its tiles of each table. The losses of the whole batches."""
    torch.manual_seed(0)
    model = Recommender().double()
    shard_module(model, ShardingPlan({TABLES[name]: spec for name, spec in FIRST.items()}))
    optimizer = make_optimizer(model)
    dense = [p for p in model.parameters() if not isinstance(p, ShardedTensor)]
    losses = []
    for step in range(steps):
        if step == steps // 2:
            optimizer = reshard(model, optimizer, SECOND)
        *inputs, liked = (part.chunk(world)[rank] for part in batch(step))
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(*inputs), liked, reduction="sum") / BATCH
        loss.backward()  # the rows' gradients travel to their owners and add up there
        for p in dense:
            dist.all_reduce(p.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, model


def show(model):
    for name, path in TABLES.items():
        table = model.get_parameter(path)
        print(f"\n{name}: {list(table.size())}")
        for tile in table.metadata().shards_metadata:
            print(f"    {tile.placement}  rows and columns from {tile.shard_offsets}, {tile.shard_sizes} of them")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        sys.exit(subprocess.call([sys.executable, *launcher, __file__, *sys.argv[1:]]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != WORLD:
        parser.error(f"the tables are laid out for {WORLD} ranks, not {world}")
    with debug.ledger() as log:
        losses, model = train(rank, world, options.steps)
    if rank == 0:
        want = reference(options.steps)
        show(model)
        kinds = {entry.op for entry in log}
        sums = {op: sum(e.bytes for e in log if e.op == op) for op in sorted(kinds)}
        print(f"\nreceived by rank 0, in bytes: {sums}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {world} processes, {want[-1]:.4f} on one")
        gap = max(abs(a - b) for a, b in zip(losses, want, strict=True))
        print(f"largest difference between the two loss curves: {gap:.1e}")
        if gap > 1e-9:
            sys.exit("the losses differ")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
