"""Random ops. The numbers depend on the global tensor only: each rank draws what one device would draw, from torch's
default generator (seed it alike on all ranks), and keeps its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.layout.placement import REPLICATE
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Gathered, Operand
from shardwise.wrapper import wrap


def drawn_like(x: Any, draw: Callable[[torch.Tensor], torch.Tensor], dtype: Any = None) -> Any:
    """draw(empty global tensor), laid out as x is (a Partial axis gets the whole)."""
    layout = x._layout
    dtype = dtype or layout.dtype
    with torch.no_grad():
        whole = draw(torch.empty_strided(layout.shape, layout.stride, dtype=dtype, device=layout.device))
    places = [REPLICATE if p.is_partial() else p for p in layout.placements]
    replicated = layout.replace(placements=[REPLICATE] * len(places), dtype=whole.dtype)
    return wrap(layout.mesh.comm.shared(whole), replicated).redistribute(placements=places)


@rule("dropout")
def dropout(x: Operand, p: float = 0.5, training: bool = True, inplace: bool = False, **aten: Any) -> Algorithm:
    return Algorithm(run_dropout, writes=inplace)


def run_dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False, **aten: Any) -> Any:
    training = aten.get("train", training)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return x
    noise = drawn_like(x, lambda empty: F.dropout(empty.fill_(1), p, True))
    return x.mul_(noise) if inplace else x * noise


def fill_randomly(name: str) -> None:
    """In-place fills: x.normal_() and the like."""
    method = getattr(torch.Tensor, name + "_")

    @rule(name + "_")
    def fill(x: Operand, *args: Any, **kwargs: Any) -> Algorithm:
        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            return x.copy_(drawn_like(x, lambda e: method(e, *args, **kwargs)))

        return Algorithm(run, writes=True)


for _name in ["normal", "uniform", "exponential", "geometric", "log_normal", "cauchy", "random"]:
    fill_randomly(_name)


@rule("bernoulli_")
def bernoulli_(x: Operand, p: Any = 0.5, **kwargs: Any) -> Algorithm | None:
    if isinstance(p, Operand):
        return None

    def run(x: Any, p: float = 0.5, **kwargs: Any) -> Any:
        return x.copy_(drawn_like(x, lambda e: e.bernoulli_(p, **kwargs)))

    return Algorithm(run, writes=True)


def drawn_new(name: str) -> None:
    """rand_like and friends: a new tensor laid out as its model."""
    func = getattr(torch, name)

    @rule(name)
    def draw(x: Operand, *args: Any, **kwargs: Any) -> Algorithm:
        def run(x: Any, *args: Any, dtype: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
            result = drawn_like(x, lambda e: func(e, *args, dtype=dtype, **kwargs))
            return result.requires_grad_() if requires_grad else result

        return Algorithm(run)


for _name in ["rand_like", "randn_like", "randint_like"]:
    drawn_new(_name)


@rule("bernoulli normal multinomial poisson binomial _standard_gamma _sample_dirichlet native_dropout rrelu_with_noise")
def drawn_by_value(*args: Any, **kwargs: Any) -> Gathered:
    return Gathered("gather, since what is drawn depends on the values, and draw it on every rank alike")


@rule("rrelu")
def rrelu(x: Operand, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *args: Any, **kw: Any) -> Any:
    """Slopes are drawn for the negative elements; without training there is one slope."""
    if training:
        return drawn_by_value()
    return Algorithm(lambda x, *args, **kwargs: F.leaky_relu(x, (lower + upper) / 2))
