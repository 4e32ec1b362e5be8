"""The states of data parallelism: only the changes that are written down happen."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from shardwise import Shard, distribute_tensor, simulate
from shardwise.errors import AutogradError
from shardwise.parallel import fully_shard
from shardwise.parallel.data import SHARDS, data_parallel
from shardwise.parallel.data.gradients import GradBucket
from shardwise.parallel.data.states import GRADIENTS, MEMORY, USE, Gradients, Memory, State, Use
from tests.parallel.data_net import own_part
from tests.tensor.common import same

MACHINES = [(Use, USE), (Memory, MEMORY), (Gradients, GRADIENTS)]


@pytest.mark.parametrize(("states", "allowed"), MACHINES)
def test_every_change_is_allowed_or_raises(states, allowed):
    assert set(allowed) == set(states)
    for before, after in itertools.product(states, states):
        state = State("it", before, allowed)
        if after in allowed[before]:
            state.to(after)
            assert state.now is after
        else:
            with pytest.raises(AutogradError, match=f"it cannot become {after.value!r} while {before.value!r}"):
                state.to(after)
            assert state.now is before


def tanh_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch():
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_leaves_every_object_as_it_was(shard):
    mesh = simulate(4, axis_names=("dp",))
    model = data_parallel(tanh_net(), mesh, shard, unit_bytes=0)
    seen = []
    unit = model._data_parallel.units[0]
    unit.modules[0].register_forward_pre_hook(lambda *_: seen.append(unit.use.now))
    unit.modules[0].register_forward_hook(
        lambda module, args, out: (
            [v.register_hook(lambda grad: seen.append(unit.use.now)) for v in out.ranks[:1]] and None
        )
    )
    for _ in range(2):
        model(own_part(batch(), mesh)).square().mean().backward()
    assert seen == [Use.FORWARD, Use.BACKWARD] * 2
    for unit in model._data_parallel.units:
        assert unit.use.now is Use.IDLE
        assert all(bucket.state.now is Gradients.REDUCED for bucket in unit.buckets)
        kept = Memory.PARTS if shard == "parameters" else Memory.WHOLE
        if shard in ("none", "parameters"):
            assert all(group.memory.now is kept for group in unit.groups)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_backward_pass_after_one_that_failed(shard):
    """Of two losses, the backward pass of the first fails half-way; that of the second gives its gradients."""
    mesh = simulate(2, axis_names=("dp",))
    want, model = tanh_net(), data_parallel(tanh_net(), mesh, shard, unit_bytes=0)
    x = own_part(batch(), mesh)
    failing = []

    def fail(grad):
        if failing:
            raise RuntimeError("on purpose")

    model[1].register_forward_hook(lambda module, args, out: [v.register_hook(fail) for v in out.ranks] and None)
    first, second = model(x).square().mean(), model(x).square().mean()
    failing.append(True)
    with pytest.raises(RuntimeError, match="on purpose"):
        first.backward()
    failing.clear()
    second.backward()
    want(batch()).square().mean().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        same(p.grad, q.grad, shard)


def test_gradients_of_first_and_last_layers_take_no_room_in_between(monkeypatch):
    """One unit has both ends of the model: its matrix is made when the second end comes, after the unit in the middle."""
    packed = []
    pack = GradBucket._pack
    monkeypatch.setattr(GradBucket, "_pack", lambda self, *a: (packed.append(self), pack(self, *a))[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 6)).double()
    plain, mesh = copy.deepcopy(model), simulate((3,))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(6, 6, dtype=torch.float64)
    model(distribute_tensor(x, mesh, [Shard(0)])).square().mean().backward()
    plain(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    whole, middle = packed[-1], packed[0]
    assert middle is not whole and packed.index(whole) > max(i for i, bucket in enumerate(packed) if bucket is middle)


@pytest.mark.parametrize("shard", ["none", "gradients", "parameters"])
def test_a_module_that_is_gone_leaves_nothing_behind(shard):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    data_parallel(module, simulate(2), shard)
    kept, loss = list(module.parameters()), module(torch.ones(2, 4)).sum()
    gone = [weakref.ref(hook.func.__self__) for hook in module._forward_pre_hooks.values() if hasattr(hook, "func")]
    assert gone
    del module
    gc.collect()
    loss.backward()  # its graph keeps what it needs
    assert all(param.grad is not None for param in kept)
    del loss, kept
    gc.collect()
    assert not any(ref() for ref in gone)
