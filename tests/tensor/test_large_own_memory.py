"""Writes into tensors that share memory with what the call reads, too large to ask torch about them: where they lie
decides. Here all tensors count as large."""

import pytest
import torch

from shardwise import Shard, distribute_tensor, simulate, strict
from shardwise.testing.fuzz import Program, judge
from shardwise.testing.fuzz.judge import RIGHT
from tests.tensor.common import laid_out, same, x

READ_WHAT_THEY_WRITE = [
    "x1.sub_(x1[:, :1])",
    "x1[:, 1:].add_(x1[:, :-1])",
    "x1[1:].copy_(x1[:-1])",
    "x1.masked_scatter_(x1 > 0, x1)",
    "x1.view(-1)[::2].put_(torch.tensor([1, 0]), x1.view(-1)[::2][:2])",
    "x1[:, ::2].index_copy_(0, torch.tensor([1, 2]), x1[:2, ::2])",
    "x1[:, ::2].scatter_add_(0, torch.tensor([[1, 2], [2, 1]]), x1[:2, ::2])",
    "x1[:, ::2][torch.tensor([1, 2])] = x1[:2, ::2]",
    "x1.addcmul_(x1[:, :1], x1[:, 1:2])",
    "torch.add(x1[:, :1], x1, out=x1)",
    "torch._foreach_sub_([x1], [x1[:, :1]])",
    "x1.copy_(x1[:, 1:2].expand(5, 4))",
    "x1[:4].copy_(x1[:4].T)",
    "x1.view(4, 5).copy_(x1.T)",
    "torch.cumsum(x1, 0, out=x1)",
    "x1.mul_(x1)",
    "x1[:2].add_(x1[2:4])",
    "x1[:, :2].add_(x1[:, 2:])",
]
WITHOUT_COMMUNICATION = [
    lambda t: t.mul_(t),
    lambda t: t.addcmul_(t, t),
    lambda t: t[:, :2].add_(t[:, 2:]),
    lambda t: torch.add(t, t, out=t),
]


@pytest.fixture(autouse=True)
def all_count_as_large(monkeypatch):
    monkeypatch.setattr("shardwise.engine.overlap.LARGEST", 0)


@pytest.mark.parametrize(("mesh", "at"), [((2,), "Shard(dim=0)"), ((3,), "Shard(dim=1)"), ((2,), 'Partial("sum")')])
def test_values_are_those_of_torch(mesh, at):
    lines = [f"x1 = tensor((5, 4), seed=8, at=[{at}])", *READ_WHAT_THEY_WRITE]
    assert str(judge(Program(mesh, tuple(lines)))) == RIGHT


def test_windows_that_overlap_are_as_in_torch():
    lines = ["x1 = tensor((5, 4), seed=9, at=[Shard(dim=0)])", "x1.view(-1)[1:].add_(x1.view(-1)[:-1])"]
    assert str(judge(Program((2,), tuple(lines)))) == RIGHT


def test_the_plan_draws_random_numbers():
    """A draw in one memory would take the generator of each rank alone, and what ranks hold would differ."""
    with strict():
        for draw in (lambda t: t.bernoulli_(t), lambda t: torch.normal(t, t, out=t)):
            draw(distribute_tensor(torch.full((7, 3), 0.5), simulate(2), [Shard(0)]))


def test_elements_in_their_own_place_take_no_communication():
    for write in WITHOUT_COMMUNICATION:
        value = x(7, 4)
        tensor = laid_out(value, simulate(3), [Shard(0)])
        with strict():
            write(tensor)
        write(value)
        same(tensor, value)
