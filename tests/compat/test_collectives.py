"""A collective on a distributed tensor raises: it must not pass over its values in silence."""

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise import CommError, DTensor, Replicate, RuleError, Shard, distribute_tensor
from tests.workers import device_mesh, run_ranks


def collectives(rank, world_size):
    x = distribute_tensor(torch.arange(8.0), device_mesh((world_size,)), [Shard(0)])
    for call in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather([torch.empty(8) for _ in range(world_size)], x),
    ):
        with pytest.raises(RuleError, match=r"call it on x\.to_local\(\)"):
            call()
    local = x.to_local()
    dist.all_reduce(local)  # what each rank holds is theirs to reduce
    return x.full_tensor().tolist()


def test_collectives_are_for_local_tensors():
    assert run_ranks(collectives, 2) == [[4, 6, 8, 10] * 2] * 2


def traced(rank, world_size):
    """torch.fx sees what runs on the local tensors; what ranks send to each other it cannot see."""
    mesh = device_mesh((world_size,), ("x",))
    shape = torch.Size((2 * world_size, 3))

    def entered(local):
        return DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=(3, 1))

    graph = make_fx(lambda local: (entered(local) * 2 + 1).relu().to_local())(torch.zeros(2, 3))
    torch.testing.assert_close(graph(torch.ones(2, 3)), torch.full((2, 3), 3.0))
    for move in (
        lambda local: entered(local).full_tensor(),
        lambda local: entered(local).redistribute(placements=[Shard(1)], async_op=True).to_local(),
        lambda local: entered(local).sum().redistribute(placements=[Replicate()]).to_local(),
    ):
        with pytest.raises(CommError, match=r"on mesh axis 'x' ?.*while torch.fx traces \(make_fx\)"):
            make_fx(move)(torch.zeros(2, 3))
    assert entered(torch.ones(2, 3)).sum().item() == 6 * world_size  # and nothing is left behind


def test_a_move_cannot_be_traced():
    run_ranks(traced, 2)
