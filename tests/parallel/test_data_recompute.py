"""Activation checkpointing in data-parallel modules: inside of a unit, around one, and around the whole module."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import Replicate, Shard, distribute_module, distribute_tensor, simulate
from shardwise.parallel.data import SHARDS, data_parallel
from tests.parallel.data_net import own_part, run_checks
from tests.tensor.common import same
from tests.workers import device_mesh, run_ranks

WAYS = ("inside", "around", "whole")


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.norm, self.up, self.down, self.again = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5), again

    def inside(self, x, dropped):
        return self.down(F.gelu(self.up(self.norm(x)))) * dropped

    def forward(self, x):
        run = (
            self.inside if self.again is None else functools.partial(checkpoint, self.inside, use_reentrant=self.again)
        )
        return x + run(x, 0.5)


class Net(nn.Module):
    def __init__(self, way, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.reentrant = way, reentrant
        self.first = nn.Linear(4, 5)
        self.blocks = nn.ModuleList([Block(reentrant if way == "inside" else None) for _ in range(2)])
        self.blocks[0].down.bias.requires_grad_(False)
        self.last = nn.Linear(5, 3)
        self.double()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.way == "around" else block(x)
        return self.last(x)


def rows():
    return torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@functools.cache
def one_device():
    model = Net("none", None)
    for _ in range(2):
        model(rows()).square().mean().backward()
    return model


def gradients(mesh, ways=WAYS, placements=None):
    for shard, way, reentrant, typed in itertools.product(SHARDS, ways, (True, False), (False, True)):
        if not typed and (placements or rows().shape[0] % mesh["dp"].size()):
            continue  # parts of different sizes: their average is not the mean
        model = Net(way, reentrant)
        if placements:
            distribute_module(model, mesh)
        data_parallel(model, mesh["dp"], shard, unit_bytes=0)
        for _ in range(2):
            x = rows()
            if typed:
                x = distribute_tensor(x, mesh if placements else mesh["dp"], placements or [Shard(0)])
            else:
                x = own_part(x, mesh["dp"])
            if way == "whole":
                x.requires_grad_(reentrant)  # without it, torch computes no gradients in there
                out = checkpoint(model, x, use_reentrant=reentrant)
            else:
                out = model(x)
            out.square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), one_device().parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{name} {shard} {way} {reentrant} {typed}"
            same(p.grad, q.grad, f"{name} {shard} {way} reentrant={reentrant} typed={typed}")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_simulated(size):
    gradients(simulate((size, 1), axis_names=("dp", "tp")))


def test_batch_over_two_axes():
    """The other axis cuts the batch too: the parameters enter split calls in several forms."""
    mesh = simulate((2, 2), axis_names=("dp", "tp"))
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(0)]):
        gradients(mesh, ("inside",), placements)


def _on_ranks(rank, world_size):
    run_checks(device_mesh((world_size, 1), ("dp", "tp")), [gradients])


def test_processes():
    run_ranks(_on_ranks, 3)
