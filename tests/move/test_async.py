"""Moves that go on while the program does: the first use waits, and two of them may be under way at once."""

import gc
import time
import weakref

import pytest
import torch

from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.move import transfer
from tests.workers import device_mesh, run_ranks

PAIRS = (
    ([Shard(0), Shard(1)], [Replicate(), Replicate()]),
    ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
    ([Partial(), Shard(0)], [Shard(1), Replicate()]),
    ([Partial(), Partial()], [Replicate(), Replicate()]),
    ([Partial(), Replicate()], [Shard(0), Replicate()]),
    ([Partial("max"), Shard(1)], [Replicate(), Shard(0)]),
    ([Partial("avg"), Shard(1)], [Replicate(), Shard(0)]),
    ([Replicate(), Replicate()], [Shard(0), Partial()]),
    ([Shard(0), Shard(0)], [Shard(0), Shard(0, sizes=((0, 3), (1, 1)))]),
)


def moved_both_ways(rank, world_size):
    mesh = device_mesh((2, 2))
    for before, after in PAIRS:
        for needs_grad in (False, True):
            whole = torch.arange(20.0, dtype=torch.float64).view(5, 4)
            values = [distribute_tensor(whole, mesh, before).requires_grad_(needs_grad) for _ in range(2)]
            now = values[0].redistribute(placements=after)
            later = values[1].redistribute(placements=after, async_op=True)
            assert isinstance(later, DTensor) and later.placements == now.placements and later.shape == now.shape
            assert torch.equal(later.to_local(), now.to_local())
            assert type(later) is DTensor
            if needs_grad:
                for x in (now, later):
                    (x.full_tensor() * whole).sum().backward()
                assert torch.equal(values[0].grad.full_tensor(), values[1].grad.full_tensor())
    return True


def test_same_as_at_once():
    assert run_ranks(moved_both_ways, 4) == [True] * 4


def two_at_once(rank, world_size):
    """Both are begun before either is waited for, and the program goes on meanwhile."""
    mesh = device_mesh((4,))
    works = []
    real = transfer.start_swap

    def slow(*args, **kwargs):
        work = real(*args, **kwargs)
        works.append("begun")
        return Slow(work, works)

    transfer.start_swap = slow
    try:
        x = distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)])
        y = distribute_tensor(torch.arange(32.0).view(8, 4) * 2, mesh, [Shard(1)])
        started = time.perf_counter()
        a, b = (
            x.redistribute(placements=[Shard(1)], async_op=True),
            y.redistribute(placements=[Shard(0)], async_op=True),
        )
        took = time.perf_counter() - started
        assert works == ["begun", "begun"] and took < Slow.SECONDS
        meanwhile = torch.ones(3).sum()
        assert meanwhile == 3 and works == ["begun", "begun"]
        later = b + 1, a.wait()
        assert works == ["begun", "begun", "done", "done"]
    finally:
        transfer.start_swap = real
    return sum(x.full_tensor().sum() for x in later).item()


class Slow:
    """A work that takes its time to be waited for."""

    SECONDS = 0.3

    def __init__(self, work, log):
        self.work, self.log = work, log

    def wait(self):
        time.sleep(self.SECONDS)
        self.work.wait()
        self.log.append("done")


def test_two_overlap():
    n = torch.arange(32.0)
    assert run_ranks(two_at_once, 4) == [((n * 2 + 1).sum() + n.sum()).item()] * 4


def never_used(rank, world_size):
    mesh = device_mesh((world_size,))
    x = distribute_tensor(torch.arange(4.0 * 2**15).view(-1, 4), mesh, [Shard(0)])  # large parts go one by one
    x.redistribute(placements=[Replicate()], async_op=True)
    return (x + 1).full_tensor().sum().item()


def test_what_nobody_waits_for_does_not_come_as_something_else():
    n = torch.arange(4.0 * 2**15)
    assert run_ranks(never_used, 4) == [(n + 1).sum().item()] * 4


@pytest.mark.parametrize("async_op", [False, True])
def test_simulated(async_op):
    mesh = simulate((2, 2))
    x = distribute_tensor(torch.arange(20.0).view(5, 4), mesh, [Shard(0), Shard(1)])
    y = x.redistribute(placements=[Replicate(), Shard(0)], async_op=async_op)
    assert torch.equal(y.full_tensor(), torch.arange(20.0).view(5, 4)) and y.wait() is y


def test_used_as_a_parameter_and_written():
    mesh = simulate(2)
    y = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]).redistribute(placements=[Shard(1)], async_op=True)
    y.add_(1)
    assert (y.full_tensor() == 1).all() and "DTensor" in repr(y)


def nothing_kept(rank, world_size):
    """What a move made dies with its last user, without a collection of cycles."""
    mesh = device_mesh((2,))
    x = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    gc.disable()
    try:
        for placements in ([Shard(1)], [Replicate()]):
            for async_op in (False, True):
                y = x.redistribute(placements=placements, async_op=async_op).wait()
                alive = weakref.ref(y._local)
                del y
                deadline = time.monotonic() + 2  # gloo's thread lets go a little later
                while alive() is not None and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert alive() is None, f"{placements} async_op={async_op}"
    finally:
        gc.enable()
    return True


def test_nothing_kept():
    assert run_ranks(nothing_kept, 2) == [True] * 2
