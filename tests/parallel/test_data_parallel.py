"""DDP and ZeRO 1, 2 and 3 equal one device on the whole batch: gradients and parameters after 3 steps of AdamW."""

import copy
import functools
import itertools
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, RankTensor, Replicate, Shard, distribute_module, distribute_tensor, simulate
from shardwise.errors import AutogradError, LayoutError, MeshError
from shardwise.mesh import as_mesh
from shardwise.parallel.data import SHARDS, data_parallel
from tests.tensor.common import same
from tests.workers import device_mesh, run_ranks

BATCH = 12


class Block(nn.Module):
    def __init__(self, width, again=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)
        self.again = again

    def forward(self, x):
        return x + (checkpoint(self.inside, x, use_reentrant=False) if self.again else self.inside(x))

    def inside(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Uneven sizes, fewer rows than ranks, a 0-d parameter, one frozen, one that is tied and one that is never used."""

    def __init__(self, width=5, again=False):
        super().__init__()
        self.first = nn.Embedding(9, width)
        self.blocks = nn.Sequential(*(Block(width, again) for _ in range(3)))
        self.blocks[1].up.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(width, 9, bias=False)
        self.last.weight = self.first.weight
        self.narrow = nn.Linear(width, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens):
        x = self.blocks(self.first(tokens)) * self.scale * (1 + self.narrow.weight.square().mean())
        return self.last(x) * self.narrow(x).cos()


def build(**options):
    torch.manual_seed(3)
    return Net(**options).double()


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(9, (BATCH, 4), generator=generator), torch.randint(9, (BATCH, 4), generator=generator)


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@functools.cache
def one_device(steps=3, accumulate=1):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            loss_of(model, *batch(step * accumulate + part)).backward()
        optimizer.step()
    return model


def own_part(value, data):
    """Each rank's rows of a batch, as plain tensors (of all ranks, where they are simulated)."""
    comm = as_mesh(data).comm
    parts = value.chunk(data.size())
    if comm.simulated:
        return RankTensor([parts[c[0]] for c in comm.played()])
    return parts[comm.coords[0]]


def feed(value, data, typed):
    return distribute_tensor(value, data, [Shard(0)]) if typed else own_part(value, data)


def equal(model, want, where=""):
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert isinstance(p, DTensor), f"{name} {where}"
        same(p.grad, q.grad, f"gradient of {name} {where}")
        same(p, q, f"{name} {where}")


def train(model, data, typed=False, steps=3, accumulate=1, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            inputs = [feed(v, data, typed) for v in batch(step * accumulate + part)]
            if part < accumulate - 1:
                with model.no_sync():
                    loss_of(model, *inputs).backward()
            else:
                loss_of(model, *inputs).backward()
        optimizer.step()
    return model


def every_kind(mesh):
    for shard, typed in itertools.product(SHARDS, (False, True)):
        model = data_parallel(build(), mesh["dp"], shard, unit_bytes=0)
        equal(train(model, mesh["dp"], typed), one_device(), f"{shard} typed={typed}")
        assert model.last.weight is model.first.weight
        assert model.unused.weight.grad is None and model.blocks[1].up.weight.grad is None


def any_batch(mesh):
    """DTensor batches of uneven parts, and of fewer rows than ranks."""
    for shard, rows in itertools.product(("none", "parameters"), (7, 1)):
        want, model = build(), data_parallel(build(), mesh["dp"], shard, unit_bytes=0)
        tokens, targets = (v[:rows] for v in batch())
        loss_of(want, tokens, targets).backward()
        loss_of(model, *(feed(v, mesh["dp"], typed=True) for v in (tokens, targets))).backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, f"{shard} {rows} rows")


def accumulation(mesh):
    for shard in SHARDS:
        model = data_parallel(build(), mesh["dp"], shard, unit_bytes=0)
        inputs = [own_part(v, mesh["dp"]) for v in batch()]
        with shardwise.debug.ledger() as log, model.no_sync():
            loss_of(model, *inputs).backward()
        kinds = {entry.kind for entry in log}
        assert kinds <= {"all_gather"} and (shard != "none" or not kinds), f"{shard}: {kinds}"
        if mesh["dp"].size() > 1:
            with pytest.raises(AutogradError, match="no_sync"):
                torch.optim.SGD(model.parameters()).step()
        for fresh in (True, False):  # what zero_grad takes away does not come back
            model.zero_grad(set_to_none=fresh)
            loss_of(model, *inputs).backward()
            want = build()
            loss_of(want, *batch()).backward()
            for p, q in zip(model.parameters(), want.parameters(), strict=True):
                if q.grad is not None:
                    same(p.grad, q.grad, f"{shard} {fresh}")
            with model.no_sync():
                loss_of(model, *inputs).backward()
        model = data_parallel(build(), mesh["dp"], shard, unit_bytes=0)
        equal(train(model, mesh["dp"], accumulate=3), one_device(3, 3), shard)


def recomputed(mesh):
    """Activation checkpointing inside of a unit and around one."""
    for shard in ("none", "parameters"):
        model = data_parallel(build(again=True), mesh["dp"], shard, unit_bytes=0)
        equal(train(model, mesh["dp"]), one_device(), shard)
        model = build()
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        equal(train(data_parallel(model, mesh["dp"], shard, unit_bytes=0), mesh["dp"]), one_device(), shard)


def memory_is_freed(mesh):
    """Between forward and backward only the root's parameters are whole; two units at most at any time."""
    model = data_parallel(build(), mesh["dp"], "parameters", unit_bytes=0)
    state = model._data_parallel
    train(model, mesh["dp"], steps=1)
    most = []

    def count(*_):
        most.append(sum(any(c.full for c in unit.copies) for unit in state.units[:-1]))

    for block in model.blocks:
        block.up.register_forward_hook(count)
    loss = loss_of(model, *(own_part(v, mesh["dp"]) for v in batch()))
    assert most == [1, 1, 1]
    assert [any(c.full for c in unit.copies) for unit in state.units] == [False, False, False, True]
    for unit in state.units[:-1]:
        assert all(room.untyped_storage().nbytes() == 0 for c in unit.copies for room in c.rooms)
    loss.backward()
    assert not any(c.full for unit in state.units for c in unit.copies)
    with torch.no_grad():
        model(own_part(batch()[0], mesh["dp"]))
    assert not any(c.full for unit in state.units for c in unit.copies)


def in_order_and_ahead(mesh):
    """The next unit's parameters are on their way while a unit computes."""
    model = data_parallel(build(), mesh["dp"], "parameters", unit_bytes=0)
    train(model, mesh["dp"], steps=1)
    first, second, third, _ = model._data_parallel.units
    seen = []
    model.blocks[0].up.register_forward_hook(lambda *_: seen.append(any(c.coming is not None for c in second.copies)))
    model.blocks[2].down.weight.register_hook(lambda g: None)
    loss = loss_of(model, *(own_part(v, mesh["dp"]) for v in batch()))
    assert seen == [True]
    loss.backward()


def states_and_copies(mesh):
    for shard in ("none", "parameters"):
        model = data_parallel(build(), mesh["dp"], shard, unit_bytes=0)
        average = torch.optim.swa_utils.AveragedModel(model)
        train(model, mesh["dp"], steps=2)
        saved = copy.deepcopy(model.state_dict())
        assert all(isinstance(v, DTensor) for v in saved.values())
        average.update_parameters(model)
        other = data_parallel(build(), mesh["dp"], shard, unit_bytes=0)
        for m in (other, average.module):
            m.load_state_dict(saved)
        inputs = own_part(batch()[0], mesh["dp"])
        for m in (other, average.module, copy.deepcopy(model)):
            torch.testing.assert_close(_first(m(inputs)), _first(model(inputs)))
        twin = copy.deepcopy(model)
        for m in (model, twin):
            loss_of(m, *(own_part(v, mesh["dp"]) for v in batch(5))).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            if p.grad is not None:
                assert p.grad is not q.grad
                same(q.grad, p.grad.full_tensor())


def _first(value):
    return value.ranks[0] if isinstance(value, RankTensor) else value


def mixed_precision(mesh):
    for shard in SHARDS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))
        plain = copy.deepcopy(model).bfloat16()
        data_parallel(model, mesh["dp"], shard, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32, unit_bytes=0)
        x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1))
        out = model(own_part(x, mesh["dp"]))
        assert _first(out).dtype == torch.bfloat16
        out.float().square().mean().backward()
        plain(x.bfloat16()).float().square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.dtype == p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad.full_tensor(), q.grad.float(), rtol=0.05, atol=1e-3)
        half = data_parallel(
            nn.Linear(6, 3).bfloat16(), mesh["dp"], shard, master_dtype=torch.float32, compute_dtype=torch.bfloat16
        )
        assert half.weight.dtype == torch.float32
        half(own_part(x, mesh["dp"])).float().sum().backward()
        torch.optim.SGD(half.parameters(), lr=1e-4).step()


