"""What stays behind: memory and latency over many steps, shapes, meshes and process groups.

    python benchmarks/leaks.py            # about ten minutes
    python benchmarks/leaks.py --quick    # a tenth of the counts

Each row does one thing `count` times. Growth is that of the resident memory over the second half; latency is the median
of the first and of the last tenth. Nothing is cleared by hand: what nobody uses must go by itself.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.progress import track
from torch import nn

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate

try:
    from ctypes import CDLL

    _trim: Callable[[int], int] = CDLL("libc.so.6").malloc_trim  # what is free goes back, or the figure is the heap's
except OSError:
    _trim = lambda pad: 0  # noqa: E731


def resident() -> int:
    gc.collect()
    _trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def measure(name: str, count: int, work: Callable[[int], object]) -> tuple[str, int, int, float, float]:
    times = []
    middle = 0
    steps = track(range(count), name, transient=True, disable=not sys.stdout.isatty(), update_period=1)
    for i in steps:
        if i == count // 2:
            middle = resident()
        began = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - began)
    tenth = max(count // 10, 1)
    ends = statistics.median(times[tenth : 2 * tenth] or times), statistics.median(times[-tenth:])
    return name, count, resident() - middle, *ends


def training() -> Callable[[int], object]:
    mesh = simulate((2, 2), axis_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    shardwise.distribute_module(net, mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), Replicate()])

    def step(i: int) -> None:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (i + 1)
        optimizer.step()

    return step


def shapes() -> Callable[[int], object]:
    mesh = simulate(4)

    def use(i: int) -> None:
        x = shardwise.ones(i % 97 + 1, i // 97 + 1, device_mesh=mesh, placements=[Shard(0)])
        (x * 2).redistribute(placements=[Shard(1)]).sum()

    return use


def meshes(i: int) -> None:
    mesh = simulate((2, 2), axis_names=("a", "b"), first_rank=4 * i + 4)
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0), Shard(1)]).requires_grad_()
    (x @ x.redistribute(placements=[Replicate(), Replicate()]).T).softmax(0).sum().backward()
    y = distribute_tensor(torch.ones(6), mesh["b"], [Shard(0)])
    y.redistribute(placements=[Replicate()])


def groups(i: int) -> None:
    group = dist.new_group([0])
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    x = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
    (x + 1).redistribute(placements=[Replicate()])
    DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]).redistribute(placements=[Shard(0)], async_op=True)
    dist.destroy_process_group(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part = 10 if options.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        init_device_mesh("cpu", (1,))
        rows = [
            ("training steps", 20_000, training),
            ("shapes", 10_000, shapes),
            ("simulated meshes", 1_000, lambda: meshes),
            ("process groups", 1_000, lambda: groups),
        ]
        print(f"{'what':<18} {'count':>7} {'growth of 2nd half':>19} {'first':>10} {'last':>10}")
        for name, count, make in rows:
            if options.only in name:
                what, n, growth, first, last = measure(name, count // part, make())
                print(f"{what:<18} {n:>7} {growth / 1024:>15.0f} KiB {first * 1e6:>7.0f} us {last * 1e6:>7.0f} us")
        print("cache entries:", {name: info.currsize for name, info in shardwise.cache_info().items()})
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
