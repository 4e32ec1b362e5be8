"""Four real NCCL ranks, on as many GPUs as there are: also on one. Skipped where there is none; `make test-nccl`.

NCCL refuses two ranks on one GPU of one host. Where GPUs are too few, each rank says that it is on a host of its own,
and NCCL connects the ranks by sockets: the collectives, streams and errors are real, the times are not.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

RANKS = 4
ROOT = Path(__file__).parents[1]
SHARED = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL: none here"
)


def environment(rank, port, gpus):
    """That of a rank under torchrun, and what lets ranks share a GPU where they must."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    shared = SHARED | {"NCCL_HOSTID": f"host{rank}"} if gpus < RANKS else {}
    return os.environ | ranks | shared | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def on_ranks(module, seconds=300):
    """What each rank printed. If one fails or time is up, the others are ended too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, gpus = [sys.executable, "-m", module], torch.cuda.device_count()
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(r, port, gpus),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(RANKS)
    ]
    deadline = time.monotonic() + seconds
    try:
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > deadline or any(rank.poll() for rank in ranks):
                break
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.communicate()[0] for rank in ranks], [rank.returncode for rank in ranks]


def test_four_ranks():
    said, codes = on_ranks("tests.nccl_program")
    assert codes == [0] * RANKS, "\n".join(f"rank {r} ({c}): {s[-3000:]}" for r, (c, s) in enumerate(zip(codes, said)))
    assert all(text.strip().endswith("done") for text in said)
