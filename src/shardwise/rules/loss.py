"""Losses. A mean over a cut batch is the sum of the parts over the global count, so every rank's share is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from shardwise.rules.notation import operands_in
from shardwise.rules.pointwise import broadcast
from shardwise.rules.registry import rule
from shardwise.rules.spec import Algorithm, Factors, Operand


def _replicated(operands: list[Operand]) -> bool:
    return all(p.is_replicate() for op in operands for p in op.layout.placements)


def elementwise_loss(name: str) -> None:
    """A loss that is an elementwise function, then reduced."""
    func: Callable[..., Any] = getattr(F, name)

    @rule(name)
    def loss(*args: Any, reduction: Any = "mean", **kwargs: Any) -> Any:
        operands = list(operands_in((*args, *kwargs.values())))
        legacy = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
        if legacy or not isinstance(reduction, str) or any(type(a) in (int, bool) for a in args):
            return None  # aten's own spelling, with a number for the reduction, goes by its decomposition
        if reduction == "none":
            return broadcast(operands)
        if _replicated(operands):
            return Factors([(None,) * op.ndim for op in operands], [()])

        def by_parts(*args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
            each = func(*args, reduction="none", **kwargs)
            if reduction == "batchmean":
                return each.sum() / (each.shape[0] if each.dim() else 1)
            return each.mean() if reduction == "mean" else each.sum()

        return Algorithm(by_parts)


for _name in [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
    "poisson_nll_loss",
]:
    elementwise_loss(_name)


@rule("cross_entropy")
def cross_entropy(x: Operand, target: Operand, *args: Any, label_smoothing: float = 0.0, **kwargs: Any) -> Any:
    return classification(F.cross_entropy, x, target, *args, **kwargs)


@rule("nll_loss")
def nll_loss(x: Operand, target: Operand, *args: Any, **kwargs: Any) -> Any:
    return classification(F.nll_loss, x, target, *args, **kwargs)


def classification(
    func: Callable[..., Any],
    x: Operand,
    target: Operand,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    """``n c! d..., n d... -> n d...``: classes are whole, the batch passes or is summed."""
    if size_average is not None or reduce is not None or not isinstance(reduction, str) or not isinstance(x, Operand):
        return None
    names: list[str | None] = [f"b{i}" for i in range(x.ndim)]
    classes = 0 if x.ndim == 1 else 1
    names[classes] = None
    batch = [n for i, n in enumerate(names) if i != classes]
    probabilities = target.dtype.is_floating_point
    inputs: list[Any] = [tuple(names), tuple(names) if probabilities else tuple(batch)]
    if isinstance(weight, Operand):
        inputs.append((None,))
    cut = any(name and op.layout.is_cut(d) for names, op in zip(inputs, (x, target)) for d, name in enumerate(names))
    if reduction == "mean" and cut:
        return Algorithm(_mean_by_parts(func, probabilities))
    return Factors(inputs, [tuple(batch) if reduction == "none" else ()])


def _mean_by_parts(func: Callable[..., Any], probabilities: bool) -> Callable[..., Any]:
    def run(
        x: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        **kwargs: Any,
    ) -> Any:
        total = func(x, target, weight, ignore_index=ignore_index, reduction="sum", **kwargs)
        if probabilities:
            return total / (target.numel() // x.shape[1 if x.dim() > 1 else 0])
        counted = target != ignore_index
        if weight is None:
            return total / counted.sum().to(total.dtype)
        return total / (weight[target.masked_fill(~counted, 0)] * counted).sum()

    return run
