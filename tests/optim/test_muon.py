"""shardwise.optim.Muon equals torch.optim.Muon on one device."""

import pytest
import torch
from torch import nn

import shardwise
from shardwise import Replicate, Shard, distribute_tensor, simulate
from tests.tensor.common import checked_on, is_simulated, on_one_axis, same, x

R = Replicate()
SHAPES = [(8, 5), (5, 8), (1, 6), (6, 6), (3, 4), (7, 2)]


def placements(mesh):
    k = mesh.shape[0]
    return [
        [Shard(0)] * mesh.ndim, on_one_axis(mesh, Shard(1)), on_one_axis(mesh, Shard(0)), [R] * mesh.ndim,
        on_one_axis(mesh, Shard(0, sizes=[0] * (k - 1) + [3])), [Shard(0), *[Shard(1)] * (mesh.ndim - 1)],
    ]  # fmt: skip


def pairs(mesh, dtype=torch.float64):
    values = [x(*s, seed=i, dtype=dtype) for i, s in enumerate(SHAPES)]
    plain = [nn.Parameter(v.clone()) for v in values]
    mine = [nn.Parameter(distribute_tensor(v, mesh, p)) for v, p in zip(values, placements(mesh), strict=True)]
    return plain, mine


def give_gradients(params, step, mesh=None):
    for i, p in enumerate(params):
        grad = x(*p.shape, seed=100 * step + i, dtype=p.dtype)
        p.grad = grad if mesh is None else distribute_tensor(grad, mesh, p.placements)


def equals_torch(mesh):
    for options in ({}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "momentum": 0.8}):
        plain, mine = pairs(mesh)
        ours = shardwise.optim.Muon([{"params": mine[:3]}, {"params": mine[3:], "lr": 0.2}], lr=0.1, **options)
        theirs = torch.optim.Muon([{"params": plain[:3]}, {"params": plain[3:], "lr": 0.2}], lr=0.1, **options)
        for step in range(3):
            give_gradients(plain, step)
            give_gradients(mine, step, mesh)
            if step == 1:
                plain[1].grad = mine[1].grad = None
            ours.step()
            theirs.step()
        for i, (m, p) in enumerate(zip(mine, plain, strict=True)):
            same(m, p, f"parameter {i} with {options}")
            assert m.placements == distribute_tensor(torch.zeros(p.shape), mesh, placements(mesh)[i]).placements
            buffer = ours.state[m]["momentum_buffer"]
            assert buffer.placements == m.placements
            same(buffer, theirs.state[p]["momentum_buffer"])


def work_is_shared(mesh):
    """No rank orthogonalizes more than its share: equal matrices are dealt out one a rank."""
    k = mesh.size()
    mine = [nn.Parameter(distribute_tensor(x(4, 4, seed=i), mesh, [Shard(0)] * mesh.ndim)) for i in range(k)]
    optimizer = shardwise.optim.Muon(mine, lr=0.1)
    give_gradients(mine, 0, mesh)
    counted = []
    real = torch.optim.Muon.step
    torch.optim.Muon.step = lambda self, *a: counted.append(len(self.param_groups[0]["params"])) or real(self, *a)
    try:
        optimizer.step()
    finally:
        torch.optim.Muon.step = real
    assert counted == [k if is_simulated(mesh) else 1]


def state_dicts(mesh):
    plain, mine = pairs(mesh)
    ours, theirs = shardwise.optim.Muon(mine, lr=0.1), torch.optim.Muon(plain, lr=0.1)
    give_gradients(plain, 0), give_gradients(mine, 0, mesh)
    ours.step(), theirs.step()
    again = shardwise.optim.Muon(mine, lr=0.1)
    again.load_state_dict(ours.state_dict())
    give_gradients(plain, 1), give_gradients(mine, 1, mesh)
    again.step(), theirs.step()
    for m, p in zip(mine, plain, strict=True):
        same(m, p)


CHECKS = [equals_torch, work_is_shared, state_dicts]
test_simulated, test_processes = checked_on(__name__, CHECKS, simulated=[(3,), (2, 2)])


def test_bfloat16():
    mesh = simulate(2)
    plain, mine = pairs(mesh, torch.bfloat16)
    ours, theirs = shardwise.optim.Muon(mine, lr=0.1), torch.optim.Muon(plain, lr=0.1)
    give_gradients(plain, 0), give_gradients(mine, 0, mesh)
    ours.step(), theirs.step()
    for m, p in zip(mine, plain, strict=True):
        assert m.dtype == torch.bfloat16
        torch.testing.assert_close(
            m.detach().full_tensor(), p.detach(), rtol=2**-7, atol=2**-10
        )  # roundings of bfloat16


def test_plain_parameters_and_closures():
    value = x(4, 3)
    plain, mine = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    for p, make in ((plain, torch.optim.Muon), (mine, shardwise.optim.Muon)):
        optimizer = make([p], lr=0.1)

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = p.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
    same(mine, plain)


def test_only_matrices():
    mesh = simulate(2)
    with pytest.raises(ValueError, match="2D"):
        shardwise.optim.Muon([nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))])
