"""Modules that are given one plain tensor share its way onto the mesh: one exchange, the same values and gradients."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import AutogradError, Replicate, Shard, debug, distribute_tensor, simulate
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from shardwise.parallel.styles import remembered
from tests.workers import device_mesh, run_ranks

WIDTH, HEADS = 6, 5  # nothing divides by 4


class Mixer(nn.Module):
    """Query, key and value of one input, and a way round them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS) for _ in range(3))
        self.out = nn.Linear(HEADS, WIDTH)

    def mix(self, y):
        return self.out(torch.tanh(self.q(y)) * self.k(y) + self.v(y))

    def forward(self, x):
        y = self.norm(x)
        return y * 2 + self.mix(y)


WHOLE = {name: ColwiseParallel() for name in "qkv"} | {"out": RowwiseParallel()}
CUT = {
    "norm": SequenceParallel(use_local_output=True),
    **{name: ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"},
    "out": RowwiseParallel(output_layouts=Shard(1)),
}


def mixer(seed=0):
    torch.manual_seed(seed)
    return Mixer().double()


def sample(rows=7):
    return torch.randn(3, rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def same(got, want, where=""):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10, msg=lambda m: f"{where}: {m}")


def check_gradients(model, plain):
    for (name, mine), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        same(whole(mine.grad), want.grad, name)


def kinds(log, backward):
    """What was exchanged on the way of the activations."""
    return [e.kind for e in log if e.backward == backward and e.op != "layer_norm" and e.reason != "sizes"]


def one_exchange_each_way(mesh):
    for freeze in (False, True):
        model, plain, x = mixer(), mixer(), sample()
        if freeze:  # nothing of a frozen layer is saved for the backward pass
            for layer in (model, plain):
                layer.q.requires_grad_(False)
        parallelize_module(model, mesh, WHOLE)
        with debug.ledger() as log:
            out = model(x)
            out.square().sum().backward()
        plain(x).square().sum().backward()
        same(whole(out), plain(x).detach())
        model.q.requires_grad_(), plain.q.requires_grad_()
        for (name, mine), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (want.grad is None), name
            if want.grad is not None:
                same(whole(mine.grad), want.grad, name)
        assert (kinds(log, False), kinds(log, True)) == (["all_reduce"], ["all_reduce"])


def cut_along_the_sequence(mesh):
    model, plain, x = mixer(), mixer(), sample()
    parallelize_module(model, mesh, CUT)
    laid = distribute_tensor(x, mesh, [Shard(1)])
    with debug.ledger() as log:
        model(laid).square().sum().backward()
    plain(x).square().sum().backward()
    check_gradients(model, plain)
    assert kinds(log, False) == ["all_gather", "reduce_scatter"]
    assert kinds(log, True) == ["all_gather", "reduce_scatter"], "not an all-reduce of which a part is kept"


def test_simulated():
    for ranks in (2, 4):
        one_exchange_each_way(simulate(ranks))


def test_sequence_simulated():
    for ranks in (2, 4, 8):
        cut_along_the_sequence(simulate(ranks))


def on_ranks(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    one_exchange_each_way(mesh)
    cut_along_the_sequence(mesh)
    recomputed(mesh)


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_processes(ranks):
    run_ranks(on_ranks, ranks)


def test_a_write_between_siblings():
    model, plain = (
        mixer().requires_grad_(False),
        mixer().requires_grad_(False),
    )  # else torch needs what was written over
    parallelize_module(model, simulate(4), dict.fromkeys("qkv", ColwiseParallel(output_layouts=Replicate())))

    def program(net):
        x = sample().requires_grad_()
        y = x * 1.5
        first = net.q(y).square().sum()
        y.mul_(2)
        first = first + net.k(y).square().sum()
        y.data = y.data * 3
        (first + net.v(y).square().sum()).backward()
        return x.grad

    same(program(model), program(plain))


def test_the_same_tensor_without_and_with_gradients():
    model, plain, x = mixer(), mixer(), sample()
    parallelize_module(model, simulate(2), WHOLE)
    with torch.no_grad():
        same(model(x), plain(x))
    y = model.norm(x)
    with torch.no_grad():
        assert not model.mix(y).requires_grad
    model.mix(y).square().sum().backward()
    with torch.no_grad():
        assert not model.mix(y).requires_grad
    plain.mix(plain.norm(x)).square().sum().backward()
    check_gradients(model, plain)


def test_nothing_outlives_its_tensor():
    for mesh in (simulate(4), simulate((2, 2), axis_names=("dp", "tp"))["tp"]):
        model = parallelize_module(mixer(), mesh, WHOLE)
        gc.collect()
        gc.disable()
        try:
            y = model.norm(sample())
            alive, memory = weakref.ref(y), weakref.ref(y.untyped_storage())
            out = model.mix(y)
            del y
            assert alive() is None, "the graph does not need it, so it is gone"
            del out
            assert memory() is None
        finally:
            gc.enable()


def test_only_so_many_are_remembered():
    """Which may not depend on the ones that are gone: a garbage collector runs when it likes, on every rank."""
    model = parallelize_module(mixer(), simulate(2), WHOLE)

    def reductions(between, keep):
        y, kept = model.norm(sample()), []
        first = model.q(y).sum()
        for _ in range(between):
            other = model.norm(sample())
            model.k(other)
            kept += [other] if keep else []
        with debug.ledger() as log:
            (first + model.v(y).sum()).backward()
        return len(kinds(log, True))

    for keep in (False, True):
        assert reductions(remembered.MOST - 1, keep) == 1
        assert reductions(remembered.MOST, keep) == 2


def recomputed(mesh):
    """Under checkpoint(), with the shared tensor inside and outside of what is computed again."""
    for inside in (False, True):
        model, plain = mixer(), mixer()
        parallelize_module(model, mesh, WHOLE)
        for net in (model, plain):
            x = sample().requires_grad_()
            out = checkpoint(*((net, x) if inside else (net.mix, net.norm(x))), use_reentrant=False)
            out.square().sum().backward()
        check_gradients(model, plain)


def test_recomputed():
    recomputed(simulate(4))


def test_threads_do_not_share():
    model = parallelize_module(mixer(), simulate(2), WHOLE)
    y = model.norm(sample())
    laid = []
    model.q.register_forward_pre_hook(lambda module, args: laid.append(args[0]))
    model.q(y)
    model.q(y)
    thread = threading.Thread(target=model.q, args=(y,))
    thread.start()
    thread.join()
    assert laid[0] is laid[1] and laid[0] is not laid[2]


def test_a_module_that_may_write_has_its_own():
    class Writes(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(WIDTH, HEADS), Writes(WIDTH, HEADS)]).double()
    plain = copy.deepcopy(layers)
    parallelize_module(layers, simulate(2), {"*": ColwiseParallel(output_layouts=Replicate())})
    grads = []
    for net in (layers, plain):
        x = sample().requires_grad_()
        y = x * 1.5
        (net[0](y * 1).sum() + net[1](y).square().sum() + y.square().sum()).backward()
        grads.append(x.grad)
    same(*grads)


def test_second_derivatives():
    grads = []
    for parallel in (False, True):
        model = mixer()
        if parallel:
            parallelize_module(model, simulate(4), WHOLE)
        x = sample().requires_grad_()
        (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), x)[0])
    same(*grads)


