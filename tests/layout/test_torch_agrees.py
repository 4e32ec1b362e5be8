"""Local tensors are exactly those that torch's own DTensor has for the same placements, on 4 real processes."""

import itertools
import math

import pytest
import torch
import torch.distributed.tensor as theirs

import shardwise
from tests.workers import device_mesh, run_ranks

CHOICES = (theirs.Replicate(), theirs.Shard(0), theirs.Shard(1), theirs.Shard(-1))
SHAPES = [(8, 8), (8, 6), (7, 5), (5, 9), (3, 2), (1, 1), (2, 7), (0, 4), (4, 3, 2)]


def compare(rank, world_size, mesh_shape):
    mesh = device_mesh(mesh_shape)
    cases = 0
    for shape in SHAPES:
        whole = torch.arange(math.prod(shape)).view(shape)
        for places in itertools.product(CHOICES, repeat=len(mesh_shape)):
            reference = theirs.distribute_tensor(whole, mesh, places)
            expected = reference.to_local()
            for src_data_rank in (0, None):
                ours = shardwise.distribute_tensor(whole, mesh, places, src_data_rank=src_data_rank)
                local = ours.to_local()
                assert type(local) is torch.Tensor
                assert local.shape == expected.shape, (shape, places, local.shape, expected.shape)
                assert torch.equal(local, expected), (shape, places)
            assert ours.shape == reference.shape and ours.stride() == reference.stride()
            assert ours.layout.local_shape(rank) == tuple(expected.shape)
            assert torch.equal(ours.full_tensor(), whole)
            cases += 1
    return cases


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (4, 1), (1, 2, 2)], ids=str)
def test_local_tensors_are_those_of_torch(mesh_shape):
    assert run_ranks(compare, 4, mesh_shape) == [len(SHAPES) * len(CHOICES) ** len(mesh_shape)] * 4


def compare_source(rank, world_size):
    """The values are those of coordinate 0 of every axis, unless another rank is named or none."""
    found = []
    for mesh_shape, places in (((4,), [theirs.Shard(0)]), ((2, 2), [theirs.Shard(0), theirs.Replicate()])):
        mesh = device_mesh(mesh_shape)
        mine = torch.arange(6) + 100 * rank
        for source in (0, None):
            expected = theirs.distribute_tensor(mine, mesh, places, src_data_rank=source).to_local()
            ours = shardwise.distribute_tensor(mine, mesh, places, src_data_rank=source).to_local()
            assert torch.equal(ours, expected), (mesh_shape, source, ours, expected)
        found.append(shardwise.distribute_tensor(mine, mesh, places, src_data_rank=1).full_tensor()[0].item())
    return found


def test_whose_values_they_are():
    assert run_ranks(compare_source, 4) == [[100, 300]] * 4  # coordinate 1 of every axis: rank 1, rank 3


def redistribute(rank, world_size):
    mesh = device_mesh((2, 2))
    whole = torch.arange(35.0).view(7, 5)
    for before, after in itertools.product(itertools.product(CHOICES[:3], repeat=2), repeat=2):
        expected = theirs.distribute_tensor(whole, mesh, before).redistribute(placements=after).to_local()
        ours = shardwise.distribute_tensor(whole, mesh, before).redistribute(placements=after).to_local()
        assert torch.equal(ours, expected), (before, after)
    return True


def test_redistributed_locals_are_those_of_torch():
    assert run_ranks(redistribute, 4) == [True] * 4


def test_sizes_and_offsets_of_chunks():
    for n, parts in itertools.product(range(10), range(1, 5)):
        for i in range(parts):
            expected = theirs.Shard.local_shard_size_and_offset(n, parts, i)
            assert shardwise.Shard.local_shard_size_and_offset(n, parts, i) == expected, (n, parts, i)


def test_torch_placements_are_accepted():
    mesh = shardwise.simulate((2, 2))
    x = shardwise.distribute_tensor(torch.ones(4, 4), mesh, [theirs.Shard(-1), theirs.Replicate()])
    assert x.placements == (shardwise.Shard(1), shardwise.Replicate())
    y = x.redistribute(placements=(theirs.Replicate(), theirs.Partial("max")))
    assert y.placements == (shardwise.Replicate(), shardwise.Partial("max"))
    z = shardwise.DTensor.from_local(torch.ones(2), mesh, [theirs.Partial(), theirs.Shard(0)])
    assert z.placements == (shardwise.Partial("sum"), shardwise.Shard(0))
    assert shardwise.zeros(4, device_mesh=mesh, placements=[theirs.Shard(0), theirs.Shard(0)]).to_local().shape == (1,)
    for op in ("sum", "avg", "product", "max", "min", "band", "bor", "bxor"):
        assert shardwise.layout.as_placement(theirs.Partial(op)) == shardwise.Partial(op)
