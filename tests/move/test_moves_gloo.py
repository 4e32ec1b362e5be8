"""Moves on real processes give what simulated ones give: values, gradients, second derivatives, shapes, errors."""

import copy
import itertools
import os
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise import DTensor, Partial, RankTensor, Replicate, Shard, distribute_tensor, plan_move, simulate
from shardwise.comm.messages import ALL_GATHER, along_group
from shardwise.comm.record import Recorder
from shardwise.errors import CommError, LayoutError, MeshError
from tests.layout.brute import deal, grid
from tests.move.cases import PARTIALS, PLAIN, UNEVEN, all_parts, placed
from tests.workers import device_mesh, run_ranks

EVERY = (*PLAIN, *UNEVEN, *PARTIALS)


def simulated(parts, dst):
    """What each rank holds after the move, on a simulated mesh."""
    src = parts.dealt
    ranks = RankTensor([parts.at(coords) for coords in grid(src.mesh_shape)])
    x = DTensor.from_local(ranks, simulate(src.mesh_shape), src.placements, shape=src.shape)
    return x.redistribute(placements=dst.placements).to_local().ranks


def check_move(rank, src, dst, dtype=torch.float64):
    """One move on the process group: this rank's values and gradients."""
    mesh = device_mesh(src.mesh_shape)
    coords = grid(src.mesh_shape)[rank]
    parts = all_parts(src, dtype)
    local = parts.at(coords)
    differentiable = dtype == torch.float64
    x = DTensor.from_local(local.requires_grad_(differentiable), mesh, src.placements, shape=src.shape)
    moved = x.redistribute(placements=dst.placements)
    assert moved.dtype == dtype and moved.layout.local_shape(rank) == moved.to_local().shape
    loose = {} if differentiable else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(moved.to_local().detach(), simulated(parts, dst)[rank], **loose)
    if differentiable:
        check_gradients(parts, coords, local, moved.full_tensor())


def check_gradients(parts, coords, local, full):
    """First and second derivatives of a function of the whole, in this rank's part."""
    weight = torch.rand(full.shape, dtype=full.dtype, generator=torch.Generator().manual_seed(1))
    direction = torch.rand(parts.every.shape, dtype=full.dtype, generator=torch.Generator().manual_seed(2))
    parts.every.requires_grad_()
    whole = parts.whole()
    torch.testing.assert_close(full, whole)
    (expected,) = torch.autograd.grad((whole.sin() * weight).sum(), parts.every, create_graph=True)
    (found,) = torch.autograd.grad((full.sin() * weight).sum(), local, create_graph=True)
    torch.testing.assert_close(found, parts.at(coords, expected))
    (expected,) = torch.autograd.grad(expected, parts.every, direction)
    (found,) = torch.autograd.grad(found, local, parts.at(coords, direction))
    torch.testing.assert_close(found, parts.at(coords, expected))


def all_pairs(rank, world_size, shape, before):
    for after in EVERY:
        check_move(rank, placed((world_size,), shape, [before], 1), placed((world_size,), shape, [after], 2))
    return True


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("before", EVERY)
def test_all_pairs(before, world_size):
    shape = (6, 4) if world_size == 2 else (5, 3)
    assert run_ranks(all_pairs, world_size, shape, before) == [True] * world_size


def small_pairs(rank, world_size):
    """Fewer rows than ranks, and nothing at all."""
    for shape in ((1, 3), (0, 2), (3, 0)):
        for before, after in itertools.product(("R", "S0", "S1", "S0 sizes", "P sum", "P max"), repeat=2):
            check_move(rank, placed((world_size,), shape, [before], 1), placed((world_size,), shape, [after], 2))
    return True


def within(local, how):
    """The same values as a part of a larger memory: with an offset, with gaps, in another order."""
    if how == "offset":
        return torch.cat([local.new_zeros(3), local.flatten()])[3:].view(local.shape)
    if how == "gaps":
        return torch.stack([local, torch.zeros_like(local)], -1)[..., 0]
    return local.T.contiguous().T


def odd_memory(rank, world_size):
    spots = itertools.product((*PLAIN, "P sum"), repeat=2)
    for before, after in list(itertools.product(spots, repeat=2))[::5]:
        src, dst = (placed((2, 2), (5, 6), spot) for spot in (before, after))
        for how, dtype in (("offset", torch.float32), ("gaps", torch.float64), ("turned", torch.complex64)):
            parts = all_parts(src, dtype)
            local = within(parts.at(grid((2, 2))[rank]), how)
            x = DTensor.from_local(local, device_mesh((2, 2)), src.placements, shape=src.shape)
            moved = x.redistribute(placements=dst.placements).to_local()
            torch.testing.assert_close(moved, simulated(parts, dst)[rank])
    return True