def unfrozen_later(mesh):
    want, model = build(), data_parallel(build(), mesh["dp"], "parameters", unit_bytes=0)
    for m, typed in ((want, None), (model, False)):
        for step in range(2):
            m.zero_grad()
            inputs = batch(step) if typed is None else [own_part(v, mesh["dp"]) for v in batch(step)]
            loss_of(m, *inputs).backward()
            m.blocks[1].up.weight.requires_grad_(step == 0)
            m.blocks[0].norm.requires_grad_(step == 1)
    equal_grads = [(p.grad, q.grad) for p, q in zip(model.parameters(), want.parameters(), strict=True)]
    for p, q in equal_grads:
        same(p, q)


def clipped(mesh):
    want, model = build(), data_parallel(build(), mesh["dp"], "gradients", unit_bytes=0)
    loss_of(want, *batch()).backward()
    loss_of(model, *(own_part(v, mesh["dp"]) for v in batch())).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (want, model)]
    same(norms[1], norms[0])
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        same(p.grad, q.grad)


def recurrent(mesh):
    """A module that keeps a list of its parameters beside them."""
    torch.manual_seed(0)
    want = nn.LSTM(3, 4).double()
    model = data_parallel(copy.deepcopy(want), mesh["dp"], "parameters")
    x = torch.randn(5, BATCH, 3, dtype=torch.float64)
    want(x)[0].square().mean().backward()
    mine = own_part(x.transpose(0, 1), mesh["dp"]).transpose(0, 1)
    if as_mesh(mesh["dp"]).comm.simulated:
        return
    model(mine.contiguous())[0].square().mean().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        same(p.grad, q.grad)


