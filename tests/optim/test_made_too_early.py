"""An optimizer that was made before a call replaced its parameters says so when it is stepped."""

import pytest
import torch
from torch import nn

from shardwise import distribute_module, materialize, simulate
from shardwise.errors import AutogradError
from shardwise.parallel import ColwiseParallel, data_parallel, parallelize_module
from shardwise.parallel.data import SHARDS

MESH = simulate(2, axis_names=("dp",))
CALLS = {
    "distribute_module": lambda model: distribute_module(model, MESH),
    "parallelize_module": lambda model: parallelize_module(model, MESH, {"0": ColwiseParallel()}),
    **{f"data_parallel {shard}": lambda model, shard=shard: data_parallel(model, MESH, shard) for shard in SHARDS},
}


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
@pytest.mark.parametrize("stepped", [False, True])
def test_step_raises(name, make, stepped):
    model = net()
    optimizer = make(model.parameters(), lr=0.1)
    if stepped:  # with gradients of before, that nobody has cleared
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step(lambda: torch.tensor(1.0))
    CALLS[name](model)
    with pytest.raises(AutogradError, match=rf"'0.weight' of shape \(4, 4\).* were replaced by {name.split()[0]}\(\)"):
        optimizer.step(lambda: torch.tensor(1.0))
    make(model.parameters(), lr=0.1).step(lambda: torch.tensor(1.0))


def test_materialize():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    distribute_module(model, MESH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    materialize(model)
    with pytest.raises(AutogradError, match=r"Make the optimizer after materialize\(\)"):
        optimizer.step()


def test_a_call_that_failed_replaced_nothing():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(name, module, mesh):
        if name == "2":
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        distribute_module(model, MESH, fail)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def test_a_parameter_that_another_module_trains():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    data_parallel(one, MESH)
    other(torch.ones(3, 4)).sum().backward()
    before = other.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(other.weight, before)


def test_parameters_added_later():
    model, old = net(), nn.Linear(2, 2)
    stale = list(old.parameters())
    data_parallel(model, MESH)
    data_parallel(old, MESH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": stale})
    with pytest.raises(AutogradError, match="2 of the 6 parameters"):
        optimizer.step()
