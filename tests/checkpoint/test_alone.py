"""What one rank alone meets is told to the others before they enter the next collective: nobody waits for it in vain."""

import threading

import pytest
import torch
import torch.distributed as dist

from shardwise import Replicate, Shard, checkpoint, distribute_tensor
from shardwise.checkpoint import Manager, background, foreign, loader, read, shared, world, write
from shardwise.checkpoint.background import SaveHandle
from tests.workers import device_mesh, run_ranks


def raised(call):
    """What a call raises here; then all ranks meet, so that a rank that is elsewhere shows."""
    try:
        call()
        text = None
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    met = torch.ones(1)
    dist.all_reduce(met)
    assert met.item() == dist.get_world_size()
    return text


def broken(*args, **kwargs):
    raise MemoryError("no room")


def run_alone(job, *args, ranks=2):
    return run_ranks(job, ranks, *args, timeout=20)


def state_of(world_size):
    x = torch.arange(21.0).view(7, 3)
    return {"w": distribute_tensor(x, device_mesh((world_size,)), [Shard(0)]), "n": 3}


def earlier_save_fails_late(rank, world_size, root, kind):
    state, manager = state_of(world_size), Manager(f"{root}/managed", sigterm=False)
    if rank == 1:  # it is under way when the next call begins, and fails here alone
        handle = SaveHandle("earlier")
        background._writer.handles.append(handle)
        threading.Timer(0.3, handle._end, [OSError("no space")]).start()
    calls = {"restore": lambda: manager.restore(state), "wait": manager.wait}
    text = raised(calls.get(kind, lambda: checkpoint.save(f"{root}/c", state, format=kind)))
    checkpoint.save(f"{root}/c", state)
    return text


@pytest.mark.parametrize("kind", ["shardwise", "dcp", "restore", "wait"])
def test_an_earlier_save_that_fails_on_one_rank_while_the_next_call_waits_for_it(tmp_path, kind):
    first, second = run_alone(earlier_save_fails_late, tmp_path, kind)
    assert "earlier asynchronous save failed on another rank" in first
    assert "asynchronous save to earlier failed: no space" in second


def staging_fails(rank, world_size, root, where, alone):
    state, handle = state_of(world_size), None
    checkpoint.save(f"{root}/c", state)
    with pytest.MonkeyPatch.context() as patch:
        if rank == alone:
            patch.setattr(*((background, "staging_room") if where == "room" else (write, "_tasks")), broken)
            background._writer.free.clear()
        handle = checkpoint.save(f"{root}/c", state, step=7, async_=True)  # returns on all ranks
        text = raised(handle.wait)
    second = raised(lambda: checkpoint.save(f"{root}/c", state, step=8))
    into = state_of(world_size)
    return text, second, checkpoint.load(f"{root}/c", into).step


@pytest.mark.parametrize("where, alone", [("room", 1), ("room", 0), ("tasks", 1)])
def test_staging_that_fails_on_one_rank(tmp_path, where, alone):
    for rank, (text, second, step) in enumerate(run_alone(staging_fails, tmp_path, where, alone)):
        assert "no room" in text and (rank == alone or alone == 0 or f"rank {alone}" in text)
        assert second is None and step == 8


def draft_fails(rank, world_size, root):
    state = state_of(world_size)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(write, "held", broken)
        return raised(lambda: checkpoint.save(f"{root}/c", state))


def test_a_save_that_fails_on_one_rank_before_it_writes(tmp_path):
    assert run_alone(draft_fails, tmp_path) == ["CheckpointError: rank 1: MemoryError: no room", "MemoryError: no room"]
    assert list(tmp_path.iterdir()) == []


