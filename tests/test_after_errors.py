"""A call that fails leaves what it was given as it was, and the next call works."""

import copy
import sys
from contextlib import suppress

import pytest
import torch
from torch import nn

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor, ones, simulate
from shardwise.context import of_thread
from shardwise.parallel import ColwiseParallel, data_parallel, fully_shard, parallelize_module

STATE = ("depth", "switched", "op", "replicating", "applying")


def net():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.LSTM(4, 4))
    made.register_forward_pre_hook(lambda module, args: None)
    return made


def tables(module):
    """Everything that a module and those in it have, by identity."""
    found = {}
    for path, one in module.named_modules():
        for key, value in vars(one).items():
            entries = list(value.items()) if isinstance(value, dict) else value
            is_flat = isinstance(value, list)
            found[path, key] = [(k, id(v)) for k, v in entries] if isinstance(value, dict) else entries
            found[path, key] = [id(v) for v in value] if is_flat else found[path, key]
    return found


def failing_after(monkeypatch, module, name, calls, error):
    real, count = getattr(module, name), iter(range(10**6))

    def sometimes(*args, **kwargs):
        if next(count) == calls:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, sometimes)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("calls", [0, 2, 5])
def test_distribute_module(monkeypatch, calls, error):
    module = net()
    before, values = tables(module), {name: p.clone() for name, p in module.state_dict().items()}
    with monkeypatch.context() as patch:
        failing_after(patch, shardwise.api, "distribute_tensor", calls, error)
        with pytest.raises(type(error)):
            distribute_module(module, simulate(2), input_fn=lambda mod, inputs, mesh: inputs)
    assert tables(module) == before
    assert all(torch.equal(p, values[name]) for name, p in module.state_dict().items())
    distribute_module(module, simulate(2))
    assert all(isinstance(p, DTensor) for p in module.parameters())


def test_a_partition_function_that_fails():
    module = net()
    before = tables(module)

    def partition(name, owner, mesh):
        if name == "2":
            raise KeyError("mine")
        for key, param in list(owner._parameters.items()):
            if param is not None and owner is not module:
                owner.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))

    with pytest.raises(KeyError):
        distribute_module(module, simulate(2), partition)
    assert tables(module) == before


class Fails(ColwiseParallel):
    def _apply(self, module, device_mesh):
        super()._apply(module, device_mesh)
        raise self.error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_parallelize_module(error):
    module, style = net(), Fails()
    before, style.error = tables(module), error
    with pytest.raises(type(error)):
        parallelize_module(module, simulate(2), {"0": ColwiseParallel(), "2": style})
    assert tables(module) == before


@pytest.mark.parametrize("where", ["_kept_value", "Unit", "DataParallel"])
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_data_parallel(monkeypatch, where, shard):
    module = net()
    before = tables(module)
    options = {"units": [module[0], module[2]]} if shard == "parameters" else {}
    with monkeypatch.context() as patch:
        inside = where == "_kept_value"
        home = shardwise.parallel.data.lay_out if inside else shardwise.parallel.data.setup
        failing_after(patch, home, where, 2 if inside else 0, ValueError("me"))
        with pytest.raises(ValueError, match="me"):
            data_parallel(module, simulate(2), shard, **options)
    assert tables(module) == before
    data_parallel(module[0], simulate(2), shard)
    assert module[0](torch.ones(3, 4)).shape == (3, 6)