def test_locals_of_odd_memory():
    assert run_ranks(odd_memory, 4) == [True] * 4


@pytest.mark.parametrize("world_size", [2, 4])
def test_fewer_rows_than_ranks_and_empty(world_size):
    assert run_ranks(small_pairs, world_size) == [True] * world_size


def two_axes(rank, world_size):
    for before, after in itertools.product(itertools.product((*PLAIN, "P sum"), repeat=2), repeat=2):
        check_move(rank, placed((2, 2), (5, 3), before), placed((2, 2), (5, 3), after))
    rng = random.Random(0)
    for _ in range(60):
        ops = rng.choice((("sum", "avg"), ("max",), ("product",), ()))
        shape = [rng.randrange(6) for _ in range(rng.randrange(4))]
        src, dst = deal(rng, (2, 2), shape, partial_ops=ops), deal(rng, (2, 2), shape, partial_ops=("sum", "avg"))
        check_move(rank, src, dst)
    return True


def test_two_axes():
    assert run_ranks(two_axes, 4) == [True] * 4


def dtypes(rank, world_size):
    kinds = ("R", "S0", "S1", "S0 sizes", "S1 pieces")
    reducing = {
        torch.bool: (),
        torch.uint8: ("P sum", "P max"),
        torch.int8: ("P sum", "P product"),
        torch.int16: ("P sum", "P max", "P min"),
        torch.int32: ("P sum",),
        torch.int64: ("P sum", "P product"),
        torch.float16: ("P sum", "P avg", "P max"),
        torch.bfloat16: ("P sum", "P avg", "P min"),
        torch.complex64: ("P sum", "P avg", "P product"),
        torch.complex128: ("P sum",),
    }
    for dtype, more in reducing.items():
        for before, after in itertools.product((*kinds, *more), repeat=2):
            check_move(rank, placed((2, 2), (5, 3), [before, "R"], 1), placed((2, 2), (5, 3), [after, "R"], 2), dtype)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64):
        check_bits(torch.arange(30).view(5, 6).to(dtype), device_mesh((2, 2)))
    return True


def check_bits(whole, mesh):
    """Values that torch only copies arrive as they are."""
    spots = [[Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Replicate()], [Replicate(), Shard(1)]]
    for before, after in itertools.permutations(spots, 2):
        moved = distribute_tensor(whole, mesh, before).redistribute(placements=after).full_tensor()
        assert torch.equal(moved.view(torch.uint8), whole.view(torch.uint8)), (whole.dtype, before, after)


def test_dtypes():
    assert run_ranks(dtypes, 4) == [True] * 4


def reductions(rank, world_size):
    """Reductions that backends lack: bitwise ones, and those of bools and small ints."""
    mesh = device_mesh((world_size,))
    found = {}
    for op in ("band", "bor", "bxor", "max", "min"):
        for dtype in (torch.bool, torch.int16, torch.uint8):
            part = torch.tensor([rank == 0, rank > 0, True, False, rank == 1]).to(dtype)
            found[op, str(dtype)] = DTensor.from_local(part, mesh, [Partial(op)]).full_tensor().long().tolist()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_reductions(world_size):
    even = world_size % 2 == 0
    expected = {
        "band": [0, 0, 1, 0, 0],
        "bor": [1, 1, 1, 0, 1],
        "bxor": [1, (world_size - 1) % 2, 0 if even else 1, 0, 1],
        "max": [1, 1, 1, 0, 1],
        "min": [0, 0, 1, 0, 0],
    }
    for found in run_ranks(reductions, world_size):
        for (op, what), value in found.items():
            assert value == expected[op], (op, what)


