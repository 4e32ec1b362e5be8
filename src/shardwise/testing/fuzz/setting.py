"""What the words of a program mean: on one device, and on a mesh."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from shardwise.api import distribute_tensor
from shardwise.argument_types import MeshArgument
from shardwise.layout import Partial, Placement, Replicate, Shard
from shardwise.mesh import as_mesh
from shardwise.random import use
from shardwise.tensor import DTensor
from shardwise.testing.fuzz.functions import FUNCTIONS
from shardwise.testing.seeding import seed_torch
from shardwise.testing.spread import is_float, spread_out, with_spare_bits
from shardwise.testing.subjects import subjects
from shardwise.testing.trial import Sample

Words = dict[str, Any]
Gradients = tuple[torch.Tensor | None, ...]


class Options(TypedDict, total=False):
    """What can be said of an input. On one device, `at` means nothing."""

    seed: int
    grad: bool
    at: Sequence[Placement]


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The values of an input: numbers with bits to spare, so that the shares of a sum add up exactly. None is zero,
    where functions have kinks, except among integers."""
    noise = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=noise).bool()
    if not is_float(dtype):
        low = 0 if dtype is torch.uint8 else -4
        return torch.randint(low, 7, tuple(shape), generator=noise).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    drawn = torch.randn(tuple(shape), generator=noise, dtype=wide)
    real = dtype.to_real() if dtype.is_complex else dtype
    narrow = {torch.float64: torch.float32, torch.float32: torch.bfloat16}.get(real, torch.float16)
    if dtype.is_complex:
        parts = [part.to(narrow).to(real) for part in (drawn.real, drawn.imag)]
        return torch.complex(parts[0].to(torch.float64), parts[1].to(torch.float64)).to(dtype)
    return drawn.to(narrow).to(dtype)


@contextlib.contextmanager
def plain_torch(jitter: float = 0.0, device: str = "cpu", seed: int = 1) -> Iterator[Words]:
    """The words on one device.

    Args:
        device: Where the inputs are.
        jitter: Changes every number of the inputs a little, at most by this share: how far the results then are from
            those of the program itself tells how exact they can be.
        seed: Of these changes.
    """
    shake = torch.Generator().manual_seed(seed)

    def tensor(shape: Sequence[int], dtype: torch.dtype = torch.float64, **more: Unpack[Options]) -> torch.Tensor:
        return placed(values(shape, dtype, more.get("seed", 0)), more)

    def given(name: str, form: str, sample: int, which: int, **more: Unpack[Options]) -> torch.Tensor:
        return placed(operand(name, form, sample, which), more)

    def placed(x: torch.Tensor, more: Options) -> torch.Tensor:
        if jitter and is_float(x.dtype):
            x = x * (1 + jitter * (2 * torch.rand(x.shape, generator=shake, dtype=torch.float64) - 1)).to(x)
        return x.clone().to(device).requires_grad_(more.get("grad", False))

    def module(made: torch.nn.Module, seed: int, **_: object) -> torch.nn.Module:
        with_values(made, seed).to(device)
        for parameter in made.parameters():
            parameter.data = placed(parameter.data, {})
        return made

    seed_torch()
    move = lambda x, at: x.clone(memory_format=torch.contiguous_format)
    yield {**_COMMON, "tensor": tensor, "given": given, "module": module, "move": move}


@contextlib.contextmanager
def on_mesh(mesh: MeshArgument) -> Iterator[Words]:
    """The words on a mesh; random numbers are those of plain torch."""
    device = as_mesh(mesh).device.type

    def tensor(shape: Sequence[int], dtype: torch.dtype = torch.float64, **more: Unpack[Options]) -> DTensor:
        return placed(values(shape, dtype, more.get("seed", 0)), more)

    def given(name: str, form: str, sample: int, which: int, **more: Unpack[Options]) -> DTensor:
        return placed(operand(name, form, sample, which), more)

    def placed(x: torch.Tensor, more: Options) -> DTensor:
        return spread_out(x.to(device), mesh, more["at"], more.get("seed", 0), more.get("grad", False))

    def module(made: torch.nn.Module, seed: int, at: Sequence[Sequence[Placement]]) -> torch.nn.Module:
        with_values(made, seed).to(device)
        owners = [(m, name) for m in made.modules() for name, p in m.named_parameters(recurse=False) if p is not None]
        for (owner, name), places in zip(owners, at, strict=True):
            old = getattr(owner, name)
            laid_out = torch.nn.Parameter(distribute_tensor(old.data, mesh, places), old.requires_grad)  # type: ignore[arg-type]
            setattr(owner, name, laid_out)
        return made

    def move(x: DTensor, at: Sequence[Placement]) -> torch.Tensor:
        moved = DTensor.redistribute(x, placements=at)  # which is `x` itself where nothing changes
        return moved.clone(memory_format=torch.contiguous_format)

    seed_torch()
    with use("torch"):
        yield {**_COMMON, "tensor": tensor, "given": given, "module": module, "move": move}


