"""Costs: measured along each axis, the same on every rank, saved and read again, and what plans are priced by."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from shardwise import MeshError, Partial, Replicate, Shard, calibrate, clear_caches, memory_cap, plan_move, simulate
from shardwise.errors import MoveError
from shardwise.layout import Layout
from shardwise.mesh import as_mesh
from shardwise.move.cost import AxisCost, CostModel, cost_of, set_cost
from tests.workers import device_mesh, run_ranks


def measured(rank, world_size, folder):
    mesh = device_mesh((2, 2))
    file = Path(folder) / "costs.json"
    first = calibrate(mesh, file)
    assert first.measured and all(a.latency > 0 and a.bandwidth > 0 for a in first.axes)
    torch.distributed.barrier()
    again = calibrate(mesh, file)
    assert cost_of(as_mesh(mesh)).axes == again.axes
    text = repr(again)
    assert "latency" in text and "GB/s" in text and text.count("\n") == 3
    set_cost(as_mesh(mesh), CostModel((AxisCost(),) * 2))  # other tests use this mesh
    clear_caches()
    return first.axes, again.axes


def test_every_rank_agrees_and_the_file_is_read():
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(measured, 4, folder)
        saved = json.loads((Path(folder) / "costs.json").read_text())
    assert len({first for first, _ in found}) == 1
    for first, again in found:
        for a, b, c in zip(first, again, saved["axes"], strict=True):
            assert (a.latency, a.bandwidth) == pytest.approx((b.latency, b.bandwidth)) == (c["latency"], c["bandwidth"])


def refused(rank, world_size, folder):
    file = Path(folder) / "costs.json"
    if rank == 0:
        file.write_text('{"axis_names": 3}')
    torch.distributed.barrier()
    with pytest.raises(MeshError, match="holds no costs"):
        calibrate(device_mesh((2, 2)), file)
    return True


def test_a_file_that_is_something_else():
    with tempfile.TemporaryDirectory() as folder:
        assert all(run_ranks(refused, 4, folder))


def test_simulated_ranks_have_no_network():
    assert not calibrate(simulate((2, 2))).measured


@pytest.fixture
def uneven_axes():
    """A mesh whose first axis is a hundred times slower."""
    mesh = as_mesh(simulate((2, 4), axis_names=("slow", "fast")))
    set_cost(mesh, CostModel((AxisCost(1e-5, 1e8), AxisCost(1e-5, 1e10))))
    clear_caches()
    yield mesh
    set_cost(mesh, CostModel((AxisCost(),) * 2))
    clear_caches()


def layouts(mesh, before, after, shape=(1024, 1024)):
    return [Layout.make(mesh, p, shape, torch.float32) for p in (before, after)]


def test_a_slow_axis_carries_less(uneven_axes):
    plan = plan_move(*layouts(uneven_axes, [Shard(0), Shard(1)], [Replicate(), Replicate()]))
    assert [step.axes for step in plan.steps] == [(0,), (1,)]  # a small gather over the slow axis, then the fast one
    set_cost(uneven_axes, CostModel((AxisCost(),) * 2))
    clear_caches()
    plan = plan_move(*layouts(uneven_axes, [Shard(0), Shard(1)], [Replicate(), Replicate()]))
    assert [step.axes for step in plan.steps] == [(0, 1)]


def test_the_same_costs_price_how_an_op_is_split(uneven_axes):
    from shardwise import distribute_tensor

    mesh = uneven_axes.source
    x = distribute_tensor(torch.ones(64, 64), mesh, [Shard(0), Replicate()])
    y = distribute_tensor(torch.ones(64, 64), mesh, [Replicate(), Shard(0)])
    assert (x + y).placements[0] == Shard(0)


@pytest.mark.parametrize(
    "before, after",
    [
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
        ([Shard(0), Shard(0)], [Replicate(), Shard(1)]),
        ([Partial(), Shard(0)], [Shard(0), Shard(1)]),
    ],
)
def test_a_memory_cap_is_kept_in_more_rounds(before, after):
    mesh = as_mesh(simulate((2, 4)))
    src, dst = layouts(mesh, before, after)
    free = plan_move(src, dst)
    target = max(int(torch.Size(dst.local_shape(r)).numel()) * 4 for r in mesh.ranks)
    tight = plan_move(src, dst, memory=int(target * 1.05))
    assert max(map(tight.peak_bytes, mesh.ranks)) <= target * 1.05 < max(map(free.peak_bytes, mesh.ranks))
    assert sum(map(tight.bytes_in, mesh.ranks)) == sum(map(free.bytes_in, mesh.ranks))
    with pytest.raises(MoveError, match="memory cap"):
        plan_move(src, dst, memory=target // 2)


def in_rounds(rank, world_size):
    from shardwise import distribute_tensor

    mesh = device_mesh((2, 2))
    whole = torch.arange(77 * 13, dtype=torch.float64).view(77, 13)
    for before, after in (
        ([Shard(0), Shard(1)], [Replicate(), Replicate()]),
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
        ([Partial(), Shard(0)], [Shard(0), Shard(1)]),
    ):
        x = distribute_tensor(whole, mesh, before).requires_grad_()
        with memory_cap(whole.nbytes * 9 // 8):
            y = x.redistribute(placements=after)
        assert torch.equal(y.full_tensor(), whole)
        (y * y).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * whole)
    return True


def test_rounds_on_processes():
    assert all(run_ranks(in_rounds, 4))


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "1"])
def test_a_cap_that_is_none(bad):
    with pytest.raises(MoveError, match="bytes must be an int > 0"):
        memory_cap(bad)


def test_plans_and_layouts_do_not_grow_with_the_mesh():
    """On 65,536 ranks a layout keeps what it was asked for, and a plan looks at a few ranks."""
    mesh = as_mesh(simulate((16, 16, 16, 16), device="meta"))
    src = Layout.make(mesh, [Shard(0), Partial(), Shard(1), Replicate()], (4096, 4096), torch.float32)
    dst = Layout.make(mesh, [Replicate(), Shard(0), Shard(0), Shard(1)], (4096, 4096), torch.float32)
    plan = plan_move(src, dst)
    assert plan.bytes_in(70) > 0 and plan.lower_bound(70) > 0 and "busiest rank" in plan.explain()
    assert len(src._sets) + len(dst._sets) < 200
