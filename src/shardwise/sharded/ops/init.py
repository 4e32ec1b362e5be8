"""Random values: nn.init, the in-place random fills and dropout draw the same tensor in any tiling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.random import distributions as draws
from shardwise.sharded.fill import fill_tiles
from shardwise.sharded.registry import own
from shardwise.sharded.tensor import ShardedTensor
from shardwise.torch_private import correct_fan


def _fill(tensor: Any, what: draws.Distribution, generator: Any = None) -> ShardedTensor:
    if not isinstance(tensor, ShardedTensor):
        raise TypeError(f"tensor: expected a ShardedTensor, got {type(tensor).__name__}")
    what.check(tensor.dtype)
    return _draw(tensor, what, generator)


def _draw(tensor: ShardedTensor, what: draws.Distribution, generator: Any = None) -> ShardedTensor:
    tiles = [(shard.tensor.detach(), shard.metadata.shard_offsets) for shard in tensor.local_shards()]
    fill_tiles(tiles, tensor.size(), what, tensor._parts[0], generator)
    return tensor


def check_given(**params: Any) -> None:
    for name, value in params.items():
        if value is None:
            raise ValueError(f"param: {name} shouldn't be None!")


@own(nn.init.uniform_)
def uniform_(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> ShardedTensor:
    check_given(a=a, b=b)
    return _fill(tensor, draws.uniform(a, b), generator)


@own(nn.init.normal_)
def normal_(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> ShardedTensor:
    check_given(mean=mean, std=std)
    return _fill(tensor, draws.normal(mean, std), generator)


@own(nn.init.kaiming_uniform_)
def kaiming_uniform_(
    tensor: Any, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> ShardedTensor:
    """As torch's, with the fan of the whole tensor."""
    check_given(a=a, mode=mode, nonlinearity=nonlinearity)
    fan = correct_fan(torch.empty(tensor.size(), device="meta"), mode)  # type: ignore[arg-type]
    bound = math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return _fill(tensor, draws.uniform(-bound, bound), generator)


@own(nn.init.constant_)
def constant_(tensor: Any, val: float) -> ShardedTensor:
    check_given(val=val)
    return _every_tile(tensor, lambda x: x.fill_(val))


def _every_tile(tensor: Any, write: Callable[[torch.Tensor], Any]) -> ShardedTensor:
    with torch.no_grad():
        for shard in tensor.local_shards():
            write(shard.tensor)
    return tensor


@own(F.dropout)
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> ShardedTensor:
    """As on one device: what is dropped does not depend on the tiles."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    if p == 1.0:
        return input.mul_(0) if inplace else input * 0
    noise = _draw(input._with_parts([torch.empty_like(x) for x in input._parts]), draws.dropout(p))
    return input.mul_(noise) if inplace else input * noise


def _integers(dtype: torch.dtype, *bounds: Any, **named: Any) -> draws.Distribution:
    """random_(to), random_(from, to)"""
    return draws.integer(dtype, *bounds, *(named[key] for key in ("from", "to") if key in named))


def _by_name(name: str) -> Callable[..., draws.Distribution]:
    make = getattr(draws, name)
    return lambda dtype, *args, **named: make(*args, **named)


_METHODS: dict[Any, Callable[..., draws.Distribution]] = {
    getattr(torch.Tensor, name + "_"): _by_name(name)
    for name in ("normal", "uniform", "exponential", "geometric", "log_normal", "cauchy", "bernoulli")
}
_METHODS[torch.Tensor.random_] = _integers
for _method, _make in _METHODS.items():

    @own(_method)
    def fill_randomly(
        tensor: Any, *args: Any, generator: Any = None, _make: Any = _make, **named: Any
    ) -> ShardedTensor:
        named = {{"from": "low", "to": "high"}.get(k, k) if _make is not _integers else k: v for k, v in named.items()}
        what = _make(tensor.dtype, *args, **named)
        return _fill(tensor, what, generator)
