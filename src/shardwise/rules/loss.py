"""Losses. A mean over a cut batch is the sum of the parts over the global count, so every rank's share is right. Where
the classes are cut, each rank answers for the targets among its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.layout import Layout
from shardwise.layout.split import Intervals
from shardwise.rules.pointwise import broadcast
from shardwise.strategy.notation import operands_in
from shardwise.strategy.program import reduced
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Operand, PerCoords, Result

REDUCTIONS = ("none", "mean", "sum")  # aten gives the number


def by_number(name: str) -> Algorithm:
    """aten's spelling of a loss, with a number for the reduction, as a call of torch.nn.functional's."""
    func, overloads = getattr(F, name), getattr(torch.ops.aten, name)
    names = [a.name for a in getattr(overloads, overloads.overloads()[0])._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        reduction = REDUCTIONS[given.pop("reduction", 1)]
        return func(given.pop(names[0]), given.pop(names[1]), reduction=reduction, **given)

    return Algorithm(run)


def is_legacy(size_average: Any = None, reduce: Any = None, **kwargs: Any) -> bool:
    """Whether a call has the old arguments for the reduction: below, torch gives the number they stand for."""
    return size_average is not None or reduce is not None


def _in_one_piece(operands: list[Operand]) -> bool:
    """Whether nothing is cut or pending; an axis of one rank does neither."""
    return all(
        p.is_replicate() or op.mesh.shape[axis] == 1 for op in operands for axis, p in enumerate(op.layout.placements)
    )


def loss_rule(name: str, each: Callable[..., Factors]) -> None:
    """A loss of one value for each element or sample, as `each` says, then reduced."""
    func: Callable[..., Any] = getattr(F, name)

    @rule(name)
    def loss(*args: Any, reduction: Any = None, **kwargs: Any) -> Any:
        operands = list(operands_in((*args, *kwargs.values())))
        if not isinstance(reduction, str):
            return by_number(name)
        if is_legacy(**kwargs):
            return None
        if reduction == "none":
            return each(operands, kwargs)
        if _in_one_piece(operands) and each is not per_alignment:
            return Factors([(None,) * op.ndim for op in operands], [()])
        return Algorithm(by_parts)

    def by_parts(*args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
        losses = func(*args, reduction="none", **kwargs)
        if reduction == "sum":
            return losses.sum()
        if reduction == "batchmean":
            return losses.sum() / (losses.shape[0] if losses.dim() else 1)
        if name == "mse_loss" and kwargs.get("weight") is not None:
            return losses.sum() / kwargs["weight"].sum()
        if name == "ctc_loss":
            lengths = args[3] if isinstance(args[3], torch.Tensor) else torch.tensor(args[3])
            losses = losses / lengths.to(losses.device).clamp(min=1)
        return losses.mean()


def per_sample(operands: list[Operand], statics: Any) -> Factors:
    """``b c!, b.. -> b``: the margins of one sample need all of its classes."""
    x, target, *weight = operands
    inputs: list[Any] = [("b", None)[-x.ndim :], ("b", None)[2 - x.ndim :][: target.ndim]]
    result = Result(x.shape[:-1], x.dtype, (1,) * (x.ndim - 1))
    return Factors([*inputs, *((None,) for _ in weight)], [("b",)[: x.ndim - 1]], result=result)


def per_alignment(operands: list[Operand], statics: Any) -> Factors:
    """``t! b c!, b s!, b, b -> b``; targets all in one row, or lengths that are no tensors, want the batch whole."""
    logs = operands[0]
    shape = logs.shape[1:-1]
    result = Result(shape, logs.dtype, (1,) * len(shape))
    if [op.ndim for op in operands] != [3, 2, 1, 1]:
        return Factors([(None,) * op.ndim for op in operands], [(None,) * len(shape)], result=result)

    def aligned(logs: Any, targets: Any, lengths: Any, target_lengths: Any) -> torch.Tensor:
        if not logs.shape[1]:
            return logs.sum((0, 2))  # torch takes no empty batch
        return F.ctc_loss(logs, targets, lengths, target_lengths, reduction="none", **statics)

    inputs = [(None, "b", None), ("b", None), ("b",), ("b",)]
    return Factors(inputs, [("b",)], local=lambda inputs, outputs: aligned, result=result)


for _name in (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss poisson_nll_loss"
).split():
    loss_rule(_name, lambda operands, statics: broadcast(operands))
loss_rule("multi_margin_loss", per_sample)
loss_rule("multilabel_margin_loss", per_sample)
loss_rule("ctc_loss", per_alignment)


# -- classes -----------------------------------------------------------------------------------------------
def classes_of(x: Any) -> int:
    return 0 if x.ndim == 1 else 1


@rule("nll_loss nll_loss_nd nll_loss2d")
def nll_loss(x: Operand, target: Operand, weight: Any = None, *args: Any, reduction: Any = None, **kwargs: Any) -> Any:
    """``b c d..., b d..., c? -> b d...``. Each rank picks the targets it holds, and has zeros for the others."""
    if not isinstance(reduction, str):
        return by_number("nll_loss")
    if is_legacy(**kwargs):
        return None
    operands = list(operands_in((x, target, weight)))
    if reduction == "mean" and not _in_one_piece(operands):
        return Algorithm(lambda *args, **kwargs: over_count(F.nll_loss, *args, **kwargs))
    dim, ignored = classes_of(x), kwargs.get("ignore_index", -100)
    size = x.shape[dim]

    def local(inputs: list[Layout], outputs: list[Layout]) -> Any:
        def pick(x: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
            weight, held = rest if len(rest) == 2 else (None, *rest)
            if not held:
                return x.sum(dim) if reduction == "none" else x.sum()
            return F.nll_loss(x, among(held, target, size, ignored), weight, reduction=reduction)

        if inputs[0].is_cut(dim):
            return PerCoords(pick, lambda coords: inputs[0].held(dim, coords))
        return lambda x, target, weight=None: F.nll_loss(x, target, weight, ignore_index=ignored, reduction=reduction)

    names = tuple("c" if d == dim else f"b{d}" for d in range(x.ndim))
    batch = tuple(n for n in names if n != "c")
    outputs = [batch if reduction == "none" else ()]
    return Factors([names, batch, ("c",)][: len(operands)], outputs, linear="each", joint=frozenset({0}), local=local)


def among(held: Intervals, target: torch.Tensor, size: int, ignore_index: int) -> torch.Tensor:
    """Where a rank has each target's class, -100 where it has not."""
    counted = target != ignore_index
    inside = ((target >= 0) & (target < size)) | ~counted
    torch._assert_async(inside.all(), f"a target is out of bounds: there are {size} classes")
    mine, offset = torch.full_like(target, -100), 0
    for start, stop in held:
        mine = torch.where(counted & (target >= start) & (target < stop), target - start + offset, mine)
        offset += stop - start
    return mine


