"""Measure a device: how fast its matrix products, attention and memory are, and how long the shortest op takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from shardwise.forecast.hardware import Figure, Hardware, HardwareError, Link, known

_REPEATS = 5
_SIZES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256, 512, 1024)}
_DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32, torch.bfloat16)}


def measured(device: str = "cuda", like: str | None = None) -> Iterator[tuple[str, Hardware | None]]:
    """Measure this machine's device: yields (what was measured, None) after each part, and the description last.

    Args:
        device: "cuda" or "cpu".
        like: The known hardware whose links are taken over, since one device does not show them.

    Raises:
        HardwareError: The device is not here.
    """
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise HardwareError("calibrate: device 'cuda' is not here; use --device cpu, or run this where a GPU is")
    base = Hardware.load(like or ("h100-sxm" if where.type == "cuda" else known()[0]))
    sizes, how = _SIZES.get(where.type, _SIZES["cpu"]), f"best of {_REPEATS}, torch {torch.__version__}"
    flops: dict[str, Figure] = {}
    for dtype in _DTYPES.get(where.type, (torch.float32,)):
        rates = [2 * n**3 / _matmul(n, dtype, where) for n in sizes]
        flops[str(dtype).removeprefix("torch.")] = Figure(max(rates), "measured", f"matrix product, {how}")
        yield f"matrix products in {dtype}", None
    top = sizes[-1]
    x = torch.empty(top * top * 4, device=where)
    y = torch.empty_like(x)
    rate = 2 * x.nbytes / _best(lambda: y.copy_(x), where)
    yield "memory", None
    attention = _attention(where, flops)
    yield "attention", None
    tiny = torch.zeros(1, device=where)
    launch = _best(lambda: tiny.add_(1), where)
    host = _host(tiny, where)
    memory = torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else base.memory.value
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    full = Figure(1.0, "measured", "the peaks are measured ones")
    links = tuple(Link(link.ranks, link.bandwidth, link.latency) for link in base.links)
    yield (
        "small ops",
        replace(
            base,
            name=name,
            memory=Figure(memory, "measured" if where.type == "cuda" else "assumed", "what the device says it has"),
            bandwidth=Figure(rate, "measured", f"copy, {how}"),
            flops=flops,
            efficiency={"matmul": full, "memory": full, "attention": attention},
            launch=Figure(launch, "measured", f"an add of one element, {how}"),
            host=Figure(host, "measured", f"1,000 adds of one element, {how}"),
            links=links,
            table={},
        ),
    )


def _matmul(n: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    return _best(lambda: a @ b, device)


def _attention(device: torch.device, flops: dict[str, Figure]) -> Figure:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length = 4096 if device.type == "cuda" else 512
    q = torch.ones(1, 16, length, 128, dtype=dtype, device=device)
    seconds = _best(lambda: F.scaled_dot_product_attention(q, q, q), device)
    peak = flops[str(dtype).removeprefix("torch.")].value
    share = 4 * 16 * length * length * 128 / seconds / peak
    return Figure(share, "measured", f"attention over {length} tokens, {dtype}")


def _host(tiny: torch.Tensor, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(1000):
        tiny.add_(1)
    seconds = (time.perf_counter() - started) / 1000
    _synchronize(device)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()


def _best(run: Callable[[], object], device: torch.device) -> float:
    """The shortest time of several runs, in seconds."""
    best = float("inf")
    for i in range(_REPEATS + 1):
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        if i:  # the first one warms up
            best = min(best, time.perf_counter() - started)
    return best