def nans(rank, world_size):
    nan = float("nan")
    part = torch.tensor([[1.0, nan, 3.0, 4.0], [nan, 2.0, 4.0, 4.0]][rank % 2])
    mesh = device_mesh((world_size,))
    return [
        DTensor.from_local(part.to(dtype), mesh, [Partial(op)]).full_tensor().isnan().tolist()
        for op in ("max", "min")
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_nan_stays_a_nan(world_size):
    assert run_ranks(nans, world_size) == [[[True, True, False, False]] * 6] * world_size


def twisted(rank, world_size):
    """Locals that are not contiguous: transposed, expanded, conjugated."""
    mesh = device_mesh((world_size,))
    whole = torch.randn(2 * world_size, 3, 4, generator=torch.Generator().manual_seed(0))
    mine = whole.narrow(0, 2 * rank, 2)
    for places in ([Replicate()], [Shard(1)], [Shard(2)], [Shard(0)]):
        for local in (mine.transpose(0, 2).contiguous().transpose(0, 2), mine):
            x = DTensor.from_local(local, mesh, [Shard(0)])
            assert torch.equal(x.redistribute(placements=places).full_tensor(), whole)
        x = DTensor.from_local(mine[:, :, :1].expand(2, 3, 4), mesh, [Shard(0)])
        assert torch.equal(x.redistribute(placements=places).full_tensor(), whole[:, :, :1].expand(-1, 3, 4))
        x = DTensor.from_local(torch.complex(mine, -mine).conj(), mesh, [Shard(0)])
        assert torch.equal(x.redistribute(placements=places).full_tensor(), torch.complex(whole, whole))
    x = DTensor.from_local(mine.transpose(0, 2), mesh, [Partial()])
    assert torch.allclose(x.full_tensor(), sum(whole.split(2)).transpose(0, 2))
    assert x.full_tensor().is_contiguous()
    return True


@pytest.mark.parametrize("world_size", [2, 4])
def test_locals_that_are_not_contiguous(world_size):
    assert run_ranks(twisted, world_size) == [True] * world_size


def copies(rank, world_size):
    """Layouts on a process group stay one object through copies; a mesh made twice gives equal results."""
    mesh = device_mesh((2, 2))
    layout = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0), Replicate()]).layout
    assert copy.copy(layout) is layout and copy.deepcopy(layout) is layout
    return layout.local_shape(rank)


def test_copies_of_a_layout():
    assert run_ranks(copies, 4) == [(3, 3), (3, 3), (2, 3), (2, 3)]