def over_count(func: Any, x: Any, target: Any, weight: Any = None, *, ignore_index: int = -100, **kwargs: Any) -> Any:
    """The mean, as a sum over the global count."""
    total = func(x, target, weight, ignore_index=ignore_index, **kwargs | {"reduction": "sum"})
    if target.dtype.is_floating_point:
        return total / (target.numel() // x.shape[classes_of(x)])
    return total / counted_weight(target, weight, ignore_index, total.dtype)


def counted_weight(target: Any, weight: Any, ignore_index: int, dtype: Any) -> Any:
    counted = target != ignore_index
    if weight is None:
        return counted.sum().to(dtype)
    return (weight.detach()[target.masked_fill(~counted, 0)] * counted).sum()


@rule("cross_entropy")
def cross_entropy(x: Operand, target: Operand, weight: Any = None, *, reduction: Any, **kwargs: Any) -> Any:
    """``b c d..., b d... -> b d...``, or with probabilities ``b c d..., b c d... -> b d...``."""
    if is_legacy(**kwargs):
        return None
    dim, operands = classes_of(x), list(operands_in((x, target, weight)))
    if reduction == "mean" and not _in_one_piece(operands):
        return Algorithm(lambda *args, **kwargs: over_count(F.cross_entropy, *args, **kwargs))
    if x.layout.is_cut(dim):
        return Algorithm(over_cut_classes)
    names = tuple(None if d == dim else f"b{d}" for d in range(x.ndim))
    batch = tuple(n for n in names if n is not None)
    inputs = [names, names if target.dtype.is_floating_point else batch, (None,)]
    return Factors(inputs[: len(operands)], [batch if reduction == "none" else ()])


def over_cut_classes(
    x: Any, target: Any, weight: Any = None, *, reduction: str, label_smoothing: float, ignore_index: int, **kwargs: Any
) -> Any:
    """Cross-entropy as torch composes it, on log-probabilities that stay cut."""
    dim = classes_of(x)
    logs = F.log_softmax(x, dim)
    weighed = logs if weight is None else logs * weight.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    uniform = label_smoothing / x.shape[dim]
    if target.dtype.is_floating_point:
        losses = -(weighed * (target * (1 - label_smoothing) + uniform)).sum(dim)
    else:
        losses = F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction="none")
        if label_smoothing:
            smooth = reduced(weighed.sum(dim)).masked_fill(target == ignore_index, 0)
            losses = losses * (1 - label_smoothing) - smooth * uniform
    return losses if reduction == "none" else losses.sum()


@rule("nll_loss_forward nll_loss2d_forward")
def nll_loss_forward(*args: Any, **kwargs: Any) -> Algorithm:
    def run(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
        loss = F.nll_loss(x, target, weight, ignore_index=ignore_index, reduction=REDUCTIONS[reduction])
        count = counted_weight(target, weight, ignore_index, x.dtype)
        return loss, count if reduction else torch.zeros_like(count)

    return Algorithm(run)


@rule("linear_cross_entropy")
def linear_cross_entropy(*args: Any, **kwargs: Any) -> Algorithm:
    """A weight of more dims makes a loss of as many; `options` say how to do it in chunks, here every rank does one."""

    def run(x: Any, matrix: Any, target: Any, *, linear_bias: Any, ignore_index: Any, options: Any, **more: Any) -> Any:
        bias = None if linear_bias is None else linear_bias.flatten()
        if options is not None and more["weight"] is not None and not target.dtype.is_floating_point:
            more["weight"] = more[
                "weight"
            ].detach()  # in chunks, torch takes one that needs a gradient and gives it none
        logits = F.linear(x, matrix.flatten(0, -2), bias).reshape(*x.shape[:-1], *matrix.shape[:-1])
        return F.cross_entropy(logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **more)

    return Algorithm(run)