# ------------------------------------------------------------------ who watches a gradient


def watched(mesh, when):
    """A hook on what an attention gets: whole, from a cut sequence."""
    seen = []

    class Attention(Mixer):
        def forward(self, y):
            if when == "before":
                y.register_hook(lambda grad: seen.append(whole(grad)))
            out = self.mix(y)
            if when == "after":
                y.register_hook(lambda grad: seen.append(whole(grad)))
            if when == "kept after":
                y.retain_grad()
            if when == "asked for":
                torch.autograd.grad(out.sum(), y)
            return out

    torch.manual_seed(0)
    model = Attention().double()
    plan = WHOLE | {"": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())}
    parallelize_module(model, mesh, plan)
    x = distribute_tensor(sample(), mesh, [Shard(1)]).requires_grad_()
    with debug.ledger() as log:
        model(x).square().sum().backward()
    plain = mixer()
    y = sample().requires_grad_()
    plain.mix(y).square().sum().backward()
    same(whole(x.grad), y.grad)
    return seen, y.grad, kinds(log, True)


def test_a_hook_sees_the_whole_gradient():
    for ranks in (2, 4):
        seen, want, exchanged = watched(simulate(ranks), "before")
        assert exchanged == ["all_reduce"]
        same(seen[0], want)
        assert watched(simulate(ranks), None)[2] == ["reduce_scatter"], "nobody watches"


@pytest.mark.parametrize("when", ["after", "kept after", "asked for"])
def test_watching_too_late(when):
    with pytest.raises(AutogradError, match=r"the parts it was gathered from.* before its first use"):
        watched(simulate(2), when)


def watched_on_ranks(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    test = watched(mesh, "before")
    same(test[0][0], test[1])
    with pytest.raises(AutogradError, match="before its first use"):
        watched(mesh, "after")


def test_watching_on_processes():
    run_ranks(watched_on_ranks, 2)
