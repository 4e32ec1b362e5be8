"""Initial and random values: nn.init, in-place random fills and dropout, for one seed the same in any tiling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.random import distributions as draws
from shardwise.sharded.factories import drawn, fill_randomly, filled
from shardwise.sharded.ops.registry import own
from shardwise.sharded.tensor import ShardedTensor
from shardwise.torch_private.tensors import correct_fan

Gen = torch.Generator | None


def check_not_none(**params: object) -> None:
    for name, value in params.items():
        if value is None:
            raise ValueError(f"param: {name} shouldn't be None!")


@own(nn.init.uniform_)
def uniform_(tensor: ShardedTensor, a: float = 0.0, b: float = 1.0, generator: Gen = None) -> ShardedTensor:
    check_not_none(a=a, b=b)
    return drawn(tensor, draws.uniform(a, b), generator)


@own(nn.init.normal_)
def normal_(tensor: ShardedTensor, mean: float = 0.0, std: float = 1.0, generator: Gen = None) -> ShardedTensor:
    check_not_none(mean=mean, std=std)
    return drawn(tensor, draws.normal(mean, std), generator)


@own(nn.init.kaiming_uniform_)
def kaiming_uniform_(
    tensor: ShardedTensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", generator: Gen = None
) -> ShardedTensor:
    """The same as torch's, with the fan of the whole tensor."""
    check_not_none(a=a, mode=mode, nonlinearity=nonlinearity)
    fan = correct_fan(torch.empty(tensor.size(), device="meta"), mode)  # type: ignore[arg-type]
    bound = math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return drawn(tensor, draws.uniform(-bound, bound), generator)


@own(nn.init.constant_)
def constant_(tensor: ShardedTensor, val: float) -> ShardedTensor:
    check_not_none(val=val)
    return filled(tensor, val)


@own(F.dropout)
def dropout(input: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> ShardedTensor:
    """The same as on one device: what is dropped does not depend on the tiles."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    if p == 1.0:
        return input.mul_(0) if inplace else input * 0  # type: ignore[return-value]
    noise = fill_randomly(input._with_parts([torch.empty_like(x) for x in input._parts]), draws.dropout(p))
    return input.mul_(noise) if inplace else input * noise  # type: ignore[return-value]


def _in_place(make: Callable[..., draws.Distribution]) -> Callable[..., ShardedTensor]:
    """The method of torch that fills a tensor with numbers of a distribution, which is made from its arguments."""

    def fill(tensor: ShardedTensor, *args: object, generator: Gen = None, **named: object) -> ShardedTensor:
        named = {{"from": "low", "to": "high"}.get(name, name): value for name, value in named.items()}
        return drawn(tensor, make(*args, **named), generator)

    return fill


for _name in ("normal", "uniform", "exponential", "geometric", "log_normal", "cauchy", "bernoulli"):
    own(getattr(torch.Tensor, _name + "_"))(_in_place(getattr(draws, _name)))


@own(torch.Tensor.random_)
def random_(tensor: ShardedTensor, *bounds: int, generator: Gen = None, **named: int) -> ShardedTensor:
    """random_(), random_(to), random_(from, to)"""
    both = (*bounds, *(named[key] for key in ("from", "to") if key in named))
    return drawn(tensor, draws.integer(tensor.dtype, *both), generator)
