"""Ranks whose generators drift apart after the draws that are compared at once cannot exchange values."""

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import Shard
from shardwise.errors import CommError
from tests.workers import run_ranks


def mesh_of_all():
    """On a group of its own, so that nothing was drawn on it before, and nobody misses the group afterwards."""
    return torch.distributed.device_mesh.DeviceMesh.from_group(dist.new_group(), "cpu")


def drifts(rank, world_size, draws, how):
    mesh = mesh_of_all()
    shardwise.manual_seed(3)
    for _ in range(draws):
        x = shardwise.rand(5, 3, device_mesh=mesh, placements=[Shard(0)])
    before = x.full_tensor()
    if rank == 1:
        torch.rand(1) if how == "a draw of its own" else torch.manual_seed(7)
    x = shardwise.rand(5, 3, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises(CommError, match=r"different random numbers.*Seed all ranks alike"):
        x.full_tensor()
    return before


@pytest.mark.parametrize("how", ["a draw of its own", "another seed"])
@pytest.mark.parametrize("draws", [8, 9, 21])
def test_drift(draws, how):
    first, second = run_ranks(drifts, 2, draws, how)
    assert torch.equal(first, second)
