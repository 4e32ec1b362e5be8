"""The thread that does asynchronous saves: every failure is told, and forked processes wait for none."""

import os
import signal

import pytest
import torch

from shardwise.checkpoint import background
from shardwise.checkpoint.background import SaveHandle
from shardwise.checkpoint.world import World
from shardwise.errors import CheckpointError


def test_each_failed_save_is_told_once():
    writer = background._Writer()
    for path in ("first", "well", "second"):
        handle = SaveHandle(path)
        handle._end(None if path == "well" else OSError("no space"))
        writer.handles.append(handle)
    for path in ("first", "second"):
        assert writer.has_failed()
        with pytest.raises(CheckpointError, match=f"save to {path} failed: no space"):
            writer.wait()
    assert not writer.has_failed()
    writer.wait()


def test_a_forked_process_waits_for_no_save_of_its_parent():
    handle = SaveHandle("under way")
    background._writer.handles.append(handle)
    try:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            background.wait_for_all(World(0, (0,), None))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        background._writer.handles.remove(handle)


def test_staging_rooms_begin_at_a_large_page_and_can_be_written():
    small, large = background.staging_room(100), background.staging_room(5 << 20)
    assert small.numel() == 100 and large.numel() == 5 << 20
    assert large.data_ptr() % (2 << 20) == 0
    large.fill_(7)
    assert int(large.sum(dtype=torch.int64)) == 7 * (5 << 20)


def test_memory_that_is_kept_counts_for_the_cap():
    writer = background._Writer()
    large = writer._take(5000, 1000)  # more than the cap: allowed where it is alone, but not kept
    writer._give(large, 1000)
    assert writer.free == []
    first, second = writer._take(600, 1100), writer._take(500, 1100)
    writer._give(first, 1100)
    assert writer.free[0] is first  # 500 in use, 600 kept
    third = writer._take(400, 1000)  # with the 600 that are kept it would be 1,100
    assert third.numel() == 400 and writer.used == 900 and writer.free == []
    writer._give(second, 1000)
    assert writer._take(300, 1000) is second  # what fits is used again
