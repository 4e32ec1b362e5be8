"""Moves from one mesh to another: other shapes of the same ranks, sub-meshes, fewer, more and other ranks."""

import random

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise import (
    DTensor,
    MeshError,
    Partial,
    Replicate,
    Shard,
    debug,
    distribute_tensor,
    init_device_mesh,
    move_state_dict,
    plan_move,
    simulate,
)
from shardwise.errors import MoveError
from shardwise.layout import Layout
from shardwise.mesh import as_mesh
from tests.layout.brute import deal
from tests.move.cases import check_holds, source
from tests.workers import device_mesh, run_ranks

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2))


@pytest.mark.parametrize("block", range(8))
def test_random_layouts_on_random_meshes(block):
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(seed)
        shape = tuple(rng.choice((0, 1, 3, 5, 8)) for _ in range(rng.choice((0, 1, 2, 3))))
        ops = rng.choice((("sum", "avg"), ("max",), ()))
        src = deal(rng, rng.choice(MESHES), shape, partial_ops=ops)
        dst = deal(rng, rng.choice(MESHES), shape, partial_ops=("sum",))
        there = simulate(dst.mesh_shape, first_rank=rng.choice((0, 1, 20)))
        given = source(src, requires_grad=True, seed=seed)
        x = given.on(src)
        with debug.ledger() as ledger:
            moved = x.redistribute(there, dst.placements)
        assert moved.device_mesh is there and moved.placements == tuple(as_layout(dst, there).placements)
        check_holds([v.detach() for v in moved.to_local().ranks], dst, given.whole.detach())
        if not any(p.is_partial("max") for p in src.placements) and x.layout.mesh is not moved.layout.mesh:
            plan = plan_move(x.layout, moved.layout)
            assert sum(entry.bytes for entry in ledger) == sum(map(plan.bytes_in, plan.ranks))
            assert sum(map(plan.bytes_out, plan.ranks)) == sum(map(plan.bytes_in, plan.ranks))
        full = moved.full_tensor()
        weight = torch.rand(full.shape, dtype=full.dtype, generator=torch.Generator().manual_seed(seed))
        (found,) = torch.autograd.grad((full.sin() * weight).sum(), given.root, retain_graph=True)
        (expected,) = torch.autograd.grad((given.whole.sin() * weight).sum(), given.root)
        torch.testing.assert_close(found, expected)


def as_layout(dealt, mesh):
    return Layout.make(as_mesh(mesh), dealt.placements, dealt.shape, torch.float64)


def test_second_derivatives():
    whole = torch.rand(5, 3, dtype=torch.float64)
    x = distribute_tensor(whole, simulate((2, 2)), [Shard(0), Shard(1)]).requires_grad_()
    moved = x.redistribute(simulate(3), [Replicate()])
    (first,) = torch.autograd.grad((moved.full_tensor() ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second.full_tensor(), 6 * whole)


def test_to_a_sub_mesh_and_back():
    mesh = simulate((2, 3), axis_names=("dp", "tp"))
    whole = torch.arange(35.0).view(7, 5)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).requires_grad_()
    y = x.redistribute(mesh["tp"], [Shard(0)])
    assert y.device_mesh is mesh["tp"] and torch.equal(y.full_tensor(), whole)
    z = y.redistribute(mesh, [Replicate(), Shard(1)])
    assert torch.equal(z.full_tensor(), whole)
    (z * z).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)


def test_only_what_is_missing_travels():
    src = distribute_tensor(torch.zeros(8, 8), simulate((2, 2)), [Shard(0), Shard(1)])
    plan = plan_move(src.layout, Layout.make(as_mesh(simulate(4)), [Shard(0)], (8, 8), torch.float32))
    assert [plan.bytes_in(r) for r in range(4)] == [plan.lower_bound(r) for r in range(4)] == [32] * 4
    assert "one all_to_all" in repr(plan) and "lower bound 32" in repr(plan)


def test_refusals():
    x = distribute_tensor(torch.zeros(4, 4), simulate((2, 2)), [Shard(0), Replicate()])
    with pytest.raises(MoveError, match="without placements; give one for each of its axes"):
        x.redistribute(simulate(4))
    with pytest.raises(MeshError, match="first_rank must be an int >= 0"):
        simulate(2, first_rank=-1)


