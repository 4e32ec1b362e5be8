"""Loads by processes of one host, which share memory, and of several, which send messages or read for themselves."""

import os

import pytest
import torch

from shardwise import Replicate, Shard, checkpoint, distribute_tensor
from shardwise.checkpoint import shared, storage
from tests.workers import device_mesh, run_ranks

ROWS = 1500  # of 1 KiB: two blocks
PLACES = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "all": [Replicate()],
    "uneven": [Shard(0, sizes=(100, 0, 1399, 1))],
}


def value(name):
    return torch.arange(ROWS * 256, dtype=torch.float32).view(ROWS, 256) + len(name)


def load_all(rank, world_size, path, hosts, line, memory):
    kept = shared._host, storage.measured_storage
    shared._host = lambda: hosts[rank]
    shared._known.clear()
    if line is not None:
        from shardwise.checkpoint import source

        source.measured_storage = lambda path: line
    try:
        mesh = device_mesh((world_size,))
        into = {name: distribute_tensor(value(name) * 0, mesh, places) for name, places in PLACES.items()}
        before = sorted(os.listdir("/dev/shm"))
        done = checkpoint.load(path, into, memory=memory)
        assert sorted(os.listdir("/dev/shm")) == before
        for name, tensor in into.items():
            assert torch.equal(tensor.full_tensor(), value(name)), name
        assert done.plan.disk[rank] == done.bytes_read
        return done.bytes_read, done.plan.hosts, done.plan.direct, done.plan.peak
    finally:
        shared._host = kept[0]
        shared._known.clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("hosts") / "c"
    checkpoint.save(path, {name: value(name) for name in PLACES})
    return path


TOTAL = len(PLACES) * ROWS * 1024
SLOW, QUICK = storage.StorageLine(1.0, 1e3, True), storage.StorageLine(0.0, 1e12, True)


@pytest.mark.parametrize(
    ("hosts", "line", "memory", "reads"),
    [
        ("aaaa", None, 64 << 20, 1),
        ("aaaa", None, 5 << 20, 1),
        ("aabb", SLOW, 16 << 20, 1),
        ("abcd", SLOW, 64 << 20, 1),
        ("aabb", QUICK, 8 << 20, 2),
    ],
)
def test_hosts(saved, hosts, line, memory, reads):
    found = run_ranks(load_all, 4, saved, hosts, line, memory)
    read = sum(one for one, *_ in found)
    assert (read == TOTAL) if reads == 1 else TOTAL < read <= 2 * TOTAL
    for _, number, direct, peak in found:
        assert number == len(set(hosts)) and bool(direct) == (reads > 1) and peak <= memory
