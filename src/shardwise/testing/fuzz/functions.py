"""Functions and hooks that programs use: what users write themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import FunctionCtx


class Scale(torch.autograd.Function):
    """Times a number."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by  # type: ignore[attr-defined]
        return x * by

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.by, None  # type: ignore[attr-defined]


class Multiply(torch.autograd.Function):
    """A product that saves its factors."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        return (grad * y).sum_to_size(x.shape), (grad * x).sum_to_size(y.shape)


class TwoResults(torch.autograd.Function):
    """A sum and a square."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x.sum(), x * x

    @staticmethod
    def backward(ctx: FunctionCtx, of_sum: torch.Tensor, of_square: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return of_sum.expand_as(x) + 2 * x * of_square


class Straight(torch.autograd.Function):
    """Rounds forward, and hands the gradient straight on."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad


class InPlace(torch.autograd.Function):
    """Doubles its argument where it is."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def doubled(grad: torch.Tensor) -> torch.Tensor:
    """A hook that replaces a gradient."""
    return grad * 2


def clamped(grad: torch.Tensor) -> torch.Tensor:
    """A hook that replaces a gradient by one that is not linear in it."""
    return grad.clamp(-0.5, 0.5)


def seen(grad: torch.Tensor) -> None:
    """A hook that only looks."""
    grad.sum()


Func = Callable[[torch.Tensor], torch.Tensor]


def quietly(func: Func, x: torch.Tensor) -> torch.Tensor:
    """What is not recorded."""
    with torch.no_grad():
        return func(x)


def inferred(func: Func, x: torch.Tensor) -> torch.Tensor:
    """What is computed in inference mode, and leaves it as a copy."""
    with torch.inference_mode():
        found = func(x)
    return found.clone()


def enabled(func: Func, x: torch.Tensor) -> torch.Tensor:
    """What is recorded inside of what is not."""
    with torch.no_grad(), torch.set_grad_enabled(True):
        return func(x)


def in_bfloat16(func: Func, x: torch.Tensor) -> torch.Tensor:
    """What autocast makes of it."""
    with torch.autocast(x.device.type, torch.bfloat16):
        return func(x)


FUNCTIONS: dict[str, object] = {
    "Scale": Scale,
    "Multiply": Multiply,
    "TwoResults": TwoResults,
    "Straight": Straight,
    "InPlace": InPlace,
    "doubled": doubled,
    "clamped": clamped,
    "seen": seen,
    "quietly": quietly,
    "inferred": inferred,
    "enabled": enabled,
    "in_bfloat16": in_bfloat16,
}
