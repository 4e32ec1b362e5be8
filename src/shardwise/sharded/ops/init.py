"""Random values: nn.init, the in-place random fills and dropout draw the same tensor in any tiling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.sharded.fill import fill_tiles
from shardwise.sharded.registry import own
from shardwise.sharded.tensor import ShardedTensor


def _fill(tensor: Any, draw: Callable[[torch.Tensor], Any]) -> ShardedTensor:
    if not isinstance(tensor, ShardedTensor):
        raise TypeError(f"tensor: expected a ShardedTensor, got {type(tensor).__name__}")
    tiles = [(shard.tensor.detach(), shard.metadata.shard_offsets) for shard in tensor.local_shards()]
    fill_tiles(tiles, tensor.size(), draw, tensor._parts[0])
    return tensor


@own(nn.init.uniform_)
def uniform_(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> ShardedTensor:
    return _fill(tensor, lambda x: x.uniform_(a, b, generator=generator))


@own(nn.init.normal_)
def normal_(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> ShardedTensor:
    return _fill(tensor, lambda x: x.normal_(mean, std, generator=generator))


@own(nn.init.kaiming_uniform_)
def kaiming_uniform_(
    tensor: Any, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> ShardedTensor:
    """As torch's, with the fan of the whole tensor."""
    fan = nn.init._calculate_correct_fan(torch.empty(tensor.size(), device="meta"), mode)  # type: ignore[arg-type]
    bound = math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return _fill(tensor, lambda x: x.uniform_(-bound, bound, generator=generator))


@own(nn.init.constant_)
def constant_(tensor: Any, val: float) -> ShardedTensor:
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
    noise = _fill(
        input._with_parts([torch.empty_like(x) for x in input._parts]), lambda x: F.dropout(x.fill_(1), p, True, True)
    )
    return input.mul_(noise) if inplace else input * noise


for _name in "normal_ uniform_ exponential_ geometric_ log_normal_ cauchy_ random_ bernoulli_".split():
    method = getattr(torch.Tensor, _name)

    @own(method)
    def fill_randomly(tensor: Any, *args: Any, _method: Any = method, **kwargs: Any) -> ShardedTensor:
        return _fill(tensor, lambda x: _method(x, *args, **kwargs))
