"""fully_shard on odd programs: tied parameters, modules that are called twice, other methods, casts, failures."""

import copy
import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, RankTensor, Shard, distribute_tensor, simulate
from shardwise.errors import LayoutError
from shardwise.parallel import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from tests.parallel.data_net import batch, build, loss_of, run_checks, stepped_in_backward
from tests.parallel.shard_net import MESHES, feed, loss_on, sharded, steps
from tests.tensor.common import same
from tests.workers import device_mesh, run_ranks


def tied_across_units(mesh):
    """A parameter of two units belongs to the module around them, whichever order they are sharded in."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9, bias=False)]).double()
            self.blocks[2].weight = self.blocks[0].weight

        def forward(self, tokens):
            for block in self.blocks:
                tokens = block(tokens)
            return tokens

    want = Tied()
    pairs = [(want, torch.optim.AdamW(want.parameters(), lr=0.01))]
    for order in ((0, 1, 2), (2, 1), (0,)):
        model = Tied()
        for i in order:
            fully_shard(model.blocks[i], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert model.blocks[2].weight is model.blocks[0].weight and len(list(model.parameters())) == 3
        pairs.append((model, torch.optim.AdamW(model.parameters(), lr=0.01)))
    for step in range(2):
        for m, optimizer in pairs:
            optimizer.zero_grad()
            (loss_of(m, *batch(step)) if m is want else loss_on(m, mesh, step)).backward()
            optimizer.step()
    for model, _ in pairs[1:]:
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            same(p, q, name)


def stages_of_a_pipeline(mesh):
    """As torch.distributed.pipelining does: nothing is reduced by backward passes, everything once they are done."""
    want, model = build(), sharded(build(), mesh)
    for rows in (0, 1, 2):  # the optimizer clears gradients between steps
        model.zero_grad()
        want.zero_grad()
        with shardwise.debug.ledger() as log:
            losses = [loss_on(model, mesh, rows + step) for step in range(2)]  # forwards run ahead of backwards
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            for loss in losses:
                loss.backward()
        assert {entry.kind for entry in log} <= {"all_gather"}
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        fully_shard.state(model)._root_post_backward_final_callback()
        for step in range(2):
            loss_of(want, *batch(rows + step)).backward()
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, name)
    model.zero_grad()
    fully_shard.state(model)._root_post_backward_final_callback()  # there is nothing to reduce
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(LayoutError, match=r"fully_shard.state: Linear is not fully sharded"):
        fully_shard.state(model.blocks[0].up)


def odd_modules(mesh):
    """Modules that are called several times, lists of modules as one unit, other methods than forward, checkpoints."""

    class Odd(nn.Module):
        def __init__(self, again=None):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.head, self.again = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), again
            self.double()

        def encode(self, x):
            return torch.tanh(self.one(self.two(self.one(x))))

        def forward(self, x):
            run = (
                self.encode
                if self.again is None
                else functools.partial(checkpoint, self.encode, use_reentrant=self.again)
            )
            return self.head(run(x))

    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = Odd()
    want(x).square().mean().backward()
    for again, grouped, typed in itertools.product((None, False), (False, True), (False, True)):
        model = Odd(again)
        if grouped:
            assert fully_shard([model.two, model.head], mesh=mesh)[0] is model.two
        else:
            fully_shard(model.two, mesh=mesh)
        fully_shard(model.one, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(feed(x, mesh, typed)).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, f"{name} {again} {grouped} {typed}")
    model = fully_shard(Odd(), mesh=mesh)
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model.one, "extra_repr")  # not sharded: nothing happens
    twin = copy.deepcopy(model)
    for m in (model, twin):
        m.encode(feed(x, mesh)).square().mean().backward()
    reference = Odd()
    reference.encode(x).square().mean().backward()
    for p, r, q in zip(model.parameters(), twin.parameters(), reference.parameters(), strict=True):
        same(p.grad, q.grad)
        same(r.grad, q.grad)
        assert q.grad is None or p.grad is not r.grad
    with pytest.raises(LayoutError, match="FSDP.*does not have a method decode"):
        register_fsdp_forward_method(model, "decode")


def forwards_inside_of_forwards(mesh):
    """A module that calls itself and a method that is registered, with its own parameters needed after both; whole, or
    repeated in the backward; and after an interrupt, which no hook hears of."""

    class Inward(nn.Module):
        def __init__(self, again=None):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.again = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), again

        def encode(self, x, depth):
            if depth < 0:
                raise KeyboardInterrupt
            return self.first(self(x, depth - 1) if depth else x)

        def forward(self, x, depth=2):
            encode = self.encode
            if self.again is not None:  # one inside of the other
                encode = functools.partial(checkpoint, encode, use_reentrant=self.again)
            return self.last(encode(x, depth))

    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = Inward()
    want(x).square().mean().backward()
    for again, typed, free in itertools.product((None, False), (False, True), (False, True)):
        model = fully_shard(Inward(again), mesh=mesh, reshard_after_forward=free)
        register_fsdp_forward_method(model, "encode")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model(feed(x, mesh, typed), -1)
            optimizer.zero_grad()
            model(feed(x, mesh, typed).requires_grad_()).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, f"{name} {again} {typed} {free}")


@dataclasses.dataclass(frozen=True)
class Record:
    value: torch.Tensor
    rest: object = None


def records(mesh):
    """Dataclasses as arguments and results: their tensors are cast, and a batch of DTensors is seen in them."""

    class OfRecords(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.seen = nn.Linear(4, 4), []

        def forward(self, record):
            self.seen.append((record.value.dtype, record.rest[0].value.dtype, record.rest[1]))
            return Record(self.inner(record.value + record.rest[0].value), "kept")

    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    want = OfRecords()
    want(Record(x, [Record(x), 3])).value.square().mean().backward()
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
    for typed in (False, True):
        model = fully_shard(OfRecords(), mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        mine = feed(x, mesh, typed)
        result = model(Record(mine, [Record(mine), 3]))
        assert model.seen == [(torch.float64, torch.float64, 3)]
        assert (result.value.dtype, result.rest) == (torch.float32, "kept")
        result.value.square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, f"{name} {typed}", 1e-5)


def other_parameters(mesh):
    """Parameters that are ignored, cut along another dim, or frozen; casts after sharding; clipping."""
    model, want = build(), build()
    model.narrow.weight.requires_grad_(False)
    want.narrow.weight.requires_grad_(False)
    ignored = {model.unused.weight}
    options = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None, "ignored_params": ignored}
    sharded(model, mesh, **options)
    assert type(model.unused.weight) is nn.Parameter and isinstance(model.unused.bias, DTensor)
    assert model.first.weight.placements[-1] == Shard(1) and model.narrow.bias.placements[-1] == Shard(0)
    loss_on(model, mesh).backward()
    loss_of(want, *batch()).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (want, model)]
    same(norms[1], norms[0])
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        if p.grad is not None:
            same(p.grad, q.grad, name)
        else:
            assert q.grad is None
    model.zero_grad()
    model.to(torch.float32)
    assert model.first.weight is model.last.weight and model.first.weight.dtype == torch.float32
    loss_on(model, mesh).backward()
    assert model.first.weight.grad.dtype == torch.float32


def uneven_batches(mesh):
    """Ranks with other numbers of rows, and none: gradients are averaged, as of DDP; of DTensors they are exact."""
    torch.manual_seed(0)
    want = nn.Linear(4, 3).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    model = fully_shard(copy.deepcopy(want), mesh=mesh)
    model(distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim)).square().mean().backward()
    want(x).square().mean().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        same(p.grad, q.grad)


def states(mesh):
    """State dicts, copies, evaluation and training mode."""
    model = steps(sharded(build(), mesh), mesh, count=1)
    model.eval()
    twin = copy.deepcopy(model)
    other = sharded(build(), mesh)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        outs = [m(feed(batch()[0], mesh)) for m in (model, twin, other)]
    for out in outs[1:]:
        same_on_ranks(out, outs[0])
    loss_on(twin, mesh).backward()
    loss_on(model, mesh).backward()
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        same(p.grad, None if q.grad is None else q.grad.full_tensor())


def same_on_ranks(one, other):
    pairs = zip(one.ranks, other.ranks, strict=True) if isinstance(one, RankTensor) else [(one, other)]
    for a, b in pairs:
        torch.testing.assert_close(a, b)


def failures(mesh):
    """After a pass that failed, with and without reset_iter_state."""
    for resets in (False, True):
        want, model = build(), sharded(build(), mesh)
        failing = [True]

        def fail(module, args, out, failing=failing):
            if failing:
                raise RuntimeError("on purpose")

        model.blocks[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            loss_on(model, mesh)
        failing.clear()
        if resets:
            model.reset_iter_state()
        loss_on(model, mesh).backward()
        loss_of(want, *batch()).backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad)


def only_blocks(mesh):
    """A model whose blocks alone are sharded: each is a root of its own, and the rest is left alone."""
    torch.manual_seed(0)
    want = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = copy.deepcopy(want)
    for i in (0, 2):
        fully_shard(model[i], mesh=mesh)
    x = torch.randn(12, 4, dtype=torch.float64)
    for typed in (False, True):
        for m, given in ((want, x), (model, feed(x, mesh, typed))):
            m.zero_grad()
            with torch.no_grad():
                m(given)
            for _ in range(2):
                m(given).square().mean().backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad)


def hooks_and_checkpoints(mesh):
    """Blocks that are recomputed, and parameters that are stepped in the backward pass."""

    def train(model, feeds):
        stepped_in_backward(model)
        for step in range(3):
            loss_of(model, *feeds(step)).backward()
        return model

    want = train(build(), batch)
    for typed, reentrant in itertools.product((False, True), (False, True)):
        model = build()
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
        sharded(model, mesh)
        train(model, lambda step, typed=typed: [feed(v, mesh, typed) for v in batch(step)])
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            same(p, q, f"{name} {typed} {reentrant}")


def several_meshes(mesh):
    """A unit of its own mesh, inside of another: its gradients are averaged over that alone, as experts want it."""
    if mesh.ndim == 1:
        return
    torch.manual_seed(0)
    want = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = copy.deepcopy(want)
    fully_shard(model[2], mesh=mesh["parts"])
    fully_shard(model, mesh=mesh)
    x = torch.randn(12, 4, dtype=torch.float64)
    copies, parts = mesh.shape
    model(feed(x, mesh)).square().mean().backward()
    want(x).square().mean().backward()
    for p, q in zip(model[0].parameters(), want[0].parameters(), strict=True):
        same(p.grad, q.grad)
    each = []  # of every copy, the gradients of its rows
    for rows in x.chunk(copies):
        one = copy.deepcopy(want)
        one.zero_grad()
        one(rows).square().mean().backward()
        each.append([q.grad for q in one[2].parameters()])
    for i, p in enumerate(model[2].parameters()):
        assert p.device_mesh == mesh["parts"]
        for number, value in enumerate(p.grad.to_local().ranks):
            expected = each[number // parts][i]
            size = -(-expected.shape[0] // parts)
            torch.testing.assert_close(value, expected[number % parts * size :][:size])


CHECKS = [
    only_blocks,
    several_meshes,
    hooks_and_checkpoints,
    tied_across_units,
    odd_modules,
    stages_of_a_pipeline,
    forwards_inside_of_forwards,
    records,
    other_parameters,
    uneven_batches,
    states,
    failures,
]


@pytest.mark.parametrize(("shape", "names"), MESHES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_simulated(check, shape, names):
    check(simulate(shape, axis_names=names))


def _on_ranks(rank, world_size):
    run_checks(device_mesh((world_size,), ("dp",)), CHECKS)


def test_processes():
    run_ranks(_on_ranks, 2)
