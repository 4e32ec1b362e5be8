"""Measure the host: how long Python and torch take to start an op, by what kind of op it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise.forecast.hardware import Figure
from shardwise.forecast.kernels import Kernel
from shardwise.forecast.measuring_kernels import drain
from shardwise.forecast.recorder import Recorder
from shardwise.layout import Replicate
from shardwise.mesh import UserMesh, outline
from shardwise.tensor import DTensor

_REPEATS, _MANY = 9, 300
LaidOut: TypeAlias = Callable[[nn.Module], nn.Module]
LayOut: TypeAlias = Callable[[nn.Module, UserMesh], nn.Module]


class _Block(nn.Module):
    """A small block of a transformer, as programs have them: modules, ops and views."""

    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class _Program:
    """A small training step, of which each part can be run."""

    def __init__(self, recompute: bool = False, laid_out: LaidOut | None = None, layers: int = 6) -> None:
        blocks, self.recompute = nn.Sequential(*(_Block() for _ in range(layers))), recompute
        self.blocks = blocks if laid_out is None else laid_out(blocks)
        self.x = torch.randn(2, 16, 64)
        self.optimizer = torch.optim.AdamW(self.blocks.parameters(), foreach=True)

    def forward(self) -> torch.Tensor:
        if not self.recompute:
            return self.blocks(self.x).sum()
        x = self.x
        for block in self.blocks.children():
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward().backward()
        self.update()


def host_figures(device: torch.device, how: str, lay_out: LayOut | None) -> Iterator[tuple[str, Figure]]:
    """What the host takes to start an op: in a forward, a backward and an optimizer's step, and what comes on top.

    Args:
        device: Where the ops run.
        how: What to say of how it was measured.
        lay_out: Lays a module out on a mesh, with hooks of the library's own; they are not measured without.
    """
    view, module = _of_views(device), _of_modules()
    yield "view", Figure(view, "measured", f"{_MANY} transposes of a tensor that needs a gradient, {how}")
    yield "module", Figure(module, "measured", f"{_MANY} calls of a module that does nothing, {how}")
    counts, again = _counted(recompute=False), _counted(recompute=True)
    with torch.device(device):
        times, times_again = _parts(_Program(), device), _parts(_Program(recompute=True), device)
    source = f"a transformer of six small blocks, {how}"
    ahead = counts["views forward"] * view + counts["modules forward"] * module
    forward = max((times["forward"] - ahead) / counts["forward"], view)
    yield "forward", Figure(forward, "measured", source)
    yield "backward", Figure(times["backward"] / counts["backward"], "measured", source)
    more = sum(times_again.values()) - sum(times.values()) - again["recomputed"] * forward
    more -= again["views recomputed"] * view + again["modules recomputed"] * module
    yield "checkpoint", Figure(max(0.0, more / again["parts"]), "measured", f"{source}, recomputed")
    tensor, op = _of_lists(device)
    yield "tensor", Figure(tensor, "measured", f"AdamW of 16 and of 256 parameters, {how}")
    yield "optimizer", Figure(op, "measured", f"AdamW of 16 and of 256 parameters, {how}")
    with _one_rank():
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
        said = f"{_MANY} sums of distributed tensors, {how}"
        yield "distributed", Figure(_of_distributed(device, mesh), "measured", said)
        if lay_out is not None:
            figure = Figure(_of_library(device, mesh, lay_out, sum(times.values()), counts), "measured", source)
            yield "library", figure


def _of_library(device: torch.device, mesh: UserMesh, lay_out: LayOut, plain: float, counts: Counter[str]) -> float:
    """Seconds on top for each op that hooks of the library start."""
    with torch.device(device):
        seconds = sum(_parts(_Program(laid_out=lambda module: lay_out(module, mesh)), device).values())
    found = _counted(lay_out=lay_out)
    known = (found["backward"] - counts["backward"]) + (found["forward"] - counts["forward"])
    each = plain / (counts["backward"] + counts["forward"])
    return max(0.0, (seconds - plain - known * each) / max(found["library"], 1))


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that the host takes for a call, the best of some: its pace changes where others use its cores."""
    found = []
    for i in range(_REPEATS + 2):
        drain(device)
        started = time.perf_counter()
        run()
        if i > 1:
            found.append(time.perf_counter() - started)
    drain(device)
    return min(found)