# -- real processes ----------------------------------------------------------------------------------------
def between(rank, world_size, here, there):
    """From one mesh of some of the four ranks to another."""
    a, b = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in (here, there))
    whole = torch.arange(35, dtype=torch.float64).view(7, 5)
    before = [Shard(0), Replicate(), Shard(1)][: a.ndim]
    after = [Shard(1), Shard(0), Replicate()][: b.ndim]
    if a.get_coordinate() is None:
        x = DTensor.outside(a, before, (7, 5), torch.float64)
    else:
        x = distribute_tensor(whole, a, before)
    if a.get_coordinate() is None and b.get_coordinate() is None:
        return "neither"
    x.requires_grad_()
    y = x.redistribute(b, after)
    if b.get_coordinate() is None:
        assert "outside of the mesh" in repr(y) and y.shape == (7, 5) and y.to_local().numel() == 0
        (y * y).sum().backward()
    else:
        assert torch.equal(y.full_tensor(), whole)
        (y * y).sum().backward()
    if a.get_coordinate() is not None:
        assert torch.equal(x.grad.full_tensor(), 2 * whole)
    return "done"


@pytest.mark.parametrize(
    "here, there",
    [
        ([0, 1, 2, 3], [[0, 1], [2, 3]]),  # another shape of the same ranks
        ([0, 1, 2, 3], [0, 2]),  # fewer
        ([1, 3], [0, 1, 2, 3]),  # more
        ([0, 1], [2, 3]),  # others
        ([[3, 1], [0, 2]], [[1, 0], [2, 3]]),  # out of order
        ([2, 0], [[1, 2]]),  # some in common, one in neither
    ],
)
def test_between_process_meshes(here, there):
    inside = set(torch.tensor(here).flatten().tolist()) | set(torch.tensor(there).flatten().tolist())
    assert run_ranks(between, 4, here, there) == ["done" if r in inside else "neither" for r in range(4)]


def to_own_line(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(15.0).view(5, 3)
    x = distribute_tensor(whole, mesh, [Shard(0), Partial()])
    y = x.redistribute(mesh["tp"], [Shard(1)])
    assert torch.equal(y.full_tensor(), whole)
    return tuple(y.to_local().shape)


def test_to_the_sub_mesh_of_each_process():
    assert run_ranks(to_own_line, 4) == [(5, 2), (5, 1), (5, 2), (5, 1)]


# -- state dicts -------------------------------------------------------------------------------------------
def model_state(mesh):
    return {
        "weight": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)]),
        "bias": distribute_tensor(torch.arange(7, dtype=torch.bfloat16), mesh, [Shard(0)]),
        "flags": distribute_tensor(torch.tensor([True, False, True]), mesh, [Replicate()]),
        "nested": {"steps": 3, "sums": [distribute_tensor(torch.ones(4, dtype=torch.float64), mesh, [Partial()])]},
        "plain": torch.ones(2),
    }


def check_state(moved, mesh):
    assert moved["weight"].device_mesh == mesh and torch.equal(
        moved["weight"].full_tensor(), torch.arange(35.0).view(7, 5)
    )
    assert torch.equal(moved["bias"].full_tensor(), torch.arange(7, dtype=torch.bfloat16))
    assert moved["flags"].full_tensor().tolist() == [True, False, True]
    assert moved["nested"]["steps"] == 3 and torch.equal(moved["plain"], torch.ones(2))
    assert torch.equal(moved["nested"]["sums"][0].full_tensor(), torch.ones(4, dtype=torch.float64))


def test_state_dict_simulated():
    mesh = simulate((2, 2))
    moved = move_state_dict(model_state(simulate(3)), mesh, lambda name, tensor: [Shard(0), Replicate()])
    check_state(moved, mesh)
    assert moved["weight"].placements == (Shard(0), Replicate())
    moved = move_state_dict(model_state(simulate(3)), mesh, {"weight": [Shard(1), Shard(0)]})
    assert moved["weight"].placements == (Shard(1), Shard(0)) and moved["bias"].placements == (Replicate(),) * 2


def state_on_processes(rank, world_size):
    mesh, there = device_mesh((4,)), device_mesh((2, 2))
    state = model_state(mesh)
    state["nested"]["sums"] = [state["nested"]["sums"][0].redistribute(placements=[Shard(0)])]
    with debug.ledger() as log:
        moved = move_state_dict(state, there, lambda name, tensor: [Shard(0), Replicate()])
    assert [entry.op for entry in log] == ["move_state_dict"]  # one bucket, of three dtypes
    check_state(moved, there)
    small = move_state_dict(state, there, lambda name, tensor: [Replicate(), Shard(0)], bucket_bytes=64)
    check_state(small, there)
    return True


def test_state_dict_on_processes():
    assert all(run_ranks(state_on_processes, 4))


@pytest.mark.parametrize(
    "bad, message", [(0, "bucket_bytes must be an int > 0"), ("x", "bucket_bytes must be an int > 0")]
)
def test_state_dict_refusals(bad, message):
    with pytest.raises(MoveError, match=message):
        move_state_dict({}, simulate(2), None, bucket_bytes=bad)
    with pytest.raises(MoveError, match="placements"):
        move_state_dict({}, simulate(2), 3)
