"""softmax and its relatives. Over a cut dim nothing is gathered: two small all-reduces, of the largest value and of the
sum of the exponentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.errors import dim_from_front
from shardwise.strategy import Algorithm, Answer, Named, Operand
from shardwise.strategy.program import Tensor, reduced, run_local, sum_dtype, without_dims
from shardwise.strategy.registry import program, rule
from shardwise.strategy.two_stages import reduced_dims, staged, whole_along


def exponentials(x: Tensor, dims: tuple[int, ...], instead: Callable[[Any], Any] | None = None) -> tuple[Any, Any, Any]:
    """exp(x - largest), its sum over `dims` and the largest; where `instead` says so, 0 stands for the largest."""

    def largest_held(v: torch.Tensor) -> torch.Tensor:
        one = [1 if d in dims else n for d, n in enumerate(v.shape)]
        return v.amax(dims, True) if all(v.shape[d] for d in dims) else v.new_full(one, -torch.inf)

    largest = reduced(run_local(largest_held, [x.detach()], without_dims(x._layout, dims, True, "max")))
    if instead is not None:
        largest = largest.masked_fill(instead(largest), 0)
    powers = (x - largest).exp()
    return powers, reduced(powers.sum(dims, True)), largest


def softmax_rule(names: str, finish: Callable[..., Any], instead: Callable[[Any], Any] | None = None) -> None:
    """finish(x, *exponentials(x, ...)) along a cut dim."""

    @rule(names)
    def along(x: Operand, dim: Named = None, *args: Any, **kwargs: Any) -> Answer:
        if not isinstance(dim, int):
            return None  # torch chooses one, with a warning
        dim, more = dim_from_front(dim, x.ndim), (*args, *kwargs.values())
        to_float = [torch.float32] if any(a is True for a in more) else []  # aten's half_to_float
        kept = [*(a for a in more if isinstance(a, torch.dtype)), *to_float, x.dtype][0]
        if not x.layout.is_cut(dim) or not kept.is_floating_point:
            return whole_along(x, (dim,), True)

        def run(x: Tensor, *args: object, **kwargs: object) -> Tensor:
            x = reduced(x).to(sum_dtype(kept))
            return finish(x, *exponentials(x, (dim,), instead)).to(kept)

        return Algorithm(run)


softmax_rule("softmax _softmax", lambda x, powers, total, largest: powers / total)
softmax_rule("log_softmax _log_softmax", lambda x, powers, total, largest: (x - largest) - total.log())
_or_zeros = lambda x, powers, total, largest: powers / total.masked_fill(total == 0, 1)
softmax_rule("_safe_softmax", _or_zeros, lambda largest: largest == -torch.inf)  # no gradient either, if all are -inf


@rule("logsumexp")
def logsumexp(x: Operand, dim: Named, keepdim: bool = False) -> Answer:
    dims = reduced_dims(dim, x.ndim)
    kept = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()

    def run(x: Tensor) -> Tensor:
        _, total, largest = exponentials(x.to(sum_dtype(kept)), dims, torch.isinf)
        result = (total.log() + largest).to(kept)
        return result if keepdim else result.squeeze(dims)

    return whole_along(x, dims, keepdim) if x.dtype.is_complex else staged(x, dims, keepdim, run)


def backward_program(name: str, formula: Callable[..., Any]) -> None:
    @program(name)
    def run(grad: Tensor, output: Tensor, dim: int, input_dtype: object) -> Tensor:
        grad, output = (reduced(t).to(sum_dtype(t.dtype)) for t in (grad, output))
        return formula(grad, output, dim).to(input_dtype)


backward_program("_softmax_backward_data", lambda g, y, dim: (g - reduced((g * y).sum(dim, True))) * y)
backward_program("_log_softmax_backward_data", lambda g, y, dim: g - reduced(g.sum(dim, True)) * y.exp())
