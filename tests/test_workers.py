"""The harness itself: what it returns, what it raises, and that it survives a rank that hangs or dies."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers import RankError, device_mesh, run_ranks

ROOT = Path(__file__).parents[1]


def describe(rank, world_size, *args):
    return rank, world_size, args, os.getpid()


def total(rank, world_size):
    value = torch.full((3,), float(rank))
    dist.all_reduce(value)
    return value


def total_over_an_axis(rank, world_size):
    mesh = device_mesh((2, world_size // 2), ("dp", "tp"))
    value = torch.tensor(rank)
    dist.all_reduce(value, group=mesh.get_group("dp"))
    return value.item()


def fail_everywhere(rank, world_size):
    raise ValueError(f"no good on {rank}")


def fail_on(rank, world_size, bad):
    if rank == bad:
        raise KeyError("just me")
    dist.barrier()


def sleep_on(rank, world_size, bad):
    if rank == bad:
        time.sleep(1000)
    return rank


def exit_on(rank, world_size, bad):
    if rank == bad:
        os._exit(7)
    dist.barrier()


def return_a_function(rank, world_size):
    return lambda: rank


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_unpicklable(rank, world_size):
    raise Unpicklable("this", "that")


def random_number(rank, world_size):
    return torch.rand(()).item(), torch.get_num_threads()


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_come_in_order_of_rank(world_size):
    results = run_ranks(describe, world_size, "a", 1)
    assert [result[:3] for result in results] == [(rank, world_size, ("a", 1)) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_are_real_and_stay(world_size):
    first = [result[3] for result in run_ranks(describe, world_size)]
    again = [result[3] for result in run_ranks(describe, world_size)]
    assert first == again
    assert len({os.getpid(), *first}) == world_size + 1


@pytest.mark.parametrize("world_size, expected", [(2, 1.0), (4, 6.0)])
def test_all_reduce(world_size, expected):
    for value in run_ranks(total, world_size):
        assert torch.equal(value, torch.full((3,), expected))


@pytest.mark.parametrize("world_size, expected", [(2, [1, 1]), (4, [2, 4, 2, 4])])
def test_mesh(world_size, expected):
    assert run_ranks(total_over_an_axis, world_size) == expected
    assert run_ranks(total_over_an_axis, world_size) == expected


def test_every_task_starts_from_one_seed_and_one_thread():
    assert len({*run_ranks(random_number, 4), *run_ranks(random_number, 2)}) == 1


def test_exception_names_rank_and_carries_the_remote_traceback():
    before = run_ranks(describe, 2)
    with pytest.raises(RankError, match="rank [01] of 2: ValueError: no good on [01]") as caught:
        run_ranks(fail_everywhere, 2)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in fail_everywhere" in str(caught.value)
    assert "also rank" in str(caught.value)
    assert run_ranks(describe, 2) == before  # all ranks failed at one place: they are in step, the pool stays


def test_exception_on_one_rank_does_not_wait_for_the_others():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 of 4: KeyError: 'just me'") as caught:
        run_ranks(fail_on, 4, 2)
    assert caught.value.rank == 2
    assert time.monotonic() - start < 600
    assert "also rank" in str(caught.value)
    assert len(run_ranks(total, 4)) == 4


def test_hang_is_killed_and_shows_where():
    before = run_ranks(describe, 2)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2: did not finish within 4 s") as caught:
        run_ranks(sleep_on, 2, 1, timeout=4)
    assert time.monotonic() - start < 60
    assert "in sleep_on" in str(caught.value)
    after = run_ranks(describe, 2)
    assert [result[:3] for result in before] == [result[:3] for result in after]
    assert not {result[3] for result in before} & {result[3] for result in after}


def test_death_is_noticed():
    with pytest.raises(RankError, match="rank 1 of 2: the process died with exit code 7"):
        run_ranks(exit_on, 2, 1)
    assert len(run_ranks(total, 2)) == 2


def test_unpicklable_exceptions_and_results_still_report():
    with pytest.raises(RankError, match="Unpicklable: this and that"):
        run_ranks(raise_unpicklable, 2)
    with pytest.raises(RankError, match="return_a_function.<locals>.<lambda>"):
        run_ranks(return_a_function, 2)


def test_function_must_be_importable():
    with pytest.raises(TypeError, match="top of a module"):
        run_ranks(lambda rank, world_size: rank, 2)


def test_workers_do_not_outlive_a_killed_parent():
    program = """
        import os, signal
        from tests.workers import run_ranks
        from tests.test_workers import describe
        if __name__ == "__main__":
            print(*[result[3] for result in run_ranks(describe, 2)], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2, result.stderr
    deadline = time.monotonic() + 100
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in pids)


def test_workers_are_daemons():
    run_ranks(describe, 2)
    assert all(child.daemon for child in multiprocessing.active_children())


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
