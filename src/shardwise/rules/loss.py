"""Losses. A mean over a cut batch is the sum of the parts over the global count, so every rank's share is right. Where
the classes are cut, each rank answers for the targets among its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.layout.split import Intervals
from shardwise.rules.pointwise import broadcast
from shardwise.rules.softmax import exponentials
from shardwise.strategy import Algorithm, Answer, Factors, Operand, Result, factors, operands_in
from shardwise.strategy.lookup import by_holders, located, pointable
from shardwise.strategy.lost import loses
from shardwise.strategy.memory import contiguous, like_a_clone, stored
from shardwise.strategy.program import Tensor, reduced, sum_dtype
from shardwise.strategy.registry import program, rule
from shardwise.torch_private.tensors import schema_of

REDUCTIONS = ("none", "mean", "sum")  # aten gives the number
_TYPED_BY_INPUT = {"huber_loss", "soft_margin_loss"}  # the others have the dtype that input and target promote to


def loss_rule(names: str, each: Callable[..., Any], mean: Callable[..., Any] | None = None) -> None:
    """A loss with a value per element or sample, by `each`, then reduced; with a `mean`, `each` also answers sums."""
    name = names.split()[0]
    func: Callable[..., Any] = getattr(F, name)

    @rule(names)
    def loss(*args: object, reduction: object = None, **kwargs: object) -> Answer:
        operands = list(operands_in((*args, *kwargs.values())))
        if not isinstance(reduction, str):
            given = reduction is not None or len(args) > parameters().index("reduction")
            return Algorithm(by_number) if given else None  # what it then is, torch's C functions and aten differ about
        if name in _TYPED_BY_INPUT and operands[0].dtype != operands[1].dtype:
            return Algorithm(in_dtype_of_input)
        old = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
        if old or reduction not in ((*REDUCTIONS, "batchmean") if name == "kl_div" else REDUCTIONS):
            return None  # below, torch gives the number the old arguments stand for, or says what is wrong
        if reduction == "none" or (mean and reduction == "sum"):
            return each(operands, kwargs, reduction)
        if each is not per_alignment and all(op.layout.is_plain for op in operands):
            return factors("*x!, .. -> ", operands)
        return Algorithm(functools.partial(mean, func) if mean else by_parts)

    @rule(" ".join(f"aten::{each}" for each in names.split()))
    def of_aten(*args: object, **kwargs: object) -> Answer:
        return Algorithm(by_number)

    def parameters() -> list[str]:
        overloads = getattr(torch.ops.aten, name)
        return [a.name for a in schema_of(getattr(overloads, overloads.overloads()[0])).arguments]

    def by_number(*args: object, **kwargs: object) -> Any:
        """aten's spelling, with a number for the reduction, as a call of torch.nn.functional's."""
        names = parameters()
        arguments: dict[str, Any] = dict(zip(names, args)) | kwargs
        reduction = REDUCTIONS[arguments.pop("reduction", 1)]
        return func(arguments.pop(names[0]), arguments.pop(names[1]), reduction=reduction, **arguments)

    def in_dtype_of_input(x: Tensor, target: Tensor, *args: object, **kwargs: object) -> Tensor:
        return func(x, target.to(x.dtype), *args, **kwargs)

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


def per_sample(operands: list[Operand], *settings: object) -> Factors:
    """The margins of one sample need all of its classes."""
    (x, target), text = operands[:2], "*x!, .. -> "
    if x.ndim:
        text = f"*b c!, {'*b c!' if target.ndim == x.ndim else '*b'}, c!? -> *b"
    return factors(text, operands, contiguous=True)


def per_alignment(operands: list[Operand], *settings: object) -> Factors:
    """Samples pass; targets all in one row, or lengths that are no tensors, want the batch whole."""
    logs, shape = operands[0], operands[0].shape[1:-1]
    result = Result(shape, logs.dtype, (1,) * len(shape))
    if [op.ndim for op in operands] == [3, 2, 1, 1]:
        return factors("t! b c!, b s!, b, b -> b", operands, result=result, never_empty=True)
    return factors(f"*x!, .. ->{' b' * len(shape)}", operands, result=result)


for _name in (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss poisson_nll_loss"
).split():
    loss_rule(_name, lambda operands, *settings: broadcast(operands))
stored("binary_cross_entropy", device="cpu")(like_a_clone)


@loses(F.l1_loss, "weight")
def weighted_l1_loss(
    weight: Tensor, x: Tensor, target: Tensor,
    size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """By its definition, in torch's own order."""
    if weight.size() != x.size():
        raise ValueError("Weights and input must have the same size.")
    losses = F.l1_loss(x, target, reduction="none") * weight
    if size_average is not None or reduce is not None:  # torch's old spelling
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / weight.sum()


loss_rule("multi_margin_loss", per_sample)
loss_rule("multilabel_margin_loss", per_sample)
loss_rule("ctc_loss", per_alignment)


# -- classes -----------------------------------------------------------------------------------------------
def classes_of(x: Operand | torch.Tensor) -> int:
    return 0 if x.ndim == 1 else 1


