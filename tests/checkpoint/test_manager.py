"""`Manager` and asynchronous saves: what is kept, what is found again, and that no error gets lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint import CheckpointError, Manager, jobs, write
from tests.workers import device_mesh, run_ranks


def test_what_is_kept(tmp_path):
    manager = Manager(tmp_path, keep=2, every=10, best="min", sigterm=False)
    assert manager.latest() is None and manager.restore({"w": torch.zeros(2)}, default=-1) == -1
    for step in range(0, 61):
        manager.save(step, {"w": torch.full((2,), float(step))}, metric=abs(step - 20.0))
    assert manager.steps() == [20, 50, 60]
    assert manager.best_path() == manager.path(20) and manager.latest() == manager.path(60)
    into = {"w": torch.zeros(2)}
    assert manager.restore(into) == 60 and into["w"].tolist() == [60.0, 60.0]
    assert manager.restore(into, step=20) == 20 and into["w"].tolist() == [20.0, 20.0]


def test_the_best_of_saves_under_way(tmp_path, monkeypatch):
    """The metric of a save that has not ended yet is not forgotten when the next one is noted."""
    manager, state = Manager(tmp_path, keep=1, best="min", async_=True, sigterm=False), {"a": torch.ones(1)}
    go, run = threading.Event(), write.run
    monkeypatch.setattr(write, "run", lambda *args: (go.wait(60), run(*args)))
    for step, metric in enumerate([5.0, 0.0, 4.0, 3.0]):
        manager.save(step, state, metric=metric)
    go.set()
    manager.wait()
    assert manager.steps() == [1, 3] and manager.best_path() == manager.path(1)
    assert sorted(json.loads((tmp_path / "scores.json").read_text())) == ["1", "3"]


def test_leftovers_are_cleaned_and_not_taken(tmp_path):
    Manager(tmp_path, sigterm=False).save(1, {"w": torch.ones(1)})
    left = tmp_path / ".step-00000002.saving"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (tmp_path / "step-00000003").mkdir()  # without a manifest it is no checkpoint
    manager = Manager(tmp_path, sigterm=False)
    assert left.exists() and manager.latest() == manager.path(1)  # another program may be writing it
    manager.save(4, {"w": torch.ones(1)})
    assert not left.exists() and manager.steps() == [1, 4]


def test_a_manager_takes_nothing_from_a_save_that_is_under_way(tmp_path, monkeypatch):
    go, put = threading.Event(), jobs._put
    monkeypatch.setattr(jobs, "_put", lambda *args: (go.wait(60), put(*args))[1])
    handle = Manager(tmp_path, async_=True, sigterm=False).save(1, {"w": torch.ones(3)})
    while not list(tmp_path.glob(".*.saving")):
        time.sleep(0.01)
    other = Manager(tmp_path, async_=True, sigterm=False)
    second = other.save(2, {"w": torch.ones(3)})
    go.set()
    handle.wait(60)
    second.wait(60)
    assert other.steps() == [1, 2]


def test_metrics_that_cannot_be_read_are_not_forgotten(tmp_path):
    manager = Manager(tmp_path, keep=1, best="min", sigterm=False)
    for step in (1, 2):
        manager.save(step, {"w": torch.ones(1)}, metric=float(step))
    (tmp_path / "scores.json").write_text("{damaged")
    for call in (lambda: manager.save(3, {"w": torch.ones(1)}, metric=5.0), manager.best_path):
        with pytest.raises(CheckpointError, match="scores.json: the metrics cannot be read"):
            call()
    assert manager.path(1).exists()
    Manager(tmp_path, keep=None, sigterm=False).save(4, {"w": torch.ones(1)})  # looks at no metrics


def test_a_replaced_checkpoint_comes_back(tmp_path):
    checkpoint.save(tmp_path / "c", {"w": torch.ones(1)})
    os.rename(tmp_path / "c", tmp_path / ".c.replaced")  # killed between two renames
    into = {"w": torch.zeros(1)}
    checkpoint.load(tmp_path / "c", into)
    assert into["w"].item() == 1


def test_a_replaced_checkpoint_is_removed_while_the_program_goes_on(tmp_path, monkeypatch):
    go, remove = threading.Event(), shutil.rmtree
    checkpoint.save(tmp_path / "c", {"w": torch.ones(1)})
    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *args, **kwargs: (go.wait(60), remove(*args, **kwargs)))
        checkpoint.save(tmp_path / "c", {"w": torch.full((1,), 2.0)})
        into = {"w": torch.zeros(1)}
        checkpoint.load(tmp_path / "c", into)
        assert into["w"].item() == 2 and len(list(tmp_path.glob(".c.*.removed"))) == 1
        go.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


SAVES = [
    lambda root: checkpoint.save(root / "c", {"w": torch.ones(1)}),
    lambda root: Manager(root, sigterm=False).save(1, {"w": torch.ones(1)}),
]


@pytest.mark.parametrize("save", SAVES)
def test_what_was_left_of_a_replaced_checkpoint_is_removed(tmp_path, save):
    left = tmp_path / ".c.0123.removed"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    save(tmp_path)
    assert not left.exists()


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path, monkeypatch):
    go, put = threading.Event(), jobs._put
    monkeypatch.setattr(jobs, "_put", lambda *args: (go.wait(120), put(*args))[1])
    w = distribute_tensor(torch.arange(10.0), simulate(3), [Shard(0)])
    handle = checkpoint.save(tmp_path / "c", {"w": w, "n": 1}, async_=True)
    with torch.no_grad():
        w.zero_()
    assert not handle.done() and not (tmp_path / "c").exists()
    go.set()
    handle.wait()
    into = {"w": torch.zeros(10), "n": 0}
    checkpoint.load(tmp_path / "c", into)
    assert into["w"].tolist() == list(range(10))


def test_errors_of_asynchronous_saves_surface_once(tmp_path, monkeypatch):
    def broken(*args):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_put", broken)
        handle = checkpoint.save(tmp_path / "c", {"w": torch.ones(3)}, async_=True)
        while not handle.done():
            time.sleep(0.01)
    with pytest.raises(CheckpointError, match="asynchronous save to .*c failed: .*'w' at .*Input/output error"):
        checkpoint.save(tmp_path / "d", {"w": torch.ones(3)})
    checkpoint.save(tmp_path / "d", {"w": torch.ones(3)})
    assert os.listdir(tmp_path) == ["d"]


def test_the_cap_makes_saves_wait(tmp_path, monkeypatch):
    go, put = threading.Event(), jobs._put
    monkeypatch.setattr(jobs, "_put", lambda *args: (go.wait(120), put(*args))[1])
    state = {"w": torch.ones(1000)}
    first = checkpoint.save(tmp_path / "a", state, async_=True, staged_bytes=5000)
    begin = time.monotonic()
    threading.Timer(0.3, go.set).start()
    second = checkpoint.save(tmp_path / "b", state, async_=True, staged_bytes=5000)
    assert time.monotonic() - begin > 0.2
    first.wait()
    second.wait()


def managed(rank, world_size, root):
    manager = Manager(root, keep=2, async_=True, sigterm=False)
    mesh = device_mesh((world_size,))
    w = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
    for step in range(4):
        with torch.no_grad():
            w += 1
        manager.save(step, {"w": w, "step": step})
    manager.wait()
    into = {"w": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)]), "step": 0}
    assert manager.restore(into) == 3 and into["step"] == 3
    return into["w"].full_tensor().unique().tolist(), manager.steps()


def test_on_processes(tmp_path):
    assert run_ranks(managed, 2, tmp_path) == [([4.0], [2, 3])] * 2


STOPPED = """
import sys, time, torch
from shardwise.checkpoint import Manager
manager = Manager(sys.argv[1], every=1000)
print("ready", flush=True)
for step in range(1, 100000):
    time.sleep(0.01)
    manager.save(step, {"step": step})
    if manager.stopping:
        break
