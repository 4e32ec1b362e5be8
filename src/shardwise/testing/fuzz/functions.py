"""Functions and hooks that programs use: what users write themselves."""

from __future__ import annotations

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


FUNCTIONS: dict[str, object] = {
    "Scale": Scale,
    "Multiply": Multiply,
    "TwoResults": TwoResults,
    "Straight": Straight,
    "InPlace": InPlace,
    "doubled": doubled,
    "clamped": clamped,
    "seen": seen,
}
