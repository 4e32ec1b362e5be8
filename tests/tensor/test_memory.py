"""Who shares memory: simulated ranks that hold different things never do, as processes never do."""

import sys

import pytest
import torch

from shardwise import DTensor, Partial, RankTensor, Replicate, Shard, distribute_tensor, simulate
from tests.tensor.common import locals_of

LINE, GRID = simulate(4), simulate((2, 2), axis_names=("dp", "tp"))
WHERE = {
    "shard": (LINE, [Shard(0)]),
    "partial": (LINE, [Partial()]),
    "partial max": (LINE, [Partial("max")]),
    "replicate": (LINE, [Replicate()]),
    "replicate, shard": (GRID, [Replicate(), Shard(0)]),
    "partial, replicate": (GRID, [Partial(), Replicate()]),
    "nested": (GRID, [Shard(0), Shard(0)]),
    "shard of a sub-mesh": (GRID["tp"], [Shard(0)]),
    "replicate on a sub-mesh": (GRID["tp"], [Replicate()]),
}
WRITES = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(3),
    "relu": lambda x: torch.nn.functional.relu(x.neg_(), inplace=True),
    "zero, fill": lambda x: x.fill_(7).sub_(1),
    "foreach": lambda x: torch._foreach_mul_([x], 3.0),
    "copy_": lambda x: x.copy_(x + 1),
}


def plain():
    return torch.full((2, 3), 2.0)


def separate():
    """What processes hold: a tensor of its own each."""
    return RankTensor([plain() for _ in range(4)])


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_takes_effect_once(write, where):
    for given in (plain(), RankTensor([plain()] * 4), RankTensor([plain().view(2, 3)] * 4)):
        x, want = DTensor.from_local(given, *WHERE[where]), DTensor.from_local(separate(), *WHERE[where])
        WRITES[write](x)
        WRITES[write](want)
        torch.testing.assert_close(list(x.to_local().ranks), list(want.to_local().ranks), rtol=0, atol=0)


@pytest.mark.parametrize("where", WHERE)
def test_an_optimizer_steps_once(where):
    found = []
    for given in (plain(), separate()):
        x = DTensor.from_local(given, *WHERE[where]).requires_grad_()
        optimizer = torch.optim.SGD([x], lr=0.5)
        x.pow(2).sum().backward()
        optimizer.step()
        found.append(x.detach().full_tensor())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("where", WHERE)
def test_the_gradient_of_a_plain_leaf_adds_up_over_the_ranks(where):
    leaf, leaves = plain().requires_grad_(), [plain().requires_grad_() for _ in range(4)]
    for given in (leaf, RankTensor(leaves)):
        x = DTensor.from_local(given, *WHERE[where])
        x.pow(3).sum().backward()
    # ranks that hold the same thing all have its gradient, but use the plain tensor once
    torch.testing.assert_close(leaf.grad, sum(each.grad for each in leaves) * len(locals_of(x)) / 4)


def test_ranks_that_hold_the_same_thing_are_one_tensor():
    x = plain()
    assert [v.data_ptr() for v in locals_of(DTensor.from_local(x, LINE, [Replicate()]))] == [x.data_ptr()]
    assert len(locals_of(DTensor.from_local(x, GRID, [Replicate(), Shard(0)]))) == 2


def test_memory_is_that_of_the_local_tensors():
    x, parts = plain(), torch.arange(8.0)
    values = locals_of(DTensor.from_local(x, LINE, [Shard(0)]))
    assert values[0].data_ptr() == x.data_ptr() and len({v.data_ptr() for v in values}) == 4
    laid = DTensor.from_local(RankTensor(list(parts.split(2))), LINE, [Shard(0)])  # one memory, but no element twice
    laid.mul_(2)
    torch.testing.assert_close(parts, torch.arange(8.0) * 2)


@pytest.mark.parametrize("mesh", [simulate(1), LINE], ids=str)
def test_a_gradient_that_the_program_holds_keeps_its_values(mesh, monkeypatch):
    monkeypatch.setattr(sys, "getrefcount", lambda _: 3)  # what counts of references mean differs between Pythons
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.1)
    (x * 2).sum().backward()
    held = x.grad
    optimizer.zero_grad()
    assert x.grad is None
    torch.testing.assert_close(held.full_tensor(), torch.full((4,), 2.0))
    (x * 5).sum().backward()
    assert x.grad is not held
    torch.testing.assert_close(
        (held.full_tensor(), x.grad.full_tensor()), (torch.full((4,), 2.0), torch.full((4,), 5.0))
    )