def load_fails(rank, world_size, root, where):
    state, mesh = state_of(world_size), device_mesh((world_size,))
    checkpoint.save(f"{root}/c", state)
    into = {"w": distribute_tensor(torch.zeros(7, 3), mesh, [Replicate()]), "n": 0}
    with pytest.MonkeyPatch.context() as patch:
        if where == "a message":  # as between hosts
            patch.setattr(shared, "_host", lambda: str(rank))
            patch.setattr(shared, "_known", {})
        if rank == ALONE.get(where, 1):
            patch.setattr(*PLACES[where], broken)
        text = raised(lambda: checkpoint.load(f"{root}/c", into))
    untouched = not into["w"].full_tensor().any() and into["n"] == 0
    checkpoint.load(f"{root}/c", into)
    return text, untouched, into["n"]


PLACES = {
    "room for all": (read, "_room_like"),
    "shared memory": (shared.Sharing, "arena"),
    "copy into place": (read, "_moved"),
    "a message": (loader, "_room_for"),
}
ALONE = {"shared memory": 0}  # what is small is read by the first rank


@pytest.mark.parametrize("where", PLACES)
def test_a_load_that_fails_on_one_rank(tmp_path, where):
    found, alone = run_alone(load_fails, tmp_path, where), ALONE.get(where, 1)
    for rank, (text, untouched, n) in enumerate(found):
        before = "" if rank == alone else f"CheckpointError: rank {alone}: "
        assert text == f"{before}MemoryError: no room" and n == 3
        assert untouched or where == "copy into place"


def retention_fails(rank, world_size, root, async_):
    manager, state = Manager(root, keep=1, async_=async_, sigterm=False), state_of(world_size)
    manager.save(1, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manager, "_retain", broken)
        text = raised(lambda: (manager.save(2, state), manager.wait()))
    manager.save(3, state)
    manager.wait()
    return text, manager.steps()


@pytest.mark.parametrize("async_", [False, True])
def test_a_retention_that_fails_is_told_to_all(tmp_path, async_):
    for text, steps in run_alone(retention_fails, tmp_path, async_):
        assert "no room" in text and steps == [3]


def metrics_differ(rank, world_size, root):
    manager, state = Manager(root, keep=1, best="min", every=5, sigterm=False), state_of(world_size)
    for step in (5, 10, 15):  # as in programs whose first rank alone looks at the loss
        manager.save(step, state, metric=abs(step - 5.0) if rank == 0 else None)
    steps = manager.steps()
    return raised(lambda: manager.save(20 + rank, state)), raised(lambda: manager.save(20, state, force=rank == 1)), steps


def test_a_metric_of_the_first_rank_alone_and_arguments_that_differ(tmp_path):
    for step, force, steps in run_alone(metrics_differ, tmp_path):
        assert steps == [5, 15] and force is None
        assert "Manager.save: the ranks differ: steps 20 to 21" in step


def file_unseen(rank, world_size, root):
    """A file that the first rank sees and another one does not, as on hosts without a common folder."""
    x, mesh = torch.rand(1500, 256), device_mesh((world_size,))  # two blocks: each rank reads one
    into = {"w": distribute_tensor(x * 0, mesh, [Shard(0)])}
    checkpoint.save(f"{root}/c.pt", {"w": distribute_tensor(x, mesh, [Shard(0)])}, format="pt")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(foreign.torch, "load", broken)
        return raised(lambda: checkpoint.load(f"{root}/c.pt", into))


def test_a_file_that_one_rank_does_not_see(tmp_path):
    first, second = run_alone(file_unseen, tmp_path)
    assert first.startswith("CheckpointError: rank 1:") and "c.pt: no file of torch.save" in second


def groups_differ(rank, world_size, root):
    dist.new_group([0])  # which the first rank alone is in
    world._side_groups.clear()
    handle = checkpoint.save(f"{root}/c", state_of(world_size), step=5, async_=True)
    handle.wait()
    dist.barrier()
    return checkpoint.load(f"{root}/c", state_of(world_size)).step


def test_an_asynchronous_save_of_ranks_that_are_in_different_numbers_of_groups(tmp_path):
    assert run_alone(groups_differ, tmp_path) == [5, 5]
