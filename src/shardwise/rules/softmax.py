"""softmax and its relatives. Over a cut dim nothing is gathered: two small all-reduces, of the largest value and of the
sum of the exponentials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.layout import Layout, Partial, Shard
from shardwise.rules.reduce import dims_of, whole_along, wide
from shardwise.rules.view import dim_of
from shardwise.strategy.program import reduced, run_local
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Operand


def exponentials(x: Any, dims: tuple[int, ...], instead: Callable[[Any], Any] | None = None) -> tuple[Any, Any, Any]:
    """exp(x - largest), its sum over `dims` and the largest; where `instead` says so, 0 stands for the largest."""
    layout = x._layout

    def one(shape: Sequence[int]) -> list[int]:
        return [1 if d in dims else n for d, n in enumerate(shape)]

    def pending(op: str) -> Layout:
        places = [Partial(op) if isinstance(p, Shard) and p.dim in dims else p for p in layout.placements]
        return layout.replace(shape=one(layout.shape), placements=places)

    def largest_held(v: torch.Tensor) -> torch.Tensor:
        return v.amax(dims, True) if all(v.shape[d] for d in dims) else v.new_full(one(v.shape), -torch.inf)

    largest = reduced(run_local(largest_held, [x.detach()], pending("max")))
    if instead is not None:
        largest = largest.masked_fill(instead(largest), 0)
    powers = (x - largest).exp()
    total = run_local(lambda v: v.sum(dims, True), [powers], pending("sum"))
    return powers, reduced(total), largest


def softmax(x: Any, dim: int) -> Any:
    powers, total, _ = exponentials(x, (dim,))
    return powers / total


def log_softmax(x: Any, dim: int) -> Any:
    _, total, largest = exponentials(x, (dim,))
    return (x - largest) - total.log()


def safe_softmax(x: Any, dim: int) -> Any:
    """Zeros, and no gradient, where everything is -inf."""
    powers, total, _ = exponentials(x, (dim,), lambda largest: largest == -torch.inf)
    return powers / total.masked_fill(total == 0, 1)


def softmax_rule(names: str, program: Callable[[Any, int], Any]) -> None:
    @rule(names)
    def along(x: Operand, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(dim, int):
            return None  # torch chooses one, with a warning
        dim, more = dim_of(dim, x.ndim), (*args, *kwargs.values())
        given = [a for a in more if isinstance(a, torch.dtype)]
        to_float = any(a is True for a in more)  # aten's half_to_float
        kept = given[0] if given else torch.float32 if to_float else x.dtype
        if not x.ndim or not x.layout.is_cut(dim) or not kept.is_floating_point:
            return whole_along(x, (dim,), True)
        return Algorithm(lambda x, *args, **kwargs: program(reduced(x).to(wide(kept)), dim).to(kept))


softmax_rule("softmax _softmax", softmax)
softmax_rule("log_softmax _log_softmax", log_softmax)
softmax_rule("_safe_softmax", safe_softmax)
softmax_rule("softmin", lambda x, dim: softmax(-x, dim))


@rule("logsumexp")
def logsumexp(x: Operand, dim: Any, keepdim: bool = False) -> Any:
    dims = dims_of(dim, x.ndim)
    if x.dtype.is_complex or not any(x.layout.is_cut(d) for d in dims):
        return whole_along(x, dims, keepdim)
    kept = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        _, total, largest = exponentials(reduced(x).to(wide(kept)), dims, torch.isinf)
        result = (total.log() + largest).to(kept)
        return result if keepdim else result.squeeze(dims)

    return Algorithm(run)


def backward_rule(name: str, program: Callable[..., Any]) -> None:
    @rule(name)
    def backward(grad: Operand, output: Operand, dim: int, input_dtype: Any) -> Any:
        dim = dim_of(dim, output.ndim)
        if grad.ndim and (grad.layout.is_cut(dim) or output.layout.is_cut(dim)):
            run = lambda g, y, *args: program(g.to(wide(g.dtype)), y.to(wide(y.dtype)), dim).to(input_dtype)  # noqa: E731
            return Algorithm(run)
        names = whole_along(output, (dim,), True).inputs[0]
        return Factors([names, names], [names])


backward_rule("_softmax_backward_data", lambda g, y, dim: (g - reduced((g * y).sum(dim, True))) * y)
backward_rule("_log_softmax_backward_data", lambda g, y, dim: g - reduced(g.sum(dim, True)) * y.exp())
