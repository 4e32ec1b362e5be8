"""Whatever an elementwise optimizer keeps, it keeps when it is stepped on local tensors."""

import gc
import weakref

import pytest
import torch
from torch import nn

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor, simulate
from shardwise.errors import RuleError
from tests.tensor.common import checked_on, same, x


class Keeper(torch.optim.Optimizer):
    """Elementwise; keeps things in every place an optimizer has."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0})
        self.t, self.once, self.log, self.named = 0, True, [], {}
        self.rate = torch.ones(())
        self.scale = lr

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.t += 1
        self.last = self.t * 10
        if self.t == 2 and self.once:
            del self.once
        self.log.append(self.t)
        self.named["t"] = self.t
        self.rate.mul_(0.5)
        self.scale = self.scale * 0.9
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state["sums"] = {"of": self.t}
        if self.t == 3:
            del self.state["sums"]
        self.defaults["lr"] = 7.0
        group["count"] += 1
        group["new"] = self.t
        if self.t == 2:
            del group["count"]
            group["count"] = 100
        for p in group["params"]:
            state = self.state[p]
            if self.t == 1:
                state["first"] = torch.zeros_like(p)
            elif "first" in state:
                del state["first"]
            if self.t == 3:
                del self.state[p]
            p.sub_(p.grad * float(self.rate) * group["lr"], alpha=self.t)
        return loss


def both(mesh, make):
    values = [x(5, 4, seed=1), x(7, seed=2)]
    mine = [nn.Parameter(distribute_tensor(v, mesh, [Shard(0)] * mesh.ndim)) for v in values]
    plain = [nn.Parameter(v.clone()) for v in values]
    return (plain, make(plain)), (mine, shardwise.optim.local(make(mine), elementwise=True))


def grads(params, step):
    for i, p in enumerate(params):
        p.grad = None
        ((p * (i + step + 1)).sin() * x(*p.shape, seed=step)).sum().backward()


def everything_is_kept(mesh):
    (plain, theirs), (mine, ours) = both(mesh, Keeper)
    for step in range(4):
        for params, optimizer in ((plain, theirs), (mine, ours)):
            grads(params, step)
            optimizer.step()
        assert type(ours.rate) is torch.Tensor
        for name in ("t", "last", "log", "named", "scale", "rate", "defaults"):
            assert getattr(ours, name) == getattr(theirs, name), (step, name)
        assert hasattr(ours, "once") == hasattr(theirs, "once"), step
        assert [k for k in ours.state if isinstance(k, str)] == [k for k in theirs.state if isinstance(k, str)], step
        assert ours.state["steps"] == step + 1
        options = [{k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (ours, theirs)]
        assert options[0] == options[1], step
        for m, p in zip(mine, plain, strict=True):
            same(m, p, f"step {step}")
            assert (m in ours.state) == (p in theirs.state), step
            if m in ours.state:
                assert ours.state[m].keys() == theirs.state[p].keys(), step


def attributes_that_are_distributed(mesh):
    class Scaled(torch.optim.Optimizer):
        def __init__(self, params, scale):
            super().__init__(params, {"lr": scale.clone()})
            self.scale, self.other = scale, scale.clone()

        @torch.no_grad()
        def step(self, closure=None):
            self.scale.mul_(0.5)
            self.other = self.other * 3
            self.param_groups[0]["lr"].add_(1)
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * self.scale * self.param_groups[0]["lr"])

    weight = nn.Parameter(distribute_tensor(x(5, 4), mesh, [Shard(0)] * mesh.ndim))
    scale = distribute_tensor(torch.tensor(4.0), mesh, [Replicate()] * mesh.ndim)
    optimizer = shardwise.optim.local(Scaled([weight], scale), elementwise=True)
    plain = x(5, 4)
    for step in range(3):
        weight.grad = distribute_tensor(x(5, 4, seed=step), mesh, [Shard(0)] * mesh.ndim)
        optimizer.step()
        plain = plain - x(5, 4, seed=step) * (4.0 / 2 ** (step + 1)) * (5.0 + step)
    assert optimizer.scale is scale and float(scale.full_tensor()) == 0.5
    assert float(torch.as_tensor(optimizer.other)) == 108
    assert float(optimizer.param_groups[0]["lr"].full_tensor()) == 7
    same(weight, plain)


def hooks_and_closures(mesh):
    """A hook before the step, and a closure, may change what the step does; a hook after it sees what it did."""
    (plain, theirs), (mine, ours) = both(mesh, Keeper)
    seen = {}
    for params, optimizer in ((plain, theirs), (mine, ours)):
        told = seen[optimizer] = []

        def before(optimizer, args, kwargs):
            assert args[0] is optimizer
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.t += 3

        def after(optimizer, args, kwargs, told=told):
            told.append((optimizer.t, optimizer.param_groups[0]["count"], optimizer.state["steps"]))
            optimizer.t -= 3
            optimizer.param_groups[0]["lr"] *= 2

        def closure(params=params, optimizer=optimizer, told=told):
            told.append(("closure", optimizer.t))
            optimizer.param_groups[0]["lr"] *= 3
            optimizer.rate.fill_(0.25)
            optimizer.scale = 5.0
            grads(params, 1)
            return 3.0

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        for step in range(2):
            grads(params, step)
            optimizer.step()
            assert optimizer.step(closure) == optimizer.step(closure=closure) == 3.0
    assert seen[ours] == seen[theirs]
    assert (ours.t, ours.scale) == (theirs.t, theirs.scale)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    for m, p in zip(mine, plain, strict=True):
        same(m, p)


def subclasses_of_torchs(mesh):
    """Both steps are hooked by torch: the inner one runs on the local tensors already."""

    class Mine(torch.optim.AdamW):
        t = 0

        def step(self, closure=None):
            self.t += 1
            assert not any(isinstance(p, DTensor) for p in self.param_groups[0]["params"]) or self.t < 0
            return super().step(closure)

    (plain, theirs), (mine, ours) = both(mesh, torch.optim.AdamW)[0], both(mesh, Mine)[1]
    ours.register_step_post_hook(lambda *_: None)
    for step in range(3):
        for params, optimizer in ((plain, theirs), (mine, ours)):
            grads(params, step)
            optimizer.step()
    assert ours.t == 3
    for m, p in zip(mine, plain, strict=True):
        same(m, p)
        same(ours.state[m]["exp_avg"], theirs.state[p]["exp_avg"])


CHECKS = [everything_is_kept, attributes_that_are_distributed, hooks_and_closures, subclasses_of_torchs]
test_simulated, test_processes = checked_on(__name__, CHECKS, simulated=[(3,), (2, 2)])


class ByParameter(torch.optim.Optimizer):
    """Keeps momentum in an attribute, which no one can follow from a parameter to its local tensors."""

    def __init__(self, params, early):
        super().__init__(params, {})
        self.momentum = {p: torch.zeros_like(p) for p in self.param_groups[0]["params"]} if early else {}

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.momentum.setdefault(p, torch.zeros_like(p)).add_(p.grad)
            p.sub_(self.momentum[p])


def test_tensors_by_parameter_in_an_attribute():
    (_, _), (mine, early) = both(simulate(2), lambda params: ByParameter(params, early=True))
    grads(mine, 0)
    with pytest.raises(RuleError, match=r"ByParameter.momentum holds tensors for each parameter.*self.state\[param\]"):
        early.step()
    (plain, theirs), (mine, ours) = both(simulate(2), lambda params: ByParameter(params, early=False))
    for params, optimizer in ((plain, theirs), (mine, ours)):
        for step in range(2):
            grads(params, step)
            optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(x(3))]})
        optimizer.step()
    same(mine[0], plain[0])
    mine[0].data = mine[0].data.redistribute(placements=[Replicate()])  # its momentum would be lost
    grads(mine, 2)
    with pytest.raises(RuleError, match="ByParameter.momentum"):
        ours.step()


def test_a_scheduled_optimizer_dies():
    """A scheduler puts a bound `step` on the optimizer; nothing of the twin may keep it."""
    (_, _), (mine, optimizer) = both(simulate(2), Keeper)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    grads(mine, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    ref = weakref.ref(optimizer)
    del optimizer, scheduler
    gc.collect()
    assert ref() is None
