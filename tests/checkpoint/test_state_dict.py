"""State dicts of models and optimizers, whole or cut, as torch.distributed.checkpoint.state_dict gives and takes them."""

import copy

import pytest
import torch
from torch import nn

from shardwise import DTensor, distribute_module, simulate
from shardwise.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardwise.parallel import ColwiseParallel, RowwiseParallel, data_parallel, parallelize_module
from tests.workers import device_mesh, run_ranks

FULL = StateDictOptions(full_state_dict=True)
OFFLOADED = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """Uneven sizes, a tied weight, a buffer, a scalar, a module of an awkward name, and a parameter nobody lays out."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.state = nn.Linear(5, 5)
        self.again = self.state
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x):
        return self.state(self.down(self.up(x).relu())) * self.scale


def plain(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def laid_out(mesh, seed=0):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if hasattr(mesh, "get_coordinate"):
        return data_parallel(parallelize_module(plain(seed), mesh["tp"], plan), mesh["dp"], "parameters")
    return distribute_module(parallelize_module(plain(seed), mesh, plan, axis="tp"), mesh)


def trained(model, steps=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    more(model, optimizer, steps)
    return optimizer


def more(model, optimizer, steps=1):
    for i in range(steps):
        rows = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        output = model(rows)
        optimizer.zero_grad()
        getattr(output, "full_tensor", lambda: output)().square().mean().backward()  # noqa: B023
        optimizer.step()


def same(one, other):
    """Whether two trees of dicts hold equal numbers in the same places."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) is torch.Tensor and torch.allclose(one, other, rtol=0, atol=1e-12)
    return one == other


def there_and_back(mesh, first):
    """Everything whole equals one device's, and what is set goes on as one device does."""
    one, many = plain(), laid_out(mesh)
    of_one, of_many = trained(one), trained(many)
    want = copy.deepcopy(get_state_dict(one, of_one, options=FULL))
    got = get_state_dict(many, of_many, options=FULL)
    assert same(want[0], got[0]) and same(want[1], got[1])
    assert same(get_model_state_dict(many, options=FULL), want[0])
    flat = get_optimizer_state_dict(many, of_many, options=FLAT)
    assert same(flat, get_optimizer_state_dict(one, of_one, options=FLAT)) and "state.up.weight.exp_avg" in flat
    offloaded = get_model_state_dict(many, options=OFFLOADED)
    assert same(offloaded, want[0]) if first else offloaded == {}
    cut = get_model_state_dict(many)
    assert all(isinstance(cut[name], DTensor) for name in ("up.weight", "down.weight"))

    more(one, of_one, 2)
    for options, given in ((FULL, want), (FROM_0, want if first else ({}, {}))):
        other = laid_out(mesh, seed=1)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.3)
        names = {"model_state_dict": copy.deepcopy(given[0]), "optim_state_dict": copy.deepcopy(given[1])}
        set_state_dict(other, optimizer, **names, options=options)
        assert other.up.weight.placements == many.up.weight.placements
        assert isinstance(optimizer.state[other.up.weight]["exp_avg"], DTensor)
        more(other, optimizer, 2)
        assert same(get_model_state_dict(other, options=FULL), get_model_state_dict(one))
    again = laid_out(mesh, seed=2)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.3)
    set_optimizer_state_dict(again, optimizer, copy.deepcopy(flat), options=FLAT)
    assert same(get_optimizer_state_dict(again, optimizer, options=FLAT), flat)
    return True


def on_rank(rank, world_size):
    return there_and_back(device_mesh((2, 2), ("dp", "tp")), rank == 0)


def test_on_processes():
    assert run_ranks(on_rank, 4) == [True] * 4


def test_simulated():
    assert there_and_back(simulate((2, 2), axis_names=("dp", "tp")), first=True)


def test_parts_may_be_missing():
    model = laid_out(simulate((2, 2), axis_names=("dp", "tp")))
    loose = StateDictOptions(full_state_dict=True, strict=False)
    result = set_model_state_dict(model, {"up.bias": torch.ones(7, dtype=torch.float64)}, options=loose)
    assert torch.equal(model.up.bias.full_tensor(), torch.ones(7).double()) and "down.weight" in result.missing_keys


def test_what_rank_0_hands_round_is_whole():
    with pytest.raises(ValueError, match="full_state_dict must be True when broadcast_from_rank0"):
        set_model_state_dict(plain(), {}, options=StateDictOptions(broadcast_from_rank0=True))
