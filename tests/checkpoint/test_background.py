"""The thread that does asynchronous saves: every failure is told, and forked processes wait for none."""

import os
import signal

import pytest
import torch

from shardwise.checkpoint import background
from shardwise.checkpoint.background import SaveHandle
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
            background.wait_for_all()
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
