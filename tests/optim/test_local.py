"""Elementwise optimizers step on local tensors by themselves; others never do."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor, simulate
from shardwise.errors import LayoutError, RuleError
from shardwise.optim.twin import ELEMENTWISE
from shardwise.testing.spread import spread_out
from tests.tensor.common import R, checked_on, on_one_axis, same, x

SHAPES = [(5, 4), (1, 6), (7,), ()]


def placements(mesh):
    return [on_one_axis(mesh, Shard(1)), [Shard(0)] * mesh.ndim, on_one_axis(mesh, Shard(0), -1), [R] * mesh.ndim]


def pairs(mesh):
    values = [x(*s, seed=i) for i, s in enumerate(SHAPES)]
    plain = [nn.Parameter(v.clone()) for v in values]
    return plain, [nn.Parameter(distribute_tensor(v, mesh, p)) for v, p in zip(values, placements(mesh), strict=True)]


def backward(params, step):
    for i, p in enumerate(params):
        ((p * (i + step + 1)).sin() * x(*p.shape, seed=step)).sum().backward()


def train(params, optimizer, steps=2, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step()


class Watch(torch.optim.Optimizer):
    """Sees what a step gets. Elementwise, with state and an option that it changes."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0})
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                self.seen.append(type(p))
                state = self.state[p]
                state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                p.sub_(state["sum"], alpha=group["lr"])


