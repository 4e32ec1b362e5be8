"""Copies for asynchronous saves: whatever the tensors look like in memory, and however they lie beside each other."""

import mmap
import threading
import weakref

import torch

from shardwise import checkpoint
from shardwise.checkpoint import write
from shardwise.checkpoint.files import Entry
from shardwise.checkpoint.holders import Held
from shardwise.checkpoint.jobs import Task
from shardwise.checkpoint.staging import Staging, _together
from shardwise.layout.tiles import Tile


def as_task(values):
    tile = Tile((0,) * values.dim(), tuple(values.shape))
    return Task(Entry("x", values.dtype, tuple(values.shape)), 1, 0, [Held(tile, values)])


def test_copies_of_all_kinds_of_tensors():
    big = torch.arange(4000.0).view(40, 100)
    odd = torch.frombuffer(bytearray(range(13)), dtype=torch.uint8)[1:]
    values = [
        *big.split(7),  # they lie together
        big[3:9],  # in memory that others have too
        big.t(),
        big[:, ::3],
        big[5:5],
        torch.tensor(3.0),
        odd,
        odd[:8].view(torch.uint8),
        torch.frombuffer(bytearray(17), dtype=torch.uint8)[1:],
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([True, False]),
        torch.ones(5, dtype=torch.bfloat16)[1:],
    ]
    values += torch.arange(1 << 20).split([3, (1 << 20) - 3])  # longer than what is copied at once
    expected = [x.clone() for x in values]
    staging = Staging([as_task(x) for x in values])
    staged = staging.fill(torch.empty(staging.size, dtype=torch.uint8)).tasks()
    big.zero_(), odd.zero_()
    for task, x in zip(staged, expected, strict=True):
        ((_, copy),) = task.pieces
        assert copy.dtype == x.dtype and torch.equal(copy, x)
    # between two tensors that lie on the same page, or on neighbouring ones, there may be almost two pages
    assert staging.size < sum(x.numel() * x.element_size() for x in values) + 2 * mmap.PAGESIZE * len(values)


def test_pages_that_may_be_nobodys_are_not_read():
    page = mmap.PAGESIZE
    first, same, next_, behind = (0, 100), (page - 10, page), (page + 5, 2 * page), (3 * page, 3 * page + 1)
    assert _together([next_, first, same]) == [(0, 2 * page)]
    assert _together([behind, next_]) == [next_, behind]  # page 2 is in neither
    assert _together([(0, 4 * page), first, same]) == [(0, 4 * page)]
    assert _together([]) == []


def test_what_waits_to_be_written_keeps_nothing_of_the_program(tmp_path, monkeypatch):
    go, run = threading.Event(), write.run

    def slow(*args):
        assert go.wait(30)
        run(*args)

    monkeypatch.setattr(write, "run", slow)
    x, y = torch.arange(8.0), torch.arange(6.0).view(2, 3).t()
    handle = checkpoint.save(tmp_path / "x", {"x": x, "y": y}, async_=True)
    known = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [found() for found in known] == [None, None]
    go.set()
    handle.wait(30)
    into = {"x": torch.zeros(8), "y": torch.zeros(3, 2)}
    checkpoint.load(tmp_path / "x", into)
    assert torch.equal(into["x"], torch.arange(8.0)) and torch.equal(into["y"], torch.arange(6.0).view(2, 3).t())
