"""Measure kernels of a device: seconds by sizes of matrix products, attention, and ops that are bound by memory."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F

from shardwise.forecast.grids import Grid
from shardwise.forecast.kernels import ATTENTION, LISTS, MATMUL, MEMORY, Kernel
from shardwise.forecast.recorder import Recorder
from shardwise.mesh import outline

_aten = torch.ops.aten
Call: TypeAlias = Callable[[], object]
_BUSY = 1 << 28  # elements whose copies keep the device busy while the host starts what is measured
_LONG = 0.02  # seconds: nothing longer than that is measured
_BYTES = {"cuda": tuple(1 << i for i in (14, 17, 20, 22, 24, 26, 28, 30)), "cpu": (1 << 14, 1 << 20)}
_ROWS = {"cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768), "cpu": (64, 512)}
_HEADS = {"cuda": ((8, 32, 128, 512), (256, 1024, 4096, 16384), (64, 128)), "cpu": ((8,), (64, 256), (64,))}


def drain(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()


def device_seconds(run: Call, device: torch.device, repeats: int = 3) -> float:
    """How long the device takes for what `run` starts, best of some, where the host is ahead of it."""
    run()
    drain(device)
    started = time.perf_counter()
    run()
    drain(device)
    count = 3 if time.perf_counter() - started > 1e-3 else 20
    if device.type != "cuda":
        return min(_clocked(run, count) for _ in range(repeats))
    busy = torch.zeros(_BUSY, device=device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = math.inf
    for _ in range(repeats):
        for _ in range(4):  # copies, as programs have them between products: those alone would get too warm to be fast
            busy.neg_()
        first.record()
        for _ in range(count):
            run()
        last.record()
        drain(device)
        best = min(best, first.elapsed_time(last) / 1e3 / count)
    return best


def _clocked(run: Call, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count


def as_recorded(make: Callable[[], Call]) -> list[Kernel]:
    """What the recorder notes of a call, in order; `make` prepares it."""
    with outline(1) as mesh:
        call, recorder = make(), Recorder(mesh.mode)
        with recorder:  # what else there is in memory does not matter
            call()
    return [event for event in recorder.events if isinstance(event, Kernel)]


# -- products -------------------------------------------------------------------------------------------------------
def product_grids(device: torch.device, dtypes: Sequence[torch.dtype], how: str) -> Iterator[tuple[str, Grid]]:
    """Matrix products of numbers that differ: those of ones take less power, and run faster."""
    rows = _ROWS.get(device.type, _ROWS["cpu"])
    for dtype in dtypes:
        sizes = rows if dtype is torch.bfloat16 or len(rows) < 4 else rows[::2]
        with torch.device(device):
            data = torch.randn(max(sizes) ** 2, dtype=torch.float32).to(dtype)

        def seconds(m: int, n: int, k: int, data: torch.Tensor = data) -> float:
            x, w = data[: m * k].view(m, k), data[-n * k :].view(n, k)
            return device_seconds(lambda: F.linear(x, w), device, repeats=2)

        source = f"matrix products, {how}"
        work = lambda m, n, k: float(m * n * k)  # noqa: E731
        said = str(dtype).removeprefix("torch.")
        yield f"{MATMUL} {said}", _grid(("m", "n", "k"), (sizes,) * 3, work, seconds, source)


def _grid(
    axes: Sequence[str],
    at: Sequence[Sequence[int]],
    work: Callable[..., float],
    seconds: Callable[..., float],
    source: str,
) -> Grid:
    """All points, the small ones first. One that would take long is not measured: it is taken to be as fast, for its
    work, as the one with half of its largest size."""
    found: dict[tuple[int, ...], float] = {}
    for point in sorted(itertools.product(*at), key=lambda point: work(*point)):
        below = [
            (*point[:i], sizes[sizes.index(point[i]) - 1], *point[i + 1 :])
            for i, sizes in enumerate(at)
            if sizes.index(point[i])
        ]
        expected = [found[other] * work(*point) / work(*other) for other in below]
        found[point] = min(expected) if expected and min(expected) > _LONG else seconds(*point)
    return Grid.of(axes, found, source)


# -- attention ------------------------------------------------------------------------------------------------------
def attention_grids(device: torch.device, dtypes: Sequence[torch.dtype], how: str) -> Iterator[tuple[str, Grid]]:
    """Attention, with and without a causal mask, forward and backward."""
    at = _HEADS.get(device.type, _HEADS["cpu"])
    work = lambda heads, length, width: float(heads) * length**2 * width  # noqa: E731
    for dtype, causal in itertools.product(dtypes, (True, False)):
        forward, backward = _attention(device, dtype, causal)
        name = f"{' causal' if causal else ''} {str(dtype).removeprefix('torch.')}"
        axes, source = ("heads", "length", "width"), f"attention, {how}"
        yield f"{ATTENTION}{name}", _grid(axes, at, work, forward, source)
        yield f"{ATTENTION} backward{name}", _grid(axes, at, work, backward, source)


def _attention(device: torch.device, dtype: torch.dtype, causal: bool) -> tuple[Callable[..., float], ...]:
    """What measures a forward, and what measures a backward, of an attention of some sizes."""

    def inputs(heads: int, length: int, width: int) -> tuple[torch.Tensor, ...]:
        with torch.device(device):
            return tuple(torch.randn(heads // 8, 8, length, width).to(dtype).requires_grad_() for _ in range(3))

    def forward(heads: int, length: int, width: int) -> float:
        q, k, v = (x.detach() for x in inputs(heads, length, width))
        return device_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), device, repeats=2)

    def backward(heads: int, length: int, width: int) -> float:
        q, k, v = inputs(heads, length, width)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        g = torch.randn_like(out)
        return device_seconds(lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True), device, repeats=2)

    return forward, backward


# -- ops that are bound by memory -----------------------------------------------------------------------------------
def memory_grids(device: torch.device, how: str) -> Iterator[tuple[str, Grid]]:
    """Ops that are bound by memory, by how many bytes they touch."""
    for make in _OPS:
        points, name = {}, ""
        for nbytes in _BYTES.get(device.type, _BYTES["cpu"]):
            kernel = as_recorded(lambda make=make, nbytes=nbytes: make(nbytes))[-1]  # type: ignore[misc]
            with torch.device(device):
                call = make(nbytes)
            name = kernel.name
            points[kernel.sizes] = device_seconds(call, device)
        grid = Grid.of(("bytes",), points, f"{name}, {how}")
        yield name, grid
        if make in (_add, _list_add):
            yield (MEMORY if make is _add else LISTS), grid


def _half(nbytes: int, width: int = 1) -> torch.Tensor:
    """So many bytes of bfloat16, in rows."""
    return torch.randn(max(1, nbytes // 2 // width), width).to(torch.bfloat16)


def _add(nbytes: int) -> Call:
    x, y = _half(nbytes // 3), _half(nbytes // 3)
    return lambda: x + y


def _mul(nbytes: int) -> Call:
    x, y = _half(nbytes // 3), _half(nbytes // 3)
    return lambda: x * y


def _gelu(nbytes: int) -> Call:
    x = _half(nbytes // 2)
    return lambda: F.gelu(x)


def _gelu_backward(nbytes: int) -> Call:
    x, g = _half(nbytes // 3), _half(nbytes // 3)
    return lambda: _aten.gelu_backward(g, x)


def _silu(nbytes: int) -> Call:
    x = _half(nbytes // 2)
    return lambda: F.silu(x)


def _cast(nbytes: int) -> Call:
    x = _half(nbytes // 3)
    return lambda: x.float()


def _copy(nbytes: int) -> Call:
    x = _half(nbytes // 3)
    y = x.float()
    return lambda: y.copy_(x)


def _fill(nbytes: int) -> Call:
    x = _half(nbytes)
    return lambda: x.fill_(0)


def _cat(nbytes: int) -> Call:
    parts = [_half(nbytes // 6, 64) for _ in range(3)]
    return lambda: torch.cat(parts, -1)


def _sum(nbytes: int) -> Call:
    x = _half(nbytes, 2048)
    return lambda: x.sum(0)


def _layer_norm(nbytes: int) -> Call:
    x, w = _half(nbytes // 2, 2048), torch.ones(2048, dtype=torch.bfloat16)
    return lambda: _aten.native_layer_norm(x, [2048], w, w, 1e-5)


def _layer_norm_backward(nbytes: int) -> Call:
    x, g, w = _half(nbytes // 3, 2048), _half(nbytes // 3, 2048), torch.ones(2048, dtype=torch.bfloat16)
    _, mean, scale = _aten.native_layer_norm(x, [2048], w, w, 1e-5)
    return lambda: _aten.native_layer_norm_backward(g, x, [2048], mean, scale, w, w, [True, True, True])


def _log_softmax(nbytes: int) -> Call:
    x = _half(nbytes // 4, 32768).float()
    return lambda: _aten._log_softmax(x, -1, False)


def _log_softmax_backward(nbytes: int) -> Call:
    x, g = _half(nbytes // 6, 32768).float(), _half(nbytes // 6, 32768).float()
    return lambda: _aten._log_softmax_backward_data(g, x, -1, torch.float32)


def _loss(nbytes: int) -> Call:
    x = _half(nbytes // 2, 8192).float()
    y = torch.zeros(len(x), dtype=torch.int64)
    return lambda: _aten.nll_loss_forward(x, y, None, 1, -100)


def _loss_backward(nbytes: int) -> Call:
    x = _half(nbytes // 4, 8192).float()
    y, one = torch.zeros(len(x), dtype=torch.int64), torch.ones(())
    return lambda: _aten.nll_loss_backward(one, x, y, None, 1, -100, one)


def _embedding(nbytes: int) -> Call:
    w, i = _half(1 << 22, 1024), torch.randint(2048, (max(1, nbytes // 4096),))
    return lambda: F.embedding(i, w)


def _embedding_backward(nbytes: int) -> Call:
    g, i = _half(nbytes // 2, 1024), torch.randint(max(1, nbytes // 4096), (max(1, nbytes // 4096),))
    return lambda: _aten.embedding_dense_backward(g, i, len(g), -1, False)


def _parts(nbytes: int) -> list[torch.Tensor]:
    return [_half(nbytes // 32).float() for _ in range(16)]


def _list_add(nbytes: int) -> Call:
    x, y = _parts(nbytes // 3), _parts(nbytes // 3)
    return lambda: _aten._foreach_add_.List(x, y)


def _list_mul(nbytes: int) -> Call:
    x = _parts(nbytes // 2)
    return lambda: _aten._foreach_mul_.Scalar(x, 0.5)


def _list_lerp(nbytes: int) -> Call:
    x, y = _parts(nbytes // 3), _parts(nbytes // 3)
    return lambda: _aten._foreach_lerp_.Scalar(x, y, 0.5)


def _list_addcmul(nbytes: int) -> Call:
    x, y = _parts(nbytes // 4), _parts(nbytes // 4)
    return lambda: _aten._foreach_addcmul_.Scalar(x, y, y, 0.5)


def _list_sqrt(nbytes: int) -> Call:
    x = [part.abs() for part in _parts(nbytes // 2)]
    return lambda: _aten._foreach_sqrt(x)


def _list_copy(nbytes: int) -> Call:
    x = _parts(nbytes // 2)
    y = [part.to(torch.bfloat16) for part in x]
    return lambda: _aten._foreach_copy_(x, y)


_OPS: tuple[Callable[[int], Call], ...] = (
    *(_add, _mul, _gelu, _gelu_backward, _silu, _cast, _copy, _fill, _cat, _sum),
    *(_layer_norm, _layer_norm_backward, _log_softmax, _log_softmax_backward, _loss, _loss_backward),
    *(_embedding, _embedding_backward, _list_add, _list_mul, _list_lerp, _list_addcmul, _list_sqrt, _list_copy),
)
