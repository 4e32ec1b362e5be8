"""Meshes of the same ranks that have process groups of their own: their tensors meet in one op."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, MeshError, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from tests.workers import run_ranks


def met(rank, world):
    one, other = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) for _ in range(2))
    a, b = torch.randn(5, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    x = distribute_tensor(a, one, [Shard(0), Replicate()]).requires_grad_()
    w = distribute_tensor(b, other, [Replicate(), Shard(0)]).requires_grad_()
    assert x._layout.mesh is not w._layout.mesh
    plain_x, plain_w = a.clone().requires_grad_(), b.clone().requires_grad_()
    got, want = F.linear(x, w).square().sum(), F.linear(plain_x, plain_w).square().sum()
    got.backward(), want.backward()
    for mine, plain in ((got, want), (x.grad, plain_x.grad), (w.grad, plain_w.grad)):
        torch.testing.assert_close(mine.full_tensor().detach(), plain.detach())
    assert w.grad._layout.mesh is w._layout.mesh and isinstance(got, DTensor)
    y = x.detach().clone()
    y += distribute_tensor(a, other, [Replicate(), Shard(1)])
    torch.testing.assert_close(y.full_tensor(), 2 * a)
    assert y._layout.mesh is x._layout.mesh
    third = init_device_mesh("cpu", (4,))
    with pytest.raises(MeshError, match="operands are on different meshes"):
        x + distribute_tensor(a, third, [Shard(0)])
    return True


def test_meshes_of_the_same_ranks_meet():
    assert all(run_ranks(met, 4))


def test_simulated_meshes_of_other_worlds_do_not():
    x, y = (distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for mesh in (simulate(2), simulate((2, 2))["1"]))
    with pytest.raises(MeshError, match="operands are on different meshes"):
        x + y
