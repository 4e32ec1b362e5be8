"""What distribute_tensor and shard allocate: the source makes the parts, every other rank its own part only."""

import re
from pathlib import Path

import torch

from shardwise import Replicate, Shard, distribute_tensor
from shardwise import sharded as S
from tests.workers import device_mesh, run_ranks

SIDE, MEGABYTE = 4001, 1 << 20  # 61 megabytes


def kilobytes(name):
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def peak(call):
    """What a call returns, and the most bytes that the process had during it above those that it had before."""
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from now
    result = call()
    return result, (kilobytes("VmHWM") - before) * 1024


def distributed(rank, world, place, source):
    mesh, value = device_mesh((world,)), torch.arange(float(SIDE)).expand(SIDE, SIDE).contiguous()
    value.mul_(rank == source)
    distribute_tensor(torch.ones(8, 8), mesh, [place if place.is_replicate() else Shard(0)])  # connections
    laid, used = peak(lambda: distribute_tensor(value, mesh, [place], src_data_rank=source))
    local = laid.to_local()
    assert laid[17, 23:26].full_tensor().tolist() == [23, 24, 25]
    return used, local.nbytes, rank == source


def test_only_the_source_makes_parts():
    for place, source in ((Shard(0), 0), (Shard(1), 2), (Shard(0, sizes=(1000, 0, 2001, 1000)), 1), (Replicate(), 0)):
        found = run_ranks(distributed, 4, place, source)
        largest = max(own for _, own, _ in found)
        for used, _, is_source in found:
            most = 6 * largest if is_source and not place.is_replicate() else largest  # parts padded to one length
            assert used <= most + 4 * MEGABYTE, (place, used, largest, is_source)


def sharded(rank, world):
    value = torch.zeros(SIDE, SIDE).t()  # not contiguous: flattening it copies
    value.add_(rank == 1)
    spec = S.ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(world)])
    spec.shard(torch.ones(8, 8))
    st, used = peak(lambda: spec.shard(value, src_rank=1))
    assert bool((st.local_tensor() == 1).all())
    return used, st.local_tensor().nbytes


def test_shard_allocates_its_own_tile():
    for rank, (used, own) in enumerate(run_ranks(sharded, 4)):
        assert rank == 1 or used <= own + 4 * MEGABYTE, (rank, used, own)
