"""A process that ends with moves under way ends well."""

import os
import shutil
import subprocess
import sys
import time

import pytest


@pytest.mark.timeout(900)  # each of its pairs has a limit of its own
def test_exits_with_moves_under_way():
    said = subprocess.run([sys.executable, "-m", "tests.exits", "1"], capture_output=True, text=True, timeout=880)
    assert said.stdout == "22 pairs, 0 processes ended badly\n", said.stdout + said.stderr


PROGRAM = """
import os, sys, torch, torch.distributed as dist
import shardwise as sw
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = sw.init_device_mesh("cpu", (2,))
print(sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)]).sum().full_tensor().item(), flush=True)
sys.stdin.read()
"""


def test_store_that_does_not_answer_keeps_no_process(tmp_path):
    """A FileStore whose folder is gone waits for minutes for it to come back; the end of a program does not."""
    folder = str(tmp_path / "world")
    os.mkdir(folder)
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", PROGRAM, folder, str(rank)], **options) for rank in range(2)]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["4.0\n"] * 2
        shutil.rmtree(folder)
        began = time.monotonic()
        for rank in ranks:
            rank.stdin.close()
        assert [rank.wait(120) for rank in ranks] == [0, 0]
        assert time.monotonic() - began < 100
    finally:
        for rank in ranks:
            rank.kill()
            rank.stdout.close()
