"""Parts of one buffer share a storage, but no element: a write to one of them reads nothing of another."""

import copy

import pytest
import torch
from torch import nn

from shardwise import DTensor, RankTensor, Shard, distribute_tensor, simulate, strict
from shardwise.parallel import data_parallel
from shardwise.parallel.data import SHARDS
from tests.workers import device_mesh, run_ranks


def parts_of_one_buffer(mesh, buffers, as_local):
    part = lambda start, stop, shape: as_local([b[start:stop].view(shape) for b in buffers])
    return [DTensor.from_local(part(*p), mesh, [Shard(0)]) for p in ((0, 12, (3, 4)), (12, 15, (3, 1)), (0, 3, (3, 1)))]


def check_parts(mesh, buffers, as_local):
    wide, narrow, _ = parts_of_one_buffer(mesh, buffers, as_local)
    expected = wide.full_tensor() - narrow.full_tensor()
    with strict():
        wide.sub_(narrow)
    assert torch.equal(wide.full_tensor(), expected)
    with strict():
        torch._foreach_mul_([wide, narrow], 2)
    assert torch.equal(wide.full_tensor(), 2 * expected)


def test_parts_of_one_buffer():
    check_parts(simulate((3,)), [torch.arange(20.0) + 100 * r for r in range(3)], RankTensor)


def on_a_rank(rank, world_size):
    check_parts(device_mesh((world_size,), ("dp",)), [torch.arange(20.0) + 100 * rank], lambda values: values[0])


def test_parts_of_one_buffer_on_processes():
    run_ranks(on_a_rank, 3)


@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_and_parameters_in_one_buffer(shard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)).double()
    plain, mesh = copy.deepcopy(model), simulate((3,))
    model, x = data_parallel(model, mesh, shard), torch.randn(6, 6, dtype=torch.float64)
    model(distribute_tensor(x, mesh, [Shard(0)])).square().mean().backward()
    plain(x).square().mean().backward()
    with strict():
        for ours in (model, plain):
            torch._foreach_mul_([p.grad for p in ours.parameters()], 0.25)
            torch._foreach_mul_([p.data for p in ours.parameters()], 0.5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())
