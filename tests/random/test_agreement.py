"""Ranks whose generators drift apart after the first draw hear of it, all of them; and `use` is of one thread."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import CommError, Replicate
from tests.random.test_generator import numbers
from tests.workers import device_mesh, run_ranks

DRIFT = pytest.raises(CommError, match=r"draw different random numbers.*seen after \d+ draws.*shardwise.manual_seed")


def fresh_mesh(shape):
    """A mesh on which nothing was drawn yet: its axes have names that no other test uses."""
    fresh_mesh.count = getattr(fresh_mesh, "count", 0) + 1
    return device_mesh(shape, tuple(f"fresh{fresh_mesh.count}_{i}" for i in range(len(shape))))


def draws_until_drift(mesh, limit=300):
    """How many draws were handed out before the ranks were told."""
    for i in range(limit):
        try:
            shardwise.rand(3, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
        except CommError as error:
            assert "draw different random numbers" in str(error)
            return i
    return None


def after_the_first(rank, world_size, shape, stream):
    """One rank alone draws once more: the next draw on the mesh hands out nothing."""
    mesh = fresh_mesh(shape)
    with shardwise.random.use(stream):
        torch.manual_seed(3)
        shardwise.rand(4, 3, device_mesh=mesh)
        if rank == world_size - 1:
            torch.rand(1)
        with DRIFT:
            shardwise.rand(4, 3, device_mesh=mesh)
        torch.manual_seed(3)  # after that, the ranks may go on
        x = shardwise.rand(4, 3, device_mesh=mesh).full_tensor()
        assert draws_until_drift(mesh) is None
    return x.tolist()


@pytest.mark.parametrize("stream", ["philox", "torch"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_drift_after_the_first_draw(shape, stream):
    results = run_ranks(after_the_first, 2 ** len(shape), shape, stream)
    assert all(result == results[0] for result in results)


def much_later(rank, world_size):
    mesh = fresh_mesh((2, 2))
    torch.manual_seed(3)
    found = []
    for before in (50, 300):
        assert draws_until_drift(mesh, before) is None
        if rank == 1:
            torch.rand(1)
        found.append(draws_until_drift(mesh))
        torch.manual_seed(5)
    return found


def test_drift_much_later():
    results = run_ranks(much_later, 4)
    assert all(result == results[0] for result in results), "all ranks are told at the same draw"
    assert all(drawn is not None and drawn < 128 for drawn in results[0])


def before_a_step(rank, world_size):
    """No optimizer uses numbers on which the ranks differ."""
    mesh = fresh_mesh((world_size,))
    torch.manual_seed(3)
    weight = nn.Parameter(shardwise.rand(4, 3, device_mesh=mesh, placements=[Replicate()]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(20):
        F.dropout(weight, 0.5).sum().backward()
        optimizer.step()
    before = weight.detach().full_tensor().clone()
    if rank == 0:
        torch.rand(1)
    F.dropout(weight, 0.5).sum().backward()
    with DRIFT:
        optimizer.step()
    assert torch.equal(weight.detach().full_tensor(), before)
    torch.manual_seed(0)
    optimizer.zero_grad()
    F.dropout(weight, 0.5).sum().backward()
    optimizer.step()
    with shardwise.debug.ledger() as log:
        optimizer.step()
    assert not list(log), "nothing was drawn since the last comparison"


def test_drift_before_a_step():
    run_ranks(before_a_step, 2)


def warm_draws(rank, world_size):
    mesh = fresh_mesh((world_size,))
    for _ in range(8):
        shardwise.rand(3, device_mesh=mesh)
    with shardwise.debug.ledger() as log, shardwise.debug.CommDebugMode() as mode:
        for _ in range(64):
            shardwise.rand(3, device_mesh=mesh)
    return [(entry.op, entry.kind, entry.bytes) for entry in log], mode.get_total_counts()


def test_a_warm_draw_communicates_next_to_nothing():
    """After draws 16, 32 and 64, in the ledger, and no collective that torch's own tensors would not have."""
    assert run_ranks(warm_draws, 2) == [([("random", "all_reduce", 16)] * 3, 0)] * 2


def test_use_is_of_one_thread():
    torch.manual_seed(0)
    plain = torch.rand(6, 3)
    started, done = threading.Event(), threading.Event()
    found = []

    def other():
        shardwise.random.use("torch")
        started.set()
        done.wait(120)
        found.append(shardwise.random.generator.stream())

    thread = threading.Thread(target=other)
    thread.start()
    started.wait(120)
    torch.manual_seed(0)
    mine = numbers()
    with shardwise.random.use("philox"):
        done.set()
        thread.join()
    assert not torch.equal(mine, plain), "the other thread's choice is not ours"
    assert found == ["torch"], "and ours is not the other thread's"
