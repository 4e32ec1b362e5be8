"""Moves that go on while the program does: the first use waits, and two of them may be under way at once."""

import gc
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import CommError, DTensor, MoveError, Partial, Replicate, Shard, distribute_tensor, simulate
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
    real = transfer.start_sends

    def logged(*args, **kwargs):
        work = real(*args, **kwargs)
        works.append("begun")
        return Logged(work, works)

    transfer.start_sends = logged
    try:
        x = distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)])
        y = distribute_tensor(torch.arange(32.0).view(8, 4) * 2, mesh, [Shard(1)])
        a, b = (
            x.redistribute(placements=[Shard(1)], async_op=True),
            y.redistribute(placements=[Shard(0)], async_op=True),
        )
        meanwhile = torch.ones(3).sum()
        assert meanwhile == 3 and works == ["begun", "begun"]
        later = b + 1, a.wait()
        assert works == ["begun", "begun", "done", "done"]
    finally:
        transfer.start_sends = real
    return sum(x.full_tensor().sum() for x in later).item()


class Logged:
    """A work that notes when it has been waited for."""

    def __init__(self, work, log):
        self.work, self.log = work, log

    def is_completed(self):
        return True

    def wait(self):
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
                deadline = time.monotonic() + 30  # gloo's thread lets go a little later
                while alive() is not None and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert alive() is None, f"{placements} async_op={async_op}"
    finally:
        gc.enable()
    return True


def test_nothing_kept():
    assert run_ranks(nothing_kept, 2) == [True] * 2


class Broken:
    """A work whose peer is gone."""

    def __init__(self, work):
        self.work = work

    def is_completed(self):
        return self.work.is_completed()

    def wait(self):
        self.work.wait()
        raise RuntimeError("Connection reset by peer")


def begun_with(work):
    """A tensor, and a move of it that is under way and whose work is replaced."""
    x = distribute_tensor(torch.arange(8.0).view(4, 2), device_mesh((2,)), [Shard(0)])
    real = transfer.start_sends
    with mock.patch.object(transfer, "start_sends", lambda *args, **kwargs: work(real(*args, **kwargs))):
        return x, x.redistribute(placements=[Shard(1)], async_op=True)


def failing_each_time(rank, world_size):
    x, y = begun_with(Broken)
    said = []
    for use in (lambda: y + 1, lambda: y.wait(), lambda: y.to_local(), lambda: y.full_tensor()):
        with pytest.raises(CommError, match="Connection reset by peer") as caught:
            use()
        said.append(str(caught.value))
    assert len(set(said)) == 1 and y.shape == (4, 2)
    assert "failed" in repr(y)
    return torch.equal((x + 1).redistribute(placements=[Shard(1)]).full_tensor(), torch.arange(8.0).view(4, 2) + 1)


def test_a_failed_move_fails_each_time():
    assert run_ranks(failing_each_time, 2) == [True] * 2


WAYS = (
    ([Shard(0)], [Shard(1)]),
    ([Shard(0)], [Replicate()]),
    ([Partial()], [Replicate()]),
    ([Partial()], [Shard(0)]),
    ([Replicate()], [Shard(0)]),
    ([Partial("max")], [Replicate()]),
)


def written_meanwhile(rank, world_size):
    mesh = device_mesh((2,))
    for rows in (4, 40_000):
        for before, after in WAYS:
            for write in (lambda x: x.add_(1), lambda x: x[:1].zero_(), lambda x: x.to_local().mul_(3)):
                x = DTensor.from_local(torch.ones(rows, 4), mesh, before)
                want = x.redistribute(placements=after).full_tensor()
                y = x.redistribute(placements=after, async_op=True)
                write(x)
                try:
                    right = torch.equal(y.full_tensor(), want)
                except MoveError as error:
                    assert "was written to" in str(error) and "test_async.py:" in str(error)
                    with pytest.raises(MoveError, match="was written to"):
                        y + 1
                else:
                    assert right, (before, after)
    with torch.inference_mode():
        x = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
        y = x.redistribute(placements=[Shard(1)], async_op=True)
        x.add_(1)
        assert (y.full_tensor() == 1).all()
    return True


def test_a_write_before_the_wait_is_no_silent_change():
    assert run_ranks(written_meanwhile, 2) == [True] * 2


def waited_for_anyhow(rank, world_size):
    """Out of order, by several threads at once, and some of them never."""
    mesh = device_mesh((2,))
    x = distribute_tensor(torch.arange(8000.0).view(-1, 4), mesh, [Shard(0)])
    coming = [x.redistribute(placements=[p], async_op=True) for p in (Shard(1), Replicate(), Shard(1), Replicate())]
    del coming[1]
    values, threads = [], []
    for y in reversed(coming):
        threads += [threading.Thread(target=lambda y=y: values.append(y.to_local().sum().item())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(values) == 9
    assert all(torch.equal(y.full_tensor(), torch.arange(8000.0).view(-1, 4)) for y in coming)
    assert all(type(y) is DTensor and "_coming" not in vars(y) for y in coming)
    return True


def test_waits_by_several_threads_and_out_of_order():
    assert run_ranks(waited_for_anyhow, 2) == [True] * 2


class Interrupted(Broken):
    def wait(self):
        self.work.wait()
        raise KeyboardInterrupt


def interrupted(rank, world_size):
    _, y = begun_with(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        y.wait()
    for _ in range(2):
        with pytest.raises(MoveError, match="ended by a KeyboardInterrupt"):
            y.to_local()
    return True


def test_an_interrupted_wait():
    assert run_ranks(interrupted, 2) == [True] * 2


def after_the_group_is_gone(rank, world_size):
    group = dist.new_group(range(world_size))
    mesh = DeviceMesh.from_group(group, "cpu")
    x = distribute_tensor(torch.arange(8000.0).view(-1, 4), mesh, [Shard(0)])
    coming = [x.redistribute(placements=[p], async_op=True) for p in (Shard(1), Replicate())]
    dist.barrier()
    dist.destroy_process_group(group)
    for y, want in zip(coming, (torch.arange(8000.0).view(-1, 4)[:, 2 * rank : 2 * rank + 2], None), strict=True):
        try:
            local = y.to_local()
        except CommError as error:
            assert "failed at coordinates" in str(error)
        else:
            assert torch.equal(local, torch.arange(8000.0).view(-1, 4) if want is None else want)
    return True


def test_waits_after_the_group_is_gone():
    assert run_ranks(after_the_group_is_gone, 2) == [True] * 2