class Normed(Watch):
    """Not elementwise: it keeps one row of each matrix."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["row"] = p[:1].clone()


def on_local_tensors(mesh):
    plain, mine = pairs(mesh)
    theirs = Watch(plain)
    ours = shardwise.optim.local(Watch(mine), elementwise=True)
    train(plain, theirs)
    train(mine, ours)
    assert DTensor not in ours.seen and len(ours.seen) >= len(theirs.seen)
    for m, p in zip(mine, plain, strict=True):
        same(m, p)
        same(ours.state[m]["sum"], theirs.state[p]["sum"])
        assert ours.state[m]["sum"].placements == m.placements
    assert ours.param_groups[0]["count"] == theirs.param_groups[0]["count"] == 2


def same_without_asking(mesh):
    for make in sorted(ELEMENTWISE, key=lambda c: c.__name__):
        plain, mine = pairs(mesh)
        theirs, ours = make(plain, lr=0.01), make(mine, lr=0.01)
        train(plain, theirs)
        train(mine, ours)
        for m, p in zip(mine, plain, strict=True):
            same(m, p, make.__name__)
            assert set(ours.state[m]) == set(theirs.state[p]), make.__name__
            for key, value in theirs.state[p].items():
                mine_too = ours.state[m][key]
                assert isinstance(mine_too, DTensor) == (
                    isinstance(value, torch.Tensor) and key not in ("step", "mu_product", "eta", "mu")
                ), key
                if isinstance(mine_too, DTensor):
                    same(mine_too, value, f"{make.__name__} {key}")
                elif value is not None:
                    assert float(mine_too) == float(value), f"{make.__name__} {key}"


def state_in_another_layout(mesh):
    """A state dict whose tensors lie elsewhere: they come to their parameters."""
    plain, mine = pairs(mesh)
    theirs, ours = torch.optim.AdamW(plain, lr=0.1), torch.optim.AdamW(mine, lr=0.1)
    train(plain, theirs), train(mine, ours)
    saved = ours.state_dict()
    for state in saved["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].redistribute(placements=[Replicate()] * mesh.ndim)
    again = torch.optim.AdamW(mine, lr=0.1)
    again.load_state_dict(saved)
    train(plain, theirs, start=2), train(mine, again, start=2)
    for m, p in zip(mine, plain, strict=True):
        same(m, p)
        assert again.state[m]["exp_avg"].placements == m.placements


def things_change_between_steps(mesh):
    plain, mine = pairs(mesh)
    theirs, ours = torch.optim.AdamW(plain[:2], lr=0.1), torch.optim.AdamW(mine[:2], lr=0.1)
    for params, optimizer in ((plain, theirs), (mine, ours)):
        train(params, optimizer)
        optimizer.add_param_group({"params": params[2:], "lr": 0.3})
        train(params, optimizer, start=2)
        optimizer.state.clear()
        train(params, optimizer, start=4)
        optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"] * 2
        train(params, optimizer, start=6)
        params[0].data = params[0].data * 0.5
        train(params, optimizer, start=8)
    for m, p in zip(mine, plain, strict=True):
        same(m, p)


def plain_ones_beside(mesh):
    """Plain parameters in the same group, one without a gradient."""
    plain, mine = pairs(mesh)
    for params in (plain, mine):
        params += [nn.Parameter(x(3, seed=9)), nn.Parameter(x(2, seed=8))]
    theirs, ours = torch.optim.Adam(plain, lr=0.1, amsgrad=True), torch.optim.Adam(mine, lr=0.1, amsgrad=True)
    for _ in range(2):
        for params, optimizer in ((plain, theirs), (mine, ours)):
            optimizer.zero_grad()
            backward(params[:-1], 0)
            optimizer.step()
    assert mine[-1] not in ours.state
    for m, p in zip(mine, plain, strict=True):
        same(m, p)


def after_an_error(mesh):
    """A step that fails leaves the optimizer as it was."""
    _, mine = pairs(mesh)
    optimizer = torch.optim.AdamW(mine, lr=0.1)
    train(mine, optimizer)

    def closure():
        raise ValueError("no loss today")

    with pytest.raises(ValueError, match="no loss today"):
        optimizer.step(closure)
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    assert all(isinstance(p, DTensor) for p in optimizer.state)
    train(mine, optimizer)


def nothing_communicates(mesh):
    _, mine = pairs(mesh)
    optimizer = torch.optim.AdamW(mine, lr=0.1)
    backward(mine, 0)
    with shardwise.strict(), shardwise.debug.ledger() as log:
        optimizer.step()
    assert not list(log)


CHECKS = [
    on_local_tensors, same_without_asking, state_in_another_layout, things_change_between_steps, plain_ones_beside,
    after_an_error, nothing_communicates,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS, simulated=[(3,), (2, 2)])


def test_no_op_of_a_step_meets_a_distributed_tensor():
    mine = pairs(simulate(2))[1]
    optimizer = torch.optim.AdamW(mine)
    backward(mine, 0)
    before = shardwise.cache_info()["plans"]
    optimizer.step()
    assert shardwise.cache_info()["plans"] == before


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_refused(name):
    mesh = simulate(2)
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    with pytest.raises(RuleError, match=f"{name} .* must not be stepped on local tensors"):
        shardwise.optim.local(getattr(torch.optim, name)([weight]), elementwise=True)


def test_unknown_ones_are_asked_about():
    mesh = simulate(2)
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    with pytest.raises(RuleError, match="elementwise=True"):
        shardwise.optim.local(Watch([weight]))
    with pytest.raises(RuleError, match="got int"):
        shardwise.optim.local(3)
    optimizer = shardwise.optim.local(Normed([weight]), elementwise=True)
    weight.sum().backward()
    with pytest.raises(LayoutError, match="'row' has shape .* not elementwise"):
        optimizer.step()


def test_subclasses_step_as_they_are():
    class Mine(torch.optim.AdamW):
        def step(self, closure=None):
            assert all(isinstance(p, DTensor) for p in self.param_groups[0]["params"])

    mine = pairs(simulate(2))[1]
    train(mine, Mine(mine))


def test_parts_of_a_sum():
    """A parameter whose value is a pending sum: stepping its parts would go further for every rank."""
    mesh = simulate(2)
    plain = nn.Parameter(x(4, 3))
    mine = nn.Parameter(spread_out(x(4, 3), mesh, [shardwise.Partial()]))
    with pytest.raises(LayoutError, match="parts of a sum"):
        shardwise.optim.local(torch.optim.SGD([mine], lr=0.1))
    for p in (plain, mine):
        train([p], torch.optim.SGD([p], lr=0.1))
    same(mine, plain)


def test_a_partial_gradient_is_summed():
    mesh = simulate(2)
    mine = nn.Parameter(distribute_tensor(x(4, 3), mesh, [Replicate()]))
    mine.grad = spread_out(x(4, 3), mesh, [shardwise.Partial()])
    torch.optim.SGD([mine], lr=0.5).step()
    assert mine.grad.placements == (Replicate(),)
    same(mine, x(4, 3) / 2)


def test_copies_and_clean_up():
    mine = pairs(simulate(2))[1]
    optimizer = torch.optim.AdamW(mine)
    train(mine, optimizer)
    twin = copy.deepcopy(optimizer)
    assert all(isinstance(p, DTensor) for p in twin.param_groups[0]["params"])
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ref() is None


def test_differentiable_steps_are_left_alone():
    mesh = simulate(2)
    weight = distribute_tensor(x(4, 3), mesh, [Shard(0)])
    weight.grad = distribute_tensor(x(4, 3, seed=1), mesh, [Shard(0)])
    optimizer = torch.optim.SGD([weight], lr=0.1, differentiable=True)
    with pytest.raises(RuleError, match="differentiable"):
        shardwise.optim.local(optimizer)
    optimizer.step()
    same(weight, x(4, 3) - 0.1 * x(4, 3, seed=1))