def _parts(program: _Program, device: torch.device) -> dict[str, float]:
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for i in range(_REPEATS + 2):
        drain(device)
        started = time.perf_counter()
        loss = program.forward()
        middle = time.perf_counter()
        drain(device)
        again = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        program.update()
        if i > 1:
            found["forward"].append(middle - started)
            found["backward"].append(ended - again)
    return {name: min(times) for name, times in found.items()}


def _counted(recompute: bool = False, lay_out: LayOut | None = None) -> Counter[str]:
    """How many ops, views and modules the recorder notes in a step, by phase; and how many parts are recomputed."""
    with outline(1, axis_names=("dp",)) as mesh:
        laid_out = None if lay_out is None else lambda module: lay_out(module, mesh)
        program, recorder = _Program(recompute, laid_out), Recorder(mesh.mode)
        with recorder.recording():
            program.step()
    counts: Counter[str] = Counter()
    for event in recorder.events:
        if isinstance(event, Kernel):
            counts[event.phase] += 1
            counts[f"views {event.phase}"] += event.views
            counts[f"modules {event.phase}"] += event.modules
            counts["parts"] += event.begins_again
            counts["library"] += event.of_library
    return counts


def _of_views(device: torch.device) -> float:
    x = torch.zeros(2, 2, device=device, requires_grad=True)

    def run() -> None:
        for _ in range(_MANY):
            x.transpose(0, 1)

    return _best(run, device) / _MANY


def _of_modules() -> float:
    module, x = nn.Identity(), torch.zeros(1)

    def run() -> None:
        for _ in range(_MANY):
            module(x)

    return _best(run, torch.device("cpu")) / _MANY


def _of_lists(device: torch.device) -> tuple[float, float]:
    """Of an optimizer's step: seconds for each tensor of the lists that its ops take, and for each op."""
    seconds, ops, tensors = [], [], []
    for count in (16, 256):
        with torch.device(device):
            params = [nn.Parameter(torch.zeros(8)) for _ in range(count)]
        optimizer = torch.optim.AdamW(params, foreach=True)
        for p in params:
            p.grad = torch.zeros_like(p)
        seconds.append(_best(optimizer.step, device))
        with outline(1) as mesh:
            fake = [nn.Parameter(torch.zeros(8)) for _ in range(count)]
            for p in fake:
                p.grad = torch.zeros_like(p)
            played, recorder = torch.optim.AdamW(fake, foreach=True), Recorder(mesh.mode)
            played.step()
            with recorder.recording():
                played.step()
        kernels = [event for event in recorder.events if isinstance(event, Kernel)]
        ops.append(len(kernels))
        tensors.append(sum(kernel.tensors for kernel in kernels))
    tensor = max(0.0, (seconds[1] - seconds[0]) / max(tensors[1] - tensors[0], 1))
    return tensor, max(1e-7, (seconds[0] - tensors[0] * tensor) / max(ops[0], 1))


def _of_distributed(device: torch.device, mesh: UserMesh) -> float:
    plain = torch.zeros(8, device=device)
    ours = DTensor.from_local(plain, mesh, [Replicate()])
    times = []
    for x in (plain, ours):

        def run(x: torch.Tensor = x) -> None:
            for _ in range(_MANY):
                x + x

        times.append(_best(run, device) / _MANY)
    return max(0.0, times[1] - times[0])


@contextmanager
def _one_rank() -> Iterator[None]:
    """Inside there is a process group, if there was none, of this process alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