def per_target(operands: list[Operand], statics: Any, reduction: str) -> Factors:
    """Each rank picks the targets it holds, and has zeros for the others."""
    dim, ignored = classes_of(operands[0]), statics.get("ignore_index", -100)
    size, batch = operands[0].shape[dim], "b " * dim

    def pick(x: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
        *weights, (held,) = rest
        x, *weights = pointable(x, dim), *(pointable(weight, 0) for weight in weights), None
        return F.nll_loss(x, among(held, target, size, ignored), weights[0], reduction=reduction)

    whole = functools.partial(F.nll_loss, ignore_index=ignored, reduction=reduction)
    local = by_holders([dim], pick, whole)
    text = f"{batch}c *d, {batch}*d, c? -> {f'{batch}*d' if reduction == 'none' else ''}"
    return factors(text, operands, "each", joint={0}, local=local)


def among(held: Intervals, target: torch.Tensor, size: int, ignore_index: int) -> torch.Tensor:
    """Where a rank has each target's class, -100 where it has not."""
    says, counted = "target {} is out of bounds: there are {} classes", target != ignore_index
    at, mine = located(target, held, size, counted=counted, says=says)
    return at.masked_fill(~mine, -100)


def over_count(
    func: Callable[..., torch.Tensor],
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    **kwargs: object,
) -> torch.Tensor:
    """The mean, as a sum over the global count."""
    total = func(x, target, weight, ignore_index=ignore_index, **kwargs | {"reduction": "sum"})
    if target.dtype.is_floating_point:
        classes = x.shape[classes_of(x)]
        return total / (target.numel() // classes if classes else 0)
    return total / counted_weight(target, weight, ignore_index, total.dtype)


def counted_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype | None
) -> torch.Tensor:
    counted = target != ignore_index
    weights = counted if weight is None else _weights(weight, target, counted) * counted
    return weights.sum().to(dtype)


def _weights(weight: torch.Tensor, target: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return weight.detach().take(target.masked_fill(~counted, 0))  # an index asks one target for its value


def per_class(operands: list[Operand], statics: Any, reduction: str) -> Factors | Algorithm | None:
    """Where the classes are cut, the logarithm of the sum of the exponentials, which all ranks have, and an nll_loss of
    the logits: of a log_softmax, whose gradient adds up over the classes, the backward pass would reduce. Dtypes that
    add up in a wider one go by a log_softmax; probabilities and smoothing go by torch's own parts."""
    (x, target), dim = operands[:2], classes_of(operands[0])
    indices = not target.dtype.is_floating_point

    def by_parts(
        x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, *, ignore_index: int, **_: object
    ) -> torch.Tensor:
        pick = functools.partial(F.nll_loss, ignore_index=ignore_index, reduction=reduction)
        if sum_dtype(x.dtype) is not x.dtype:
            return pick(F.log_softmax(x, dim), target, weight)
        x, counted = reduced(x), target != ignore_index
        _, total, largest = exponentials(x, (dim,))
        logs = total.squeeze(dim).log().masked_fill(~counted, 0)
        if weight is not None:
            logs = logs * _weights(weight, target, counted)
        return pick(x - largest, target, weight) + (logs if reduction == "none" else logs.sum())

    if x.layout.is_cut(dim):
        return Algorithm(by_parts) if indices and not statics["label_smoothing"] else None
    each = "b " * dim + "*d"
    whole = each.replace("*d", "c! *d")
    return factors(f"{whole}, {each if indices else whole}, c!? -> {each if reduction == 'none' else ''}", operands)


stored("nll_loss nll_loss_nd nll_loss2d nll_loss2d_forward")(contiguous)
loss_rule("nll_loss nll_loss_nd nll_loss2d", per_target, over_count)
loss_rule("cross_entropy", per_class, over_count)


@program("nll_loss_forward nll_loss2d_forward")
def nll_loss_forward(x: Tensor, target: Tensor, weight: Tensor, reduction: int, ignore_index: int) -> Tensor:
    loss = F.nll_loss(x, target, weight, ignore_index=ignore_index, reduction=REDUCTIONS[reduction])
    counted = reduction or x.dim() == 1  # as torch's kernel does
    return loss, counted_weight(target, weight, ignore_index, x.dtype) if counted else x.new_zeros(())


@program("linear_cross_entropy")
def linear_cross_entropy(
    x: Tensor, matrix: Tensor, target: Tensor, *,
    linear_bias: Any, ignore_index: Any, options: Any, weight: Any, **more: Any,
) -> Tensor:  # fmt: skip
    """A weight of more dims makes a loss of as many; `options` say how to do it in chunks, here every rank does one."""
    if options is not None and weight is not None and not target.dtype.is_floating_point:
        weight = weight.detach()  # in chunks, torch takes one that needs a gradient and gives it none
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(x, matrix.flatten(0, -2), bias).reshape(*x.shape[:-1], *matrix.shape[:-1])
    return F.cross_entropy(logits, target, weight, ignore_index=-100 if ignore_index is None else ignore_index, **more)
