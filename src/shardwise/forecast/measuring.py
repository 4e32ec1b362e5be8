"""Measure a device and its host: how long kernels take by their sizes, and how long it takes to start them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from shardwise.forecast.grids import Grid
from shardwise.forecast.hardware import Figure, Hardware, HardwareError, Link, known
from shardwise.forecast.kernels import ATTENTION, MATMUL, MEMORY
from shardwise.forecast.measuring_host import LayOut, host_figures
from shardwise.forecast.measuring_kernels import (
    attention_grids,
    device_seconds,
    drain,
    memory_grids,
    product_grids,
)

_DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32, torch.bfloat16)}


def measured(
    device: str = "cuda", like: str | None = None, lay_out: LayOut | None = None
) -> Iterator[tuple[str, Hardware | None]]:
    """Measure this machine's device: yields (what was measured, None) after each part, and the description last.

    Args:
        device: "cuda" or "cpu".
        like: The known hardware whose links are taken over, since one device does not show them.
        lay_out: Lays a module out on a mesh of one rank, as data parallelism does: its hooks take the host's time.

    Raises:
        HardwareError: The device is not here.
    """
    if device.partition(":")[0] not in ("cuda", "cpu"):
        raise HardwareError(f"calibrate: device {device!r} cannot be measured; use --device cuda or --device cpu")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise HardwareError("calibrate: device 'cuda' is not here; use --device cpu, or run this where a GPU is")
    base = Hardware.load(like or ("h100-sxm" if where.type == "cuda" else known()[0]))
    how = f"torch {torch.__version__}"
    grids: dict[str, Grid] = {}
    dtypes = _DTYPES.get(where.type, (torch.float32,))
    attended = dtypes if where.type == "cpu" else (torch.bfloat16, torch.float32)
    for parts in (product_grids(where, dtypes, how), attention_grids(where, attended, how), memory_grids(where, how)):
        for name, grid in parts:
            grids[name] = grid
            yield name, None
    flops = {}
    for dtype in dtypes:
        said = str(dtype).removeprefix("torch.")
        grid = grids[f"{MATMUL} {said}"]
        flops[said] = Figure(_rate(grid, 2.0), "measured", f"the fastest of its matrix products, {how}")
    tiny = torch.zeros(1, device=where)
    launch = device_seconds(lambda: tiny.add_(1), where)
    host = host_seconds(tiny, where)
    hosts = {}
    for name, figure in host_figures(where, how, lay_out):
        hosts[name] = figure
        yield f"host: {name}", None
    memory = torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else base.memory.value
    first = str(attended[0]).removeprefix("torch.")
    attention = _rate(grids[f"{ATTENTION} {first}"], 4.0, squares="length") / flops[first].value
    full = Figure(1.0, "measured", "the peaks are measured ones")
    yield (
        "small ops",
        replace(
            base,
            name=torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU",
            memory=Figure(memory, "measured" if where.type == "cuda" else "assumed", "what the device says it has"),
            bandwidth=Figure(_rate(grids[MEMORY], 1.0), "measured", f"the fastest of its sums, {how}"),
            flops=flops,
            efficiency={
                MATMUL: full,
                MEMORY: full,
                ATTENTION: Figure(attention, "measured", f"the fastest of its attentions in {first}, {how}"),
            },
            launch=Figure(launch, "measured", f"a sum of one element, {how}"),
            host=Figure(host, "measured", f"sums of one element, the best of five times 200, {how}"),
            links=tuple(Link(link.ranks, link.bandwidth, link.latency) for link in base.links),
            table={},
            hosts=hosts,
            grids=grids,
        ),
    )


def _rate(grid: Grid, each: float, squares: str = "") -> float:
    """The most work per second at a point of a grid; a point is `each` times the product of its sizes."""
    best = 0.0
    for point, seconds in grid.points():
        work = each
        for axis, size in zip(grid.axes, point, strict=True):
            work *= size * size if axis == squares else size
        best = max(best, work / seconds)
    return best


def host_seconds(tiny: torch.Tensor, device: torch.device) -> float:
    """Seconds to start the simplest op there is, on a tensor of one element; the best of five times 200."""
    best = math.inf
    for _ in range(5):
        drain(device)
        started = time.perf_counter()
        for _ in range(200):
            tiny.add_(1)
        best = min(best, (time.perf_counter() - started) / 200)
    drain(device)
    return best