# -- from_local --------------------------------------------------------------------------------------------
def uneven_locals(rank, world_size):
    mesh = device_mesh((4,))
    rows = [3, 0, 5, 2]
    x = DTensor.from_local(torch.full((rows[rank], 2), float(rank)), mesh, [Shard(0)])
    assert x.shape == (10, 2) and x.placements == (Shard(0, sizes=(3, 0, 5, 2)),)
    whole = torch.cat([torch.full((n, 2), float(i)) for i, n in enumerate(rows)])
    assert torch.equal(x.full_tensor(), whole)
    x = DTensor.from_local(torch.full((2, 3 if rank < 3 else 1), float(rank)), mesh, [Shard(-1)])
    assert x.shape == (2, 10) and x.placements == (Shard(1),)  # what torch.chunk would give
    square = device_mesh((2, 2))
    x = DTensor.from_local(torch.full((rank + 1,), float(rank)), square, [Shard(0), Shard(0)])
    assert x.shape == (10,)
    assert x.full_tensor().tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    told = [Shard(0), Shard(0, sizes=(2, 2))]
    x = DTensor.from_local(torch.full((2,), float(rank)), square, told)
    assert x.full_tensor().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    x = DTensor.from_local(torch.full((rank // 2 + 1, 2), float(rank)), square, [Shard(0), Partial()])
    assert x.full_tensor()[:, 0].tolist() == [1, 5, 5]
    x = DTensor.from_local(torch.ones(2), square, [Shard(0), Shard(0)], assume_even=True)
    assert x.shape == (8,)
    return True


def test_from_local_finds_the_true_shape():
    assert run_ranks(uneven_locals, 4) == [True] * 4


def checked_locals(rank, world_size):
    """run_check: replicas come from the first coordinate, and their gradient still reaches the local tensor."""
    mesh = device_mesh((2, 2))
    local = torch.full((2,), float(rank), requires_grad=True)
    x = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=True)
    values = x.full_tensor().tolist()
    assert x.requires_grad
    x.full_tensor().square().sum().backward()
    return values, local.grad.tolist()


def test_from_local_run_check_keeps_the_gradient():
    found = run_ranks(checked_locals, 4)
    assert [grad for _, grad in found] == [[0, 0], [0, 0], [4, 4], [4, 4]]


def checked_values(rank, world_size):
    local = torch.full((2,), float(rank))
    x = DTensor.from_local(local, device_mesh((2, 2)), [Shard(0), Replicate()], run_check=True)
    return x.full_tensor().tolist(), local.tolist()


def test_from_local_run_check_takes_replicas_from_the_first():
    assert run_ranks(checked_values, 4) == [([0.0, 0.0, 2.0, 2.0], [float(rank)] * 2) for rank in range(4)]


def bad_locals(rank, world_size):
    """What each mistake says; every rank says it, so none is left waiting."""
    mesh, line = device_mesh((2, 2)), device_mesh((4,))
    one = torch.ones(2, 3)
    mistakes = {
        "replicas differ": lambda: DTensor.from_local(torch.ones(2 + rank % 2, 3), mesh, [Shard(0), Replicate()]),
        "other dim differs": lambda: DTensor.from_local(torch.ones(2, 3 + rank), line, [Shard(0)]),
        "dims differ": lambda: DTensor.from_local(torch.ones([2] * (1 + rank // 3)), line, [Shard(0)]),
        "dims differ, cut on the second": lambda: DTensor.from_local(
            torch.ones([2] * (1 + rank // 3)), line, [Shard(1)]
        ),
        "not the sizes given": lambda: DTensor.from_local(one, line, [Shard(0, sizes=(1, 2, 3, 2))]),
        "checked replicas differ": lambda: DTensor.from_local(
            torch.ones(2 + rank % 2), line, [Replicate()], run_check=True
        ),
        "not the shape given": lambda: DTensor.from_local(one, line, [Shard(0)], shape=(9, 3)),
        "dim": lambda: DTensor.from_local(one, line, [Shard(2)]),
    }
    said = {}
    for name, mistake in mistakes.items():
        with pytest.raises(LayoutError) as caught:
            mistake()
        said[name] = str(caught.value)
    return said


def test_from_local_mistakes_are_named_on_every_rank():
    everyone = run_ranks(bad_locals, 4)
    for said in everyone:
        assert "must agree hold different sizes of dim 0: 2 and 3 at coordinates (0, 1)" in said["replicas differ"]
        assert "ranks that must agree hold different sizes of dim 1: 3 and 4" in said["other dim differs"]
        assert "the ranks differ in dims: (2,) and, at (3,), (2, 2)" in said["dims differ"]
        assert "the ranks differ in dims: (2,) and, at (3,), (2, 2)" in said["dims differ, cut on the second"]
        assert "sizes=(1, 2, 3, 2)): the ranks hold [2, 2, 2, 2] indices of dim 0" in said["not the sizes given"]
        assert "ranks that must agree hold different sizes of dim 0: 2 and 3" in said["checked replicas differ"]
        assert "shape=(9, 3): under [Shard(dim=0)] the rank at" in said["not the shape given"]
        assert "placements[0] = Shard(dim=2): dim 2 is out of range for a local tensor of 2 dims" in said["dim"]


# -- accounting --------------------------------------------------------------------------------------------
def accounts(rank, world_size):
    """What the ledger records here is what the plan says of this rank."""
    entries = []
    recorder = Recorder(entries.append)
    recorder.open()
    try:
        rng = random.Random(1)
        for _ in range(30):
            src, dst = (deal(rng, (2, 2), (5, 3), partial_ops=("sum",)) for _ in range(2))
            local = all_parts(src).at(grid((2, 2))[rank])
            x = DTensor.from_local(local, device_mesh((2, 2)), src.placements, shape=(5, 3))
            entries.clear()
            y = x.redistribute(placements=dst.placements)
            plan = plan_move(x.layout, y.layout)
            assert sum(entry.bytes for entry in entries) == plan.bytes_in(rank)
            assert [entry.kind for entry in entries] == [step.kind for step in plan.steps if step.kind != "local"]
            assert plan.bytes_in(rank) == plan_move(src.layout(), dst.layout()).bytes_in(rank)
    finally:
        recorder.close()
    return True


def test_the_ledger_records_what_the_plan_says():
    assert run_ranks(accounts, 4) == [True] * 4


# -- failures ----------------------------------------------------------------------------------------------
def failures(rank, world_size):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    whole = torch.arange(16.0).view(4, 4)
    x = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    part = DTensor.from_local(whole, mesh, [Replicate(), Partial()])
    everywhere = DTensor.from_local(whole, device_mesh((4,), ("all",)), [Partial()])
    swap = "recv"  # of gloo's functions the quickest, so that others are made of it
    calls = {
        "gather": (swap, lambda: x.full_tensor()),
        "reduce of two": (swap, lambda: part.full_tensor()),
        "reduce of four": ("all_reduce", lambda: everywhere.full_tensor()),
        "swap": (swap, lambda: x.redistribute(placements=[Shard(1), Replicate()])),
        "broadcast": ("broadcast", lambda: distribute_tensor(whole, mesh, [Replicate(), Replicate()])),
        "scatter": ("scatter", lambda: distribute_tensor(whole, mesh, [Replicate(), Shard(0)])),
    }
    said = {}
    for name, (collective, call) in calls.items():
        owner = dist.ProcessGroup if collective == swap else dist
        with mock.patch.object(owner, collective, side_effect=RuntimeError("connection closed by peer")):
            with pytest.raises(CommError) as caught:
                call()
            assert isinstance(caught.value.__cause__, RuntimeError)
            said[name] = str(caught.value)
    leaf = distribute_tensor(whole, mesh, [Replicate(), Replicate()]).requires_grad_()
    y, grad = (
        leaf.redistribute(placements=[Shard(0), Replicate()]),
        distribute_tensor(whole, mesh, [Shard(0), Replicate()]),
    )
    with mock.patch.object(dist.ProcessGroup, swap, side_effect=RuntimeError("timed out")):
        with pytest.raises(CommError) as caught:
            y.backward(grad)
        said["backward"] = str(caught.value)
    with mock.patch.object(dist, ALL_GATHER, side_effect=RuntimeError("timed out")):
        with pytest.raises(CommError) as caught:
            DTensor.from_local(whole, mesh, [Shard(0), Replicate()])
        said["from_local"] = str(caught.value)
    assert torch.equal(x.full_tensor(), whole) and x.placements == (Shard(0), Replicate())  # as it was
    return said


def test_a_failed_collective_names_itself_and_its_axis():
    for rank, said in enumerate(run_ranks(failures, 4)):
        coords = grid((2, 2))[rank]
        peer = "connection closed by peer"
        assert said["gather"] == "full_tensor: " + failed("all_gather", "dp", coords, peer)
        assert said["reduce of two"] == "full_tensor: " + failed("all_reduce", "tp", coords, peer)
        assert said["reduce of four"] == "full_tensor: " + failed("all_reduce", "all", (rank,), peer, ranks=4)
        assert said["swap"] == "redistribute: " + failed("all_to_all", "dp", coords, peer)
        assert said["broadcast"] == failed("broadcast", "dp", coords, peer)
        assert (
            said["scatter"] == "distribute_tensor: " + failed("scatter", "tp", coords, peer)
            or "broadcast" in said["scatter"]
        )
        assert said["backward"] == "redistribute (backward): " + failed("all_gather", "dp", coords, "timed out")
        assert said["from_local"] == "from_local: " + failed("all_gather", "tp", coords, "timed out")


def failed(kind, axis, coords, why, ranks=2):
    return f"{kind} on mesh axis {axis!r} ({ranks} ranks) failed at coordinates {coords}: {why}"


def outside(rank, world_size):
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
    if rank < 2:
        return distribute_tensor(torch.ones(4), mesh, [Shard(0)]).to_local().shape
    with pytest.raises(MeshError, match=f"rank {rank} is outside of the mesh of ranks .* on those ranks only"):
        distribute_tensor(torch.ones(4), mesh, [Shard(0)]).tolist()
    return None


def test_a_rank_outside_of_the_mesh():
    assert run_ranks(outside, 4) == [(2,), (2,), None, None]


def policies_of_loops(rank, world_size):
    """How each event loop of gloo is scheduled, that of a group made after the mesh too."""
    x = distribute_tensor(torch.ones(4), device_mesh((2,)), [Shard(0)])
    later = dist.new_group([0, 1])
    x.redistribute(placements=[Replicate()])
    along_group(later, torch.device("cpu"))
    tasks = [task for task in Path("/proc/self/task").iterdir() if "gloo_tcp_loop" in (task / "comm").read_text()]
    return {os.sched_getscheduler(int(task.name)) for task in tasks}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="another system than Linux")
def test_event_loops_push_nobody_off_its_core():
    assert run_ranks(policies_of_loops, 2) == [{os.SCHED_BATCH}] * 2
