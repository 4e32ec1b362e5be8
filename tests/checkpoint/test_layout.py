"""Where tensors lie in files, and what is there of earlier saves while a new one is written."""

import errno
import os
import shutil
import threading

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError, commit
from shardwise.checkpoint.files import Entry, lay_out

PAGE = 4096
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_tensors_of_whole_pages_lie_on_pages_and_all_are_aligned():
    kinds = [(torch.float32, (3, 5)), (torch.float32, (64, 64)), (torch.uint8, (7,)), (torch.bfloat16, (2048, 3))]
    entries = [Entry(f"{n}.{i}", dtype, shape) for n in range(3) for i, (dtype, shape) in enumerate(kinds)]
    entries.append(Entry("empty", torch.float64, (0, 4)))
    (file,) = lay_out(entries)
    assert len(file.header) % PAGE == 0 and sorted(file.starts) == sorted(entry.name for entry in entries)
    at = len(file.header)
    for entry in sorted(entries, key=lambda entry: (file.starts[entry.name], entry.nbytes)):
        start = file.starts[entry.name]
        assert start == at and start % entry.dtype.itemsize == 0
        assert start % PAGE == 0 or entry.nbytes % PAGE
        at += entry.nbytes
    assert at == file.size


def saved(path, value):
    checkpoint.save(path, {"x": torch.full((5000,), value)})
    into = {"x": torch.zeros(5000)}
    checkpoint.load(path, into)
    assert bool((into["x"] == value).all())


@pytest.fixture
def slow_removal(monkeypatch):
    """What was replaced is removed by its thread once this event is set."""
    may_remove, remove = threading.Event(), shutil.rmtree

    def waiting(path, *given, **named):
        if str(path).endswith(".removed"):
            assert threading.current_thread() is not threading.main_thread()
            assert may_remove.wait(20)
        remove(path, *given, **named)

    monkeypatch.setattr(commit.shutil, "rmtree", waiting)
    yield may_remove
    may_remove.set()
    commit.settle_removals()


def left(folder):
    return [path for path in folder.iterdir() if path.name != "c"]


def test_a_save_does_not_wait_for_the_removal_of_what_an_earlier_one_replaced(tmp_path, slow_removal):
    for value in (1.0, 2.0, 3.0):
        saved(tmp_path / "c", value)
    assert len(left(tmp_path)) == 2
    slow_removal.set()
    assert commit.settle_removals() in (True, False) and left(tmp_path) == []


def test_a_save_waits_for_it_where_the_disk_has_no_room(tmp_path, slow_removal, monkeypatch):
    saved(tmp_path / "c", 1.0)
    saved(tmp_path / "c", 2.0)
    allocate = os.posix_fallocate

    def full(*given):
        if left(tmp_path) and any(path.name.endswith(".removed") for path in left(tmp_path)):
            slow_removal.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*given)

    monkeypatch.setattr(os, "posix_fallocate", full)
    saved(tmp_path / "c", 3.0)


def test_a_disk_that_is_full_is_said(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoint.save(tmp_path / "c", {"x": torch.ones(3)})
    assert list(tmp_path.iterdir()) == []


def test_a_lazy_parameter_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="saving '0.weight': the parameter has no shape before"):
        checkpoint.save(tmp_path / "c", torch.nn.Sequential(torch.nn.LazyLinear(3)))