def test_fully_shard(monkeypatch):
    module = net()
    fully_shard(module[0], mesh=simulate(2))
    before = tables(module)
    with monkeypatch.context() as patch:
        failing_after(patch, shardwise.parallel.data.lay_out, "_kept_value", 1, ValueError("me"))
        with pytest.raises(ValueError, match="me"):
            fully_shard(module, mesh=simulate(2))
    assert tables(module) == before
    fully_shard(module, mesh=simulate(2))
    assert module[0](torch.ones(3, 4)).shape == (3, 6)


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", ["start_move", "_add_gradient", "foreach_copy_"])
@pytest.mark.parametrize("shard", ["none", "gradients", "parameters"])
def test_a_training_step_of_data_parallel(monkeypatch, shard, where, error):
    """One that fails while parameters are gathered or gradients reduced; the next gives the right gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    module, x = copy.deepcopy(plain), torch.arange(24.0).view(6, 4) / 10
    data_parallel(module, simulate(2), shard, units=[module[0], module[2]] if shard == "parameters" else None)

    def step():
        module(distribute_tensor(x, next(module.parameters()).device_mesh, [Shard(0)])).square().sum().backward()

    step()
    gathers = where == "foreach_copy_"
    home = shardwise.parallel.data.leaves if gathers else shardwise.parallel.data.gradients
    for calls in range(2):
        module.zero_grad()
        with monkeypatch.context() as patch:
            failing_after(patch, home, where, calls, error)
            with suppress(type(error)):  # such a call may not come here
                step()
        module.zero_grad()
        plain.zero_grad()
        step()
        plain(x).square().sum().backward()
        for mine, its in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), its.grad)


# -- calls ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [RuntimeError("while planning"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_a_rule_that_fails_while_planning(monkeypatch, error):
    shardwise.clear_caches()
    x = distribute_tensor(torch.ones(7), simulate(2), [Shard(0)])
    state = {name: getattr(of_thread, name) for name in STATE}
    size = shardwise.cache_info()["plans"].currsize
    with monkeypatch.context() as patch:
        failing_after(patch, shardwise.engine.planner, "build_plan", 0, error)
        with pytest.raises(type(error)):
            torch.special.erfcx(x)
    assert shardwise.cache_info()["plans"].currsize == size
    assert {name: getattr(of_thread, name) for name in STATE} == state
    torch.testing.assert_close(torch.special.erfcx(x).full_tensor(), torch.special.erfcx(torch.ones(7)))


def test_a_hook_that_fails_in_backward():
    x = distribute_tensor(torch.arange(6.0), simulate(2), [Shard(0)]).requires_grad_()
    y = x * 2
    fails = [True]

    def hook(grad):
        if fails.pop():
            raise KeyError("mine")

    y.register_hook(hook)
    z = y.redistribute(placements=[Replicate()]).square().sum()
    state = {name: getattr(of_thread, name) for name in STATE}
    with shardwise.debug.ledger() as log:
        with pytest.raises(KeyError):
            z.backward(retain_graph=True)
        assert x.grad is None and {name: getattr(of_thread, name) for name in STATE} == state
        fails.append(False)
        z.backward()
    assert torch.equal(x.grad.full_tensor(), 8 * torch.arange(6.0)) and log is not None
    (x.detach() + 1).redistribute(placements=[Replicate()])


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=lambda m: m.__name__)
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_an_optimizer_step_that_fails(monkeypatch, make, hooked, error):
    plain = nn.Parameter(torch.arange(6.0))
    param = nn.Parameter(distribute_tensor(torch.arange(6.0), simulate(2), [Shard(0)]))
    mine, want = make([param], lr=0.1), make([plain], lr=0.1)
    if hooked:
        mine.register_step_post_hook(lambda *args: None)

    def loss(p, optimizer, fails=False):
        optimizer.zero_grad()
        out = p.square().sum()
        out.backward()
        if fails:
            raise error
        return out

    mine.step(lambda: loss(param, mine)), want.step(lambda: loss(plain, want))
    before = param.detach().clone()
    with pytest.raises(type(error)):
        mine.step(lambda: loss(param, mine, True))
    name = "sgd" if make is torch.optim.SGD else "adam"
    with monkeypatch.context() as patch:
        failing_after(patch, sys.modules[f"torch.optim.{name}"], name, 0, error)
        with pytest.raises(type(error)):
            mine.step()
    assert torch.equal(param.detach().full_tensor(), before.full_tensor())
    assert mine.param_groups[0]["params"] == [param] and all(isinstance(k, DTensor) for k in mine.state)
    for _ in range(3):
        mine.step(lambda: loss(param, mine)), want.step(lambda: loss(plain, want))
    torch.testing.assert_close(param.detach().full_tensor(), plain.detach())
    assert isinstance(mine.state_dict()["state"].get(0, {}).get("exp_avg", param), DTensor)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_contexts_and_calls(error):
    x = ones(4, device_mesh=simulate(2), placements=[Shard(0)])
    state = {name: getattr(of_thread, name) for name in STATE}
    cap = shardwise.move.limit.of_thread.cap

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise error

    def inside():
        asked = shardwise.strict(), shardwise.experimental.implicit_replication(), shardwise.random.use("torch")
        with asked[0], asked[1], asked[2], simulate(3), torch.autocast("cpu", dtype=torch.bfloat16):
            Fails.apply(x.clone().requires_grad_())

    with pytest.raises(type(error)):
        inside()
    assert {name: getattr(of_thread, name) for name in STATE} == state
    assert shardwise.move.limit.of_thread.cap == cap and shardwise.random.generator.stream() == "philox"
    assert not torch.is_autocast_enabled("cpu") and shardwise.simulated_mesh.active_mesh() is None
    assert (x + 1).sum().item() == 8
