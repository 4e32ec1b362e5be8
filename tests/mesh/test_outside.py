"""Ranks that are not in a mesh run the same program: they hold nothing of its tensors, and calls do nothing there."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise import DTensor, MeshError, MoveError, Partial, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.mesh import as_mesh
from tests.tensor.common import same, x
from tests.workers import run_ranks

R = Replicate()


def is_outside(mesh):
    return as_mesh(mesh, outside=True).comm.outside


def agree(got, want, mesh, where=""):
    """The values of plain torch on the mesh's ranks, their sizes and no values on the others."""
    assert got.shape == want.shape and got.dtype == want.dtype, where
    if not is_outside(mesh):
        same(got, want, where)
    elif want.dim():
        assert got.to_local().shape == (0,) and got.full_tensor().numel() == 0, where
    else:
        assert got.to_local().item() == 0 and got.full_tensor().item() == 0, where


OPS = {
    "add": lambda t: t + 1, "mul": lambda t: t * t, "mm": lambda t: t @ t.t(), "sum": lambda t: t.sum(),
    "sum of a dim": lambda t: t.sum(0), "mean": lambda t: t.mean(), "max": lambda t: t.max(), "argmax": lambda t: t.argmax(),
    "softmax": lambda t: t.softmax(0), "view": lambda t: t.view(-1), "select": lambda t: t[1], "cat": lambda t: torch.cat([t, t]),
    "sort": lambda t: t.sort(0).values, "plain": lambda t: t + torch.ones(2, dtype=t.dtype), "t": lambda t: t.t().contiguous(),
    "cumsum": lambda t: t.cumsum(0), "like": torch.zeros_like, "std": lambda t: t.std(), "svd": lambda t: torch.linalg.svdvals(t),
    "where": lambda t: torch.where(t > 0, t, 0), "list": lambda t: torch._foreach_mul([t, t], 2.0)[1],
    "norm": lambda t: torch.linalg.vector_norm(t), "gelu": nn.functional.gelu, "flip": lambda t: t.flip(0),
}  # fmt: skip


def ops(mesh):
    value = x(5, 2)
    for places in ([Shard(0)], [R], [Shard(1)]):
        for name, op in OPS.items():
            agree(op(distribute_tensor(value, mesh, places)), op(value), mesh, f"{name} {places}")


def writes(mesh):
    for name in ("add_", "mul_", "fill_"):
        mine, want = distribute_tensor(x(5, 2), mesh, [Shard(0)]), x(5, 2)
        assert getattr(mine, name)(2) is mine
        agree(mine, getattr(want, name)(2), mesh, name)
    mine, want = distribute_tensor(x(5, 2), mesh, [Shard(0)]), x(5, 2)
    mine[1:3] = 7
    mine.t_()
    torch._foreach_add_([mine], 1.0)
    want[1:3] = 7
    agree(mine, want.t_() + 1, mesh)


def ways_in(mesh):
    agree(shardwise.zeros(5, 2, device_mesh=mesh, placements=[Shard(0)]), torch.zeros(5, 2), mesh)
    agree(DTensor.from_local(x(2, 2), mesh, [Shard(0)]), x(2, 2).repeat(2, 1), mesh)
    agree(DTensor.from_local(x(3, 2), mesh, [Partial()]), x(3, 2) * 2, mesh)
    torch.manual_seed(0)
    drawn = shardwise.randn(4, device_mesh=mesh, placements=[Shard(0)])
    nn.init.uniform_(drawn)
    torch.dropout(drawn, 0.5, True)
    after = torch.rand(()).item()  # the streams of all ranks have gone on alike
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, after)
    assert len(set(seen)) == 1
    agree(copy.deepcopy(distribute_tensor(x(3), mesh, [Shard(0)])), x(3), mesh)


def values_are_refused(mesh):
    mine = distribute_tensor(x(4), mesh, [Shard(0)])
    for ask in (
        lambda: mine.sum().item(),
        lambda: bool(mine.sum() > 0),
        mine.tolist,
        lambda: mine.nonzero(),
        lambda: mine[mine > 0],
    ):
        if is_outside(mesh):
            with pytest.raises(MeshError, match=r"outside of the mesh of ranks \[0, 2\]"):
                ask()
        else:
            ask()


def training(mesh):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    ours = distribute_module(copy.deepcopy(plain), mesh)
    steps = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, ours)]
    for _ in range(2):
        for module, optimizer, value in zip(
            (plain, ours), steps, (x(5, 2), distribute_tensor(x(5, 2), mesh, [Shard(0)]))
        ):
            optimizer.zero_grad()
            module(value).square().sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    for mine, want in zip(ours.parameters(), plain.parameters(), strict=True):
        agree(mine.detach(), want.detach(), mesh)
        agree(mine.grad, want.grad, mesh)


def moves_to_other_meshes(mesh):
    """All ranks take part in the move and in its gradient, whatever was computed before."""
    world = DeviceMesh("cpu", [0, 1, 2])
    leaf = distribute_tensor(x(5, 2), mesh, [Shard(0)]).requires_grad_()
    there = (leaf * 2).redistribute(world, [Shard(0)])
    same(there, x(5, 2) * 2)
    there.square().sum().backward()
    agree(leaf.grad, x(5, 2) * 8, mesh)
    guessed = leaf.detach().softmax(0)
    if is_outside(mesh):
        assert guessed._guessed and (guessed + 1)._guessed
        with pytest.raises(MoveError, match="known on this rank"):
            guessed.redistribute(world, [R])
    same(guessed.redistribute(placements=[Shard(0)]).redistribute(world, [R]), x(5, 2).softmax(0))


def checkpoints(mesh, path):
    state = {"w": distribute_tensor(x(5, 2), mesh, [Shard(0)]), "n": 3}
    dcp.save(state, checkpoint_id=path)
    into = {"w": distribute_tensor(torch.zeros(5, 2, dtype=torch.float64), mesh, [Shard(1)]), "n": 0}
    dcp.load(into, checkpoint_id=path)
    agree(into["w"], x(5, 2), mesh)
    assert into["n"] == 3


def lists_of_several_meshes(mesh):
    """A number of a mesh that this rank is not in is not known here."""
    world = DeviceMesh("cpu", [0, 1, 2])
    grads = [distribute_tensor(x(4), mesh, [Shard(0)]), distribute_tensor(x(3), world, [Shard(0)])]
    torch._foreach_mul_(grads, 2.0)
    agree(grads[0], x(4) * 2, mesh)
    same(grads[1], x(3) * 2)
    norms = torch._foreach_norm(grads)
    if is_outside(mesh):
        with pytest.raises(MeshError, match="one operand is a number on the mesh of ranks"):
            torch.stack(norms)


def on_ranks(rank, world_size, path):
    mesh = DeviceMesh("cpu", [0, 2])
    for check in (ops, writes, ways_in, values_are_refused, training, moves_to_other_meshes):
        check(mesh)
        dist.barrier()
    lists_of_several_meshes(mesh)
    checkpoints(mesh, path)


def test_processes(tmp_path):
    run_ranks(on_ranks, 3, str(tmp_path))
