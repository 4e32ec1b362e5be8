"""data_parallel where parameters are looked at and written in odd ways, and backward passes are not the usual one."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, RankTensor, distribute_tensor, simulate
from shardwise.errors import AutogradError, LayoutError
from shardwise.experimental import implicit_replication
from shardwise.parallel.data import SHARDS, data_parallel
from tests.parallel.data_net import BATCH, batch, equal, feed, own_part, run_checks
from tests.tensor.common import same
from tests.workers import device_mesh, run_ranks


def tanh_net(kind=nn.Linear):
    torch.manual_seed(0)
    return nn.Sequential(kind(4, 7), nn.Tanh(), kind(7, 3)).double()


def rows_of(step=0):
    return torch.randn(BATCH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def each(value):
    return list(value.ranks) if isinstance(value, RankTensor) else [value]


def both(mesh, shard, program):
    """Gradients after `program(model, inputs)` on one device and data parallel."""
    want, model = tanh_net(), data_parallel(tanh_net(), mesh["dp"], shard, unit_bytes=0)
    program(want, rows_of())
    program(model, own_part(rows_of(), mesh["dp"]))
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert isinstance(p, DTensor), f"{name} {shard}"
        same(p.grad, q.grad, f"gradient of {name} {shard}")


def freed_leaves(mesh):
    """What stood in for a parameter says so once its memory is gone; the parameter itself works on what is kept."""
    for typed in (False, True):
        model = data_parallel(tanh_net(), mesh["dp"], "parameters", unit_bytes=0)
        taken = []
        model[0].register_forward_pre_hook(lambda module, args, taken=taken: taken.append(module.weight))
        model(feed(rows_of(), mesh["dp"], typed)).square().mean().backward()
        leaf = taken[0]
        assert "memory is given back" in str(leaf) and leaf.shape == (7, 4) and leaf.numel() == 28
        for use in (
            torch.sum, copy.deepcopy, pickle.dumps, torch.clone, lambda t: t[0], lambda t: t + 1, lambda t: 1 + t,
            lambda t: t.data.sum(), lambda t: t.detach().sum(), lambda t: torch.stack([t]), lambda t: t.tolist(),
            lambda t: F.linear(input=torch.zeros(1, 4, dtype=t.dtype), weight=t),
        ):  # fmt: skip
            with pytest.raises(AutogradError, match="read the module's own parameter"):
                use(leaf)
        model(feed(rows_of(), mesh["dp"], typed))
        for name, p in model.named_parameters():
            assert "DTensor" in repr(p) and "DTensor" in repr(p.grad) and name
            same(copy.deepcopy(p), p.full_tensor().detach())
            same(p.sum(), p.full_tensor().detach().sum())
            assert pickle.loads(pickle.dumps(p.grad)).numel() == p.data.numel()


def lent_parameters(mesh):
    """A unit whose output is a view of its parameter."""

    class Lender(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight, self.bias), self.weight.t()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Lender(4, 3)])

        def forward(self, x):
            y, weight = self.layers[0](x)
            return y.square().mean() + weight.square().sum()

    for shard in SHARDS:
        torch.manual_seed(0)
        want = Both().double()
        model = data_parallel(copy.deepcopy(want), mesh["dp"], shard, unit_bytes=0)
        want(rows_of()).backward()
        model(own_part(rows_of(), mesh["dp"])).backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, shard)


def written_through_data(mesh):
    """What is written through .data has no version, and is used all the same."""

    def adds(model, x):
        model(x)
        for p in model.parameters():
            p.data.add_(0.5)
        model(x).square().mean().backward()

    def replaces(model, x):
        model(x)
        for p in model.parameters():
            p.data = p.data * 2
        model(x).square().mean().backward()

    def held_before(model, x):
        held = [p.data for p in model.parameters()]
        model(x)
        for data in held:
            data[0].mul_(3)
        model(x).square().mean().backward()

    for shard in SHARDS:
        both(mesh, shard, adds)
        both(mesh, shard, replaces)
        both(mesh, shard, held_before)


def changed_parameters(mesh):
    """Parameters that were cast or replaced after data_parallel are taken up, or an error says what is wrong."""

    def replaces(model, x):
        model(x)
        model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
        model(x).square().mean().backward()

    for shard in SHARDS:
        both(mesh, shard, replaces)
        want, model = tanh_net().float(), data_parallel(tanh_net(), mesh["dp"], shard, unit_bytes=0)
        model(own_part(rows_of(), mesh["dp"])).square().mean().backward()
        model.zero_grad()
        model.float()
        for m, x in ((want, rows_of().float()), (model, own_part(rows_of().float(), mesh["dp"]))):
            m(x).square().mean().backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        model = data_parallel(tanh_net(), mesh["dp"], shard, unit_bytes=0)
        model[0].weight = nn.Parameter(torch.zeros(7, 4))
        with pytest.raises(LayoutError, match="'weight' of shape .* replaced by a tensor that is not distributed"):
            model(own_part(rows_of(), mesh["dp"]))
        model = data_parallel(tanh_net(), mesh["dp"], shard, unit_bytes=0)
        model[0].weight = nn.Parameter(distribute_tensor(torch.zeros(7, 4), mesh["tp"]))
        with pytest.raises(LayoutError, match="'weight' of shape .* was replaced by one of shape"):
            model(own_part(rows_of(), mesh["dp"]))
        if mesh["dp"].size() > 1:
            model = data_parallel(tanh_net(), mesh["dp"], shard, unit_bytes=0)
            loss = model(own_part(rows_of(), mesh["dp"])).square().mean()
            model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
            with pytest.raises(AutogradError, match="between the forward and the backward pass"):
                loss.backward()
            with model.no_sync():
                model(own_part(rows_of(), mesh["dp"])).square().mean().backward()
            model.float()
            with pytest.raises(LayoutError, match="gradients of it wait"):
                model(own_part(rows_of().float(), mesh["dp"]))


def batches_of_two_kinds(mesh):
    """An evaluation on DTensors between the forward and the backward of a plain batch, and the other way round."""
    for shard, typed in itertools.product(SHARDS, (False, True)):
        want, model = tanh_net(), data_parallel(tanh_net(), mesh["dp"], shard, unit_bytes=0)
        want(rows_of()).square().mean().backward()
        loss = model(feed(rows_of(), mesh["dp"], typed)).square().mean()
        with torch.no_grad():
            model(feed(rows_of(1), mesh["dp"], not typed))
        loss.backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, f"{shard} {typed}")


def fused_steps(mesh):
    """torch's fused kernels write without a new version; gathered copies are made anew all the same."""
    for shard in SHARDS:
        want, model = tanh_net(), data_parallel(tanh_net(), mesh["dp"], shard, unit_bytes=0)
        for m, x in ((want, rows_of()), (model, own_part(rows_of(), mesh["dp"]))):
            optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
            for _ in range(3):
                optimizer.zero_grad()
                m(x).square().mean().backward()
                optimizer.step()
        equal(model, want, shard)