def with_values(made: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A module in double precision whose parameters are the values of `seed`."""
    made.double()
    for n, parameter in enumerate(made.parameters()):
        parameter.data.copy_(values(parameter.shape, torch.float64, seed + n))
    return made


_samples: dict[tuple[str, str], list[Sample]] = {}


def samples(name: str, form: str) -> list[Sample]:
    """The samples of an entry of PyTorch's databases, kept."""
    if (name, form) not in _samples:
        state, other_state = torch.get_rng_state(), random.getstate()
        random.seed(0)  # some samples draw from here
        try:
            _samples[name, form] = subjects()[name].samples(form, 12)
        finally:
            torch.set_rng_state(state)
            random.setstate(other_state)
    return _samples[name, form]


def operand(name: str, form: str, sample: int, which: int) -> torch.Tensor:
    """One tensor of a sample."""
    return with_spare_bits(samples(name, form)[sample].tensors[which]).clone()  # without holes


def call(name: str, form: str, sample: int, *tensors: torch.Tensor) -> object:
    """The call of a sample with these tensors instead of its own."""
    return samples(name, form)[sample].call(list(tensors))


def weigh(*tensors: torch.Tensor | None) -> torch.Tensor:
    """A loss: the sum of all elements, each with a weight of its own that every layout has."""
    total = torch.zeros((), dtype=torch.float64, device=next((x.device for x in tensors if x is not None), None))
    for n, x in enumerate(tensors):
        if x is None:
            continue
        weights = values(x.shape, x.dtype if is_float(x.dtype) else torch.float64, 1000 + n)
        part = (x * weights.to(x.device)).sum()
        total = total + (part.real + part.imag if x.dtype.is_complex else part)
    return total


def grads(loss: torch.Tensor, leaves: Sequence[torch.Tensor], create_graph: bool = False) -> Gradients:
    """Gradients; None where there is none."""
    return torch.autograd.grad(loss, list(leaves), create_graph=create_graph, allow_unused=True)


def second(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Gradients:
    """Second derivatives: the gradients of a weighted sum of the gradients."""
    first = grads(loss, leaves, create_graph=True)
    total = weigh(*[g if g is not None and g.requires_grad else None for g in first])
    return grads(total, leaves) if total.requires_grad else (None,) * len(leaves)


def backward_passes(loss: torch.Tensor, times: int = 1) -> None:
    """Backward passes into ``.grad``."""
    for n in range(times):
        loss.backward(retain_graph=n + 1 < times)


def train(parameters: Sequence[torch.Tensor], make: Callable[..., torch.optim.Optimizer], loss: torch.Tensor) -> None:
    """A backward pass and a step of an optimizer."""
    optimizer = make(list(parameters))
    loss.backward()
    optimizer.step()


def train_longer(
    parameters: Iterable[torch.Tensor],
    loss: Callable[[], torch.Tensor],
    make: Callable[..., torch.optim.Optimizer],
    schedule: Callable[..., torch.optim.lr_scheduler.LRScheduler],
    clip: str,
) -> None:
    """Three steps with a schedule; gradients may be clipped by norm or by value."""
    params = list(parameters)
    optimizer = make(params)
    rates = schedule(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        if clip == "norm":
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        elif clip == "value":
            torch.nn.utils.clip_grad_value_(params, 0.1)
        optimizer.step()
        rates.step()


def forward_mode(func: Callable[..., torch.Tensor], x: torch.Tensor, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A value and its derivative along a tangent."""
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(func(forward_ad.make_dual(x.detach() + 0, tangent.detach() + 0)))
        return found.primal + 0, found.tangent + 0


_COMMON: Words = {
    "forward_mode": forward_mode,
    "torch": torch,
    "F": F,
    "checkpoint": checkpoint,
    "call": call,
    "weigh": weigh,
    "grads": grads,
    "second": second,
    "backward_passes": backward_passes,
    "train": train,
    "train_longer": train_longer,
    "np": np,
    "Shard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
    **FUNCTIONS,
}
