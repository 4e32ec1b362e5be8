"""A collective on a distributed tensor raises: it must not pass over its values in silence."""

import pytest
import torch
import torch.distributed as dist

from shardwise import RuleError, Shard, distribute_tensor
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