def odd_passes(mesh):
    """Several passes over one graph, passes that fail, and forwards that are given up."""

    def twice(model, x):
        out = model(x)
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward()

    def two_forwards(model, x):
        one, other = model(x), model(x * 2)
        other.sin().mean().backward()
        one.square().mean().backward()

    def after_inference(model, x):
        with torch.inference_mode():
            model(x)
        model(x).square().mean().backward()

    def after_a_failure(model, x):
        def fail(grad):
            raise ValueError("in the backward pass")

        out = model[0](x)
        out.register_hook(fail)
        with pytest.raises(ValueError, match="in the backward pass"):
            model[2](torch.tanh(out)).square().mean().backward()
        model.zero_grad()
        model(x).square().mean().backward()

    def after_an_interrupt(model, x):
        def interrupt(*_):
            raise KeyboardInterrupt

        handle = model[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()
        model(x).square().mean().backward()

    for shard in SHARDS:
        for program in (twice, two_forwards, after_inference, after_a_failure, after_an_interrupt):
            both(mesh, shard, program)


def second_order(mesh):
    """The gradient of a gradient with respect to the inputs, taken outside and inside of the forward."""

    def penalty(model, x):
        parts = [part.clone().requires_grad_() for part in each(x)]
        outs = each(model(RankTensor(parts) if isinstance(x, RankTensor) else parts[0]))
        slopes = torch.autograd.grad([out.square().sum() for out in outs], parts, create_graph=True)
        losses = [out.square().mean() + slope.square().mean() for out, slope in zip(outs, slopes, strict=True)]
        torch.autograd.backward(losses)

    for shard in SHARDS:
        both(mesh, shard, penalty)


def slopes_inside(mesh):
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.scale = tanh_net(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
            return slope * self.scale

    for shard in SHARDS:
        want, model = Force(), data_parallel(Force(), mesh["dp"], shard, unit_bytes=0)
        want(rows_of()).square().mean().backward()
        model(own_part(rows_of(), mesh["dp"])).square().mean().backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, shard)


def shared_by_reentrant_checkpoints(mesh):
    """Such a parameter gets its gradient in several parts: they add up, also where the first was sent before."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

        def forward(self, x):
            again = functools.partial(checkpoint, self.one, use_reentrant=True)
            return again(torch.tanh(again(torch.tanh(self.other(x)))))

    one = {"units": lambda name, module: name == "one"}
    for shard, units in (*((shard, {}) for shard in SHARDS), ("parameters", one)):
        want, model = Shared(), data_parallel(Shared(), mesh["dp"], shard, **units)
        want(rows_of()).square().mean().backward()
        model(own_part(rows_of(), mesh["dp"])).square().mean().backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, shard)


def gradients_asked_for(mesh):
    """A forward computes with other tensors than the parameters: asked for their gradients alone, autograd would say
    None, or zeros."""
    for shard in SHARDS:
        model = data_parallel(tanh_net(), mesh["dp"], shard)
        weight, unused = model[2].weight, model[0].weight
        for asked in ({}, {"allow_unused": True}, {"materialize_grads": True}):
            loss = model(own_part(rows_of(), mesh["dp"])).square().mean()
            with pytest.raises(AutogradError, match=r"parameter of shape \(3, 7\) belongs to a unit.*call backward\(\)"):
                torch.autograd.grad(loss, [weight], **asked)
        with pytest.raises(AutogradError, match=r"backward: the parameter"):
            torch.autograd.backward([loss], inputs=[weight])
        (slope,) = torch.autograd.grad(weight.square().sum(), weight)  # in this graph is the parameter itself
        same(slope, 2 * weight.detach().full_tensor(), shard)
        with implicit_replication():  # outside of the forward, with what is the same on all ranks
            part = model[2](torch.ones(2, 7, dtype=torch.float64)).sum()
        assert torch.autograd.grad(part, [unused], allow_unused=True) == (None,)


def sparse_gradients(mesh):
    for shard in SHARDS:
        torch.manual_seed(0)
        want = nn.Embedding(9, 3, sparse=True).double()
        model = data_parallel(copy.deepcopy(want), mesh["dp"], shard)
        want(batch()[0]).square().mean().backward()
        model(own_part(batch()[0], mesh["dp"])).square().mean().backward()
        same(model.weight.grad, want.weight.grad.to_dense(), shard)


CHECKS = [
    freed_leaves, lent_parameters, written_through_data, changed_parameters, batches_of_two_kinds, fused_steps, odd_passes,
    second_order, gradients_asked_for, sparse_gradients,
]  # fmt: skip
ON_PROCESSES = [*CHECKS, slopes_inside, shared_by_reentrant_checkpoints]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_simulated(check):
    check(simulate((4, 1), axis_names=("dp", "tp")))


def _on_ranks(rank, world_size):
    run_checks(device_mesh((world_size, 1), ("dp", "tp")), ON_PROCESSES)


def test_processes():
    run_ranks(_on_ranks, 2)
