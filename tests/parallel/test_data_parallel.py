"""DDP and ZeRO 1, 2 and 3 equal one device on the whole batch: gradients and parameters after 3 steps of AdamW."""

import copy
import functools
import itertools
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
from shardwise.parallel.data.states import Memory
from tests.parallel.data_net import BATCH, batch, build, equal, feed, loss_of, one_device, own_part, run_checks, train
from tests.tensor.common import same
from tests.workers import device_mesh, run_ranks


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


def is_whole(unit):
    return any(group.memory.now is Memory.WHOLE for group in unit.groups)


def memory_is_freed(mesh):
    """Between forward and backward only the root's parameters are whole; two units at most at any time."""
    model = data_parallel(build(), mesh["dp"], "parameters", unit_bytes=0)
    state = model._data_parallel
    train(model, mesh["dp"], steps=1)
    most = []

    def count(*_):
        most.append(sum(is_whole(unit) for unit in state.units[:-1]))

    for block in model.blocks:
        block.up.register_forward_hook(count)
    loss = loss_of(model, *(own_part(v, mesh["dp"]) for v in batch()))
    assert most == [1, 1, 1]
    assert [is_whole(unit) for unit in state.units] == [False, False, False, True]
    for unit in state.units[:-1]:
        assert all(room.untyped_storage().nbytes() == 0 for group in unit.groups for room in group.buffers)
    loss.backward()
    assert not any(map(is_whole, state.units))
    with torch.no_grad():
        model(own_part(batch()[0], mesh["dp"]))
    assert not any(map(is_whole, state.units))


def in_order_and_ahead(mesh):
    """The next unit's parameters are on their way while a unit computes."""
    model = data_parallel(build(), mesh["dp"], "parameters", unit_bytes=0)
    train(model, mesh["dp"], steps=1)
    first, second, third, _ = model._data_parallel.units
    seen = []
    model.blocks[0].up.register_forward_hook(
        lambda *_: seen.append(any(group.memory.now is Memory.GATHERING for group in second.groups))
    )
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


CHECKS = [
    every_kind, any_batch, accumulation, recomputed, memory_is_freed, in_order_and_ahead, states_and_copies, mixed_precision,
    unfrozen_later, clipped, recurrent,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_simulated(check):
    check(simulate((4, 1), axis_names=("dp", "tp")))


def test_three_ranks():
    mesh = simulate((3, 1), axis_names=("dp", "tp"))
    every_kind(mesh)


@pytest.mark.parametrize("check", [every_kind, accumulation, recomputed, mixed_precision], ids=lambda c: c.__name__)
def test_one_rank(check):
    check(simulate((1, 1), axis_names=("dp", "tp")))


def _on_ranks(rank, world_size):
    checks = CHECKS if world_size == 2 else [every_kind, memory_is_freed, recomputed]
    run_checks(device_mesh((world_size, 1), ("dp", "tp")), checks)


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes(world_size):
    run_ranks(_on_ranks, world_size)


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
    run_ranks(_on_top, 4)


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
