"""Pairs of gloo processes that end with moves under way: python -m tests.exits ROUNDS prints how many ended badly.

Each pair is forked from this process, so that importing torch, and what moves load, is paid for once.
"""

import gc
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate

SECONDS = 100  # on a busy machine
KINDS = {
    "gather": lambda x, parts: x.redistribute(placements=[Replicate()], async_op=True),
    "all_to_all": lambda x, parts: x.redistribute(placements=[Shard(1)], async_op=True),
    "all_reduce": lambda x, parts: parts.redistribute(placements=[Replicate()], async_op=True),
    "reduce_scatter": lambda x, parts: parts.redistribute(placements=[Shard(0)], async_op=True),
    "waited": lambda x, parts: x.redistribute(placements=[Replicate()], async_op=True).wait(),
    "none": lambda x, parts: None,
}
kept = []  # alive while the interpreter ends


def end(rank, folder, kind, drop, destroy):
    """What one of two processes does."""
    noise = os.open(f"{folder}/noise{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(noise, 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(4.0 * 2**15).view(-1, 4), mesh, [Shard(0)])
    moved = KINDS[kind](x, DTensor.from_local(torch.ones(1000, 1000), mesh, [Partial()]))
    if not drop:
        kept.append(moved)
    del moved
    if destroy:
        dist.destroy_process_group()


def warm_up():
    """Load what moves need. A simulated mesh starts no thread, which a fork would lose."""
    mesh = simulate(2)
    parts = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    for kind in KINDS.values():
        kind(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]), parts)


def ended_badly(kind, drop, destroy):
    """How the processes of a pair ended that did not end well."""
    folder = tempfile.mkdtemp()  # no context manager: the forked processes would leave it too
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            end(rank, folder, kind, drop, destroy)
            sys.exit(0)
        pids.append(pid)
    deadline, bad = time.monotonic() + SECONDS, []
    for rank, pid in enumerate(pids):
        found, status = os.waitpid(pid, os.WNOHANG)
        while not found and time.monotonic() < deadline:
            time.sleep(0.005)
            found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            os.kill(pid, 9)
            status = os.waitpid(pid, 0)[1]
        if status:
            bad.append((kind, drop, destroy, rank, status, Path(folder, f"noise{rank}").read_text()[-300:]))
    shutil.rmtree(folder)
    return bad


def main(rounds):
    warm_up()
    gc.freeze()  # most of the time of an end would be the collection of all that torch has loaded
    ways = [(kind, drop, destroy) for kind in KINDS for drop in (False, True) for destroy in (True, False)]
    ways = [(kind, drop, destroy) for kind, drop, destroy in ways if kind != "none" or not drop]  # of nothing to drop
    bad = [one for _ in range(rounds) for way in ways for one in ended_badly(*way)]
    print(f"{rounds * len(ways)} pairs, {len(bad)} processes ended badly", *bad, sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
