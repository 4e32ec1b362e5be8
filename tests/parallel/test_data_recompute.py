"""Activation checkpointing in data-parallel modules: inside of a unit, around one, and around the whole module."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import Replicate, Shard, distribute_module, distribute_tensor, simulate
from shardwise.errors import AutogradError
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


# -- parameters that several reentrant checkpoints share ------------------------------------------------------------
def again(f, x):
    return checkpoint(f, x, use_reentrant=True)


class Shared(nn.Module):
    """`lin` gets a gradient in the backward pass of each checkpoint that uses it."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.lin, self.last = way, nn.Linear(4, 4), nn.Linear(4, 3)
        self.first = nn.Identity() if way.startswith("only") else nn.Linear(4, 4)
        self.double()

    def forward(self, x):
        return self.last(SHARING[self.way](lambda v: self.lin(v).tanh(), self.first(x)))


SHARING = {
    "two": lambda f, x: again(f, again(f, x)),
    "three": lambda f, x: again(f, again(f, again(f, x))),
    "one and a plain one before": lambda f, x: again(f, f(x)),
    "one and a plain one after": lambda f, x: f(again(f, x)),
    "one in another": lambda f, x: again(lambda v: f(again(f, v)), x),
    "only two": lambda f, x: again(f, again(f, x)),  # all parameters have a gradient before the last checkpoint
    "only one and a plain one before": lambda f, x: again(f, f(x)),
}


def shared(mesh, typed, shards):
    value = rows()[:8]
    for way, shard, unit_bytes in itertools.product(SHARING, shards, (0, 1 << 20)):
        expected = Shared(way)
        model = data_parallel(Shared(way), mesh, shard, unit_bytes=unit_bytes)
        for _ in range(2):  # what came late in the first pass is waited for in the second
            expected(value.clone().requires_grad_()).square().mean().backward()
            x = distribute_tensor(value, mesh, [Shard(0)]) if typed else own_part(value, mesh)
            model(x.requires_grad_()).square().mean().backward()
            for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
                same(p.grad, q.grad, f"{name} {way} {shard} {unit_bytes} {typed}")


def test_shared_by_reentrant_checkpoints():
    shared(simulate(2), True, ("none", "parameters"))


def _shared_on_ranks(rank, world_size):
    for typed in (True, False):
        shared(device_mesh((world_size,)), typed, ("gradients", "parameters"))


def test_shared_by_reentrant_checkpoints_on_processes():
    run_ranks(_shared_on_ranks, 2)


def test_hooks_are_not_called_twice():
    """A hook that has seen a part of a gradient as the whole would be wrong in silence."""
    mesh = simulate(2)
    model = data_parallel(Shared("only two"), mesh, "parameters")
    model.lin.weight.register_hook(lambda grad: None)
    x = distribute_tensor(rows(), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(AutogradError, match="its hooks were called with the first.*use_reentrant=False"):
        model(x).square().mean().backward()