print(step, flush=True)
"""


def test_sigterm_saves(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", STOPPED, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=240)
    assert Manager(tmp_path, sigterm=False).steps() == [int(out)]


def test_kills_and_damage():
    """A small part of `benchmarks/crash.py`, in a process of its own: it forks."""
    script = os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks", "crash.py")
    done = subprocess.run([sys.executable, script, "--kills", "4", "--damages", "15"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 without a readable newest checkpoint" in done.stdout and ": 0 loaded without an error" in done.stdout


def fails_late(rank, world_size, path):
    """An asynchronous save that fails on rank 1, and ends there later than elsewhere."""
    kept = jobs._put

    def broken(*args):
        raise OSError(5, "Input/output error")

    if rank == 1:
        jobs._put = broken
    try:
        checkpoint.save(path, {"w": torch.ones(1 << 19)}, async_=True)
        time.sleep(0.5 * rank)
        for _ in range(3):
            checkpoint.save(f"{path}-next", {"w": torch.ones(2)}, async_=True)
    except CheckpointError as error:
        return str(error)
    finally:
        jobs._put = kept
    return None


def test_errors_of_asynchronous_saves_on_processes(tmp_path):
    for text in run_ranks(fails_late, 2, tmp_path / "c"):
        assert "asynchronous save" in text and "Input/output error" in text