# -- parameters looked at and written in odd ways --------------------------------------------------------------


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

    for shard in SHARDS:
        both(mesh, shard, adds)
        both(mesh, shard, replaces)
        if mesh["dp"].size() > 1:
            model = data_parallel(tanh_net(), mesh["dp"], shard, unit_bytes=0)
            model(own_part(rows_of(), mesh["dp"]))
            model.float()
            with pytest.raises(LayoutError, match="became .*float32.* before data_parallel"):
                model(own_part(rows_of().float(), mesh["dp"]))
            model = data_parallel(tanh_net(), mesh["dp"], shard, unit_bytes=0)
            model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
            with pytest.raises(LayoutError, match="'weight' of shape .* was replaced"):
                model(own_part(rows_of(), mesh["dp"]))


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
    """Such a parameter gets its gradient in several parts: they add up, or an error says what to do."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

        def forward(self, x):
            again = functools.partial(checkpoint, self.one, use_reentrant=True)
            return again(torch.tanh(again(torch.tanh(self.other(x)))))

    for shard in SHARDS:
        want, model = Shared(), data_parallel(Shared(), mesh["dp"], shard)
        want(rows_of()).square().mean().backward()
        model(own_part(rows_of(), mesh["dp"])).square().mean().backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, shard)
    model = data_parallel(Shared(), mesh["dp"], "parameters", units=lambda name, module: name == "one")
    with pytest.raises(AutogradError, match="use_reentrant=False"):
        model(own_part(rows_of(), mesh["dp"])).square().mean().backward()


def sparse_gradients(mesh):
    for shard in SHARDS:
        torch.manual_seed(0)
        want = nn.Embedding(9, 3, sparse=True).double()
        model = data_parallel(copy.deepcopy(want), mesh["dp"], shard)
        want(batch()[0]).square().mean().backward()
        model(own_part(batch()[0], mesh["dp"])).square().mean().backward()
        same(model.weight.grad, want.weight.grad.to_dense(), shard)


CHECKS = [
    every_kind, any_batch, accumulation, recomputed, memory_is_freed, in_order_and_ahead, states_and_copies, mixed_precision,
    unfrozen_later, clipped, recurrent,
]  # fmt: skip
ODD = [freed_leaves, lent_parameters, written_through_data, fused_steps, odd_passes, second_order, sparse_gradients]


@pytest.mark.parametrize("check", CHECKS + ODD, ids=lambda c: c.__name__)
def test_simulated(check):
    check(simulate((4, 1), axis_names=("dp", "tp")))


def test_three_ranks():
    mesh = simulate((3, 1), axis_names=("dp", "tp"))
    every_kind(mesh)


@pytest.mark.parametrize("check", [every_kind, accumulation, recomputed, mixed_precision], ids=lambda c: c.__name__)
def test_one_rank(check):
    check(simulate((1, 1), axis_names=("dp", "tp")))


def _on_ranks(rank, world_size, odd=False):
    mesh = device_mesh((world_size, 1), ("dp", "tp"))
    checks = CHECKS if world_size == 2 else [every_kind, memory_is_freed, recomputed]
    for check in [*ODD, slopes_inside, shared_by_reentrant_checkpoints] if odd else checks:
        try:
            check(mesh)
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes(world_size):
    run_ranks(_on_ranks, world_size, timeout=110)


def test_odd_ways_on_processes():
    run_ranks(_on_ranks, 2, True, timeout=110)


# -- on top of tensor parallelism --------------------------------------------------------------------------


def tensor_parallel(model, tp):
    """up by rows, down by columns, the embedding by rows: over a mesh of `tp` alone or of data and tp."""
    replicas = [Replicate()] * (tp.ndim - 1)
    cut = {"up.weight": 0, "up.bias": 0, "down.weight": 1}

    def partition(path, module, mesh):
        for name, param in list(module.named_parameters(recurse=False)):
            full = f"{path}.{name}"
            dim = next((d for end, d in cut.items() if full.endswith(end)), None)
            place = Replicate() if dim is None else Shard(dim)
            made = nn.Parameter(distribute_tensor(param.detach(), mesh, [*replicas, place]), param.requires_grad)
            module.register_parameter(name, made)

    distribute_module(model.blocks, tp, partition)
    return model


def on_top(mesh):
    for shard, joint, typed in itertools.product(SHARDS, (False, True), (False, True)):
        model = build()
        tensor_parallel(model, mesh if joint else mesh["tp"])
        if not typed:  # what enters the tensor-parallel part, and what leaves it
            model.blocks.register_forward_pre_hook(lambda m, args: (DTensor.from_local(args[0], mesh["tp"]),))
            model.blocks.register_forward_hook(
                lambda m, args, out: out.redistribute(placements=[Replicate()]).to_local()
            )
        data_parallel(model, mesh["dp"], shard, unit_bytes=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            tokens, targets = batch(step)
            if typed:
                where = [Shard(0), Replicate()]
                tokens, targets = (distribute_tensor(v, mesh, where) for v in (tokens, targets))
            else:
                tokens, targets = (own_part(v, mesh["dp"]) for v in (tokens, targets))
            loss_of(model, tokens, targets).backward()
            optimizer.step()
        equal(model, one_device(), f"{shard} joint={joint} typed={typed}")
        assert model.blocks[0].up.bias._layout.mesh is as_mesh(mesh)


def test_on_top_simulated():
    on_top(simulate((2, 2), axis_names=("dp", "tp")))


def _on_top(rank, world_size):
    on_top(device_mesh((2, 2), ("dp", "tp")))


def test_on_top_processes():
    run_ranks(_on_top, 4, timeout=110)


# -- bad input ---------------------------------------------------------------------------------------------


def test_messages():
    mesh = simulate((2, 2), axis_names=("dp", "tp"))
    with pytest.raises(LayoutError, match="shard='all' is not one of 'none', 'optimizer'"):
        data_parallel(nn.Linear(2, 2), mesh["dp"], "all")
    with pytest.raises(MeshError, match="one axis"):
        data_parallel(nn.Linear(2, 2), mesh)
    with pytest.raises(LayoutError, match="must be a torch.nn.Module, got int"):
        data_parallel(3, mesh["dp"])
    with pytest.raises(LayoutError, match="compute_dtype must be a floating-point"):
        data_parallel(nn.Linear(2, 2), mesh["dp"], compute_dtype=torch.int32)
    with pytest.raises(LayoutError, match="already"):
        data_parallel(data_parallel(nn.Linear(2, 2), mesh["dp"]), mesh["dp"])
    with pytest.raises(LayoutError, match="not part of the module"):
        data_parallel(nn.Linear(2, 2), mesh["dp"], units=[nn.Linear(1, 1)])
    cut = nn.Linear(4, 4)
    cut.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(LayoutError, match="cut over the data axis 'dp' already"):
        data_parallel(cut, mesh["dp"])


def test_a_parameter_used_outside_of_its_unit():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x):
            return F.linear(x, self.layers[0].weight)

    mesh = simulate(2, axis_names=("dp",))
    model = data_parallel(Odd(), mesh, "parameters", unit_bytes=0)
    with pytest.raises((LayoutError, MeshError)):
        model(RankTensor([torch.ones(2, 3)] * 2))
    model = data_parallel(Odd(), mesh, "parameters", units=[])
    model(RankTensor([torch.ones(2, 3)] * 2)).sum().backward()
    assert model.layers[0].weight.grad is not None


def test_the_page():
    """docs/training.md runs."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    exec(compile(program, "docs/training.md", "exec"), {"__name__": "page"})
