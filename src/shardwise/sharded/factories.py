"""Sharded tensors born distributed: zeros, ones, empty, full, rand, randn. Each rank makes its own tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch

from shardwise.random import distributions as draws
from shardwise.sharded.fill import fill_tiles
from shardwise.sharded.metadata import as_size
from shardwise.sharded.spec import ShardingSpec
from shardwise.sharded.tensor import Options, ShardedTensor


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Like torch.empty, in the tiles of the spec. Options are those of ShardedTensor."""
    return ShardedTensor(sharding_spec, *size, **options)


def _filled(spec: ShardingSpec, size: Sequence[Any], value: Any, options: Options) -> ShardedTensor:
    made = empty(spec, *size, **options)
    with torch.no_grad():
        for shard in made.local_shards():
            shard.tensor.fill_(value)
    return made


def _drawn(spec: ShardingSpec, size: Sequence[Any], what: draws.Distribution, options: Options) -> ShardedTensor:
    made = empty(spec, *size, **options)
    what.check(made.dtype)
    tiles = [(shard.tensor.detach(), shard.metadata.shard_offsets) for shard in made.local_shards()]
    fill_tiles(tiles, made.size(), what, made._parts[0])
    return made


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Like torch.zeros, in the tiles of the spec. Options are those of ShardedTensor."""
    return _filled(sharding_spec, size, 0, options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Like torch.ones, in the tiles of the spec. Options are those of ShardedTensor."""
    return _filled(sharding_spec, size, 1, options)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Like torch.full, in the tiles of the spec. Options are those of ShardedTensor."""
    if fill_value is None:
        raise ValueError("param: fill_value shouldn't be None!")
    return _filled(sharding_spec, as_size((size,) if isinstance(size, int) else size), fill_value, options)


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Like torch.rand: for one seed the same tensor in any tiling. Options are those of ShardedTensor."""
    return _drawn(sharding_spec, size, draws.uniform(), options)


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Like torch.randn: for one seed the same tensor in any tiling. Options are those of ShardedTensor."""
    return _drawn(sharding_spec, size, draws.normal(), options)
