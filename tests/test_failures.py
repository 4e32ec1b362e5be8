"""A peer that dies or hangs ends the others with an error that names op and axis, within the group's time-out."""

import subprocess
import sys
import textwrap
import time

import pytest

SCRIPT = """
import datetime, os, sys, time
import torch, torch.distributed as dist
import shardwise
from shardwise import CommError, Replicate, Shard, distribute_tensor, init_device_mesh

rank, fate = int(sys.argv[1]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2, timeout=datetime.timedelta(seconds=4))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
if rank == 1:
    if fate == "dies":
        os._exit(3)
    time.sleep(60)
try:
    torch.cumsum(x, 0)
except CommError as error:
    print("CommError:", error, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_a_lost_peer_is_an_error(fate, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(SCRIPT))
    start = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(r), tmp_path / "store", fate],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        said, noise = ranks[0].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert "CommError: cumsum: all_reduce on mesh axis 'dp' (2 ranks) failed at coordinates (0,)" in said, noise
    assert time.monotonic() - start < 50
