"""Hooks on the parameters of a data-parallel module: once per backward pass, with the reduced gradient."""

import copy
import itertools

import pytest
import torch
from torch import nn

from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor, simulate
from shardwise.errors import LayoutError
from shardwise.parallel.data import SHARDS, data_parallel
from tests.parallel.data_net import BATCH, batch, build, feed, loss_of, own_part, run_checks, stepped_in_backward
from tests.tensor.common import same
from tests.workers import device_mesh, run_ranks


def inputs(mesh, typed, step=0):
    return [feed(v, mesh["dp"], typed) for v in batch(step)]


def watch(model):
    """What hooks on each parameter see, before and after accumulation."""
    seen, after = {}, {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.detach().clone()))
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: after.setdefault(name, []).append(p.grad.detach().clone())
            )
    return seen, after


def seen_gradients(mesh):
    """A hook sees the gradient of this pass, one after accumulation the sum of all."""
    want = build()
    loss_of(want, *batch()).backward()
    first = [None if p.grad is None else p.grad.clone() for p in want.parameters()]
    loss_of(want, *batch(1)).backward()
    for shard, typed in itertools.product(SHARDS, (False, True)):
        model = data_parallel(build(), mesh["dp"], shard, unit_bytes=0)
        seen, after = watch(model)
        for step in range(2):
            loss_of(model, *inputs(mesh, typed, step)).backward()
        for (name, p), one, q in zip(model.named_parameters(), first, want.parameters(), strict=True):
            if q.grad is None:
                assert name not in seen and name not in after, f"{name} {shard}"
                continue
            assert len(seen[name]) == len(after[name]) == 2, f"{name} {shard} {typed}"
            assert all(isinstance(grad, DTensor) for grad in seen[name])
            same(seen[name][0], one, name)
            same(seen[name][1], q.grad - one, name)
            same(after[name][0], one, name)
            same(after[name][1], q.grad, name)
            same(p.grad, q.grad, name)


def replaced_gradients(mesh):
    """What a hook returns is the gradient; a hook that was removed does nothing."""
    want = build()
    loss_of(want, *batch()).backward()
    for shard in SHARDS:
        model = data_parallel(build(), mesh["dp"], shard, unit_bytes=0)
        p, q = model.first.weight, want.first.weight
        p.register_hook(lambda grad: grad * 3)
        p.register_hook(lambda grad: grad + 1)
        removed = p.register_hook(lambda grad: grad * 100)
        removed.remove()
        gone = p.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
        gone.remove()
        loss_of(model, *inputs(mesh, False)).backward()
        same(p.grad, q.grad * 3 + 1, shard)


def optimizer_in_backward(mesh):
    want = stepped_in_backward(build())
    for step in range(3):
        loss_of(want, *batch(step)).backward()
    for shard, typed in itertools.product(SHARDS, (False, True)):
        model = stepped_in_backward(data_parallel(build(), mesh["dp"], shard, unit_bytes=0))
        for step in range(3):
            loss_of(model, *inputs(mesh, typed, step)).backward()
        for (name, p), q in zip(model.named_parameters(), want.named_parameters(), strict=True):
            same(p, q[1], f"{name} {shard} {typed}")
            assert p.grad is None


def accumulation(mesh):
    """Under no_sync nothing is there to see; the pass that reduces shows everything, and may be stepped on."""
    want = build()
    for step in range(2):
        loss_of(want, *batch(step)).backward()
    for shard in SHARDS:
        model = data_parallel(build(), mesh["dp"], shard, unit_bytes=0)
        seen = []
        weight = model.first.weight
        weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.detach().clone()))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
        if mesh["dp"].size() > 1:
            with model.no_sync():
                loss_of(model, *inputs(mesh, False)).backward()
            assert not seen
            loss_of(model, *inputs(mesh, False, 1)).backward()
            assert len(seen) == 1
            same(seen[0], want.first.weight.grad, shard)
            same(weight, want.first.weight - 0.1 * want.first.weight.grad, shard)


def copies(mesh):
    """A deep copy has no hooks of the original, as in torch."""
    model = data_parallel(build(), mesh["dp"], "parameters", unit_bytes=0)
    seen = []
    model.scale.register_post_accumulate_grad_hook(seen.append)
    twin = copy.deepcopy(model)
    loss_of(twin, *inputs(mesh, False)).backward()
    assert not seen and twin.scale.grad is not None


CHECKS = [seen_gradients, replaced_gradients, optimizer_in_backward, accumulation, copies]


@pytest.mark.parametrize("shape", [(4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_simulated(check, shape):
    check(simulate(shape, axis_names=("dp", "tp")))


def _on_ranks(rank, world_size):
    run_checks(device_mesh((world_size, 1), ("dp", "tp")), CHECKS)


def test_processes():
    run_ranks(_on_ranks, 2)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
def test_on_top_of_tensor_parallel(shape):
    """Hooks of parameters that another axis cuts, with one data rank and with several."""
    mesh = simulate(shape, axis_names=("dp", "tp"))
    for shard in SHARDS:
        torch.manual_seed(0)
        want = nn.Linear(4, 6).double()
        model = copy.deepcopy(want)

        def partition(name, module, mesh):
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))

        data_parallel(distribute_module(model, mesh["tp"], partition), mesh["dp"], shard)
        x = torch.randn(BATCH, 4, dtype=torch.float64)
        seen = []
        model.weight.register_hook(lambda grad, seen=seen: seen.append(grad.detach().clone()))
        model.weight.register_hook(lambda grad: grad * 2)
        for given in (distribute_tensor(x, mesh, [Shard(0), Replicate()]), _on_tp(x, mesh)):
            model.zero_grad(), want.zero_grad(), seen.clear()
            out = model(given)
            out.square().mean().backward()
            want(x).square().mean().backward()
            assert len(seen) == 1, shard
            same(seen[0], want.weight.grad, shard)
            same(model.weight.grad, want.weight.grad * 2, shard)


def _on_tp(x, mesh):
    return DTensor.from_local(own_part(x, mesh["dp"]), mesh["tp"], [Replicate()])


def test_hooks_of_before():
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: None)
    with pytest.raises(LayoutError, match="'weight' of shape .* has hooks .* register them afterwards"):
        data_parallel(model, simulate(2))
    assert type(model.weight) is nn.Parameter
