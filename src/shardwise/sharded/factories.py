"""Ways to make sharded tensors: filled, drawn, from the shards of each rank, from the tensor of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.distributed as dist

from shardwise.comm.record import Note
from shardwise.errors import MeshError
from shardwise.layout import contiguous_stride
from shardwise.random import distributions as draws
from shardwise.random import torch_stream
from shardwise.random.fill import fill_tile
from shardwise.random.generator import TORCH, next_key, stream
from shardwise.sharded.base import Options
from shardwise.sharded.groups import Group, as_group, check_member, ranks_of
from shardwise.sharded.metadata import TensorProperties, as_size, device_of
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ShardingSpec
from shardwise.sharded.tensor import ShardedTensor
from shardwise.sharded.tiles import move_parts, tiles_of, whole_on

Size = int | Sequence[int]
Number = bool | int | float | complex


def empty(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """Return a tensor with undefined values, like `torch.empty`.

    Args:
        sharding_spec: Which tiles the tensor is cut into, and who owns them. Each rank makes its own.
        *size: The global size, as ints or as one sequence of ints.
        **options: As of ShardedTensor: `dtype`, `requires_grad`, `process_group` and so on.
    """
    return ShardedTensor(sharding_spec, *size, **options)


def zeros(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """Return a tensor of zeros, like `torch.zeros`.

    Args:
        sharding_spec, *size, **options: As for `empty`.
    """
    return filled(empty(sharding_spec, *size, **options), 0)


def ones(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """Return a tensor of ones, like `torch.ones`.

    Args:
        sharding_spec, *size, **options: As for `empty`.
    """
    return filled(empty(sharding_spec, *size, **options), 1)


def full(sharding_spec: ShardingSpec, size: Size, fill_value: Number, **options: Unpack[Options]) -> ShardedTensor:
    """Return a tensor of one value, like `torch.full`.

    Args:
        sharding_spec: Which tiles the tensor is cut into, and who owns them. Each rank makes its own.
        size: The global size.
        fill_value: The value of every element.
        **options: As of ShardedTensor: `dtype`, `requires_grad`, `process_group` and so on.

    Raises:
        ValueError: If `fill_value` is None.
    """
    if fill_value is None:
        raise ValueError("param: fill_value shouldn't be None!")
    return filled(empty(sharding_spec, *as_size((size,) if isinstance(size, int) else size), **options), fill_value)


def rand(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """Return uniform random numbers, like `torch.rand`; they are the same in any tiling.

    Args:
        sharding_spec, *size, **options: As for `empty`.
    """
    return drawn(empty(sharding_spec, *size, **options), draws.uniform())


def randn(sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]) -> ShardedTensor:
    """Return normal random numbers, like `torch.randn`; they are the same in any tiling.

    Args:
        sharding_spec, *size, **options: As for `empty`.
    """
    return drawn(empty(sharding_spec, *size, **options), draws.normal())


def filled(tensor: ShardedTensor, value: Number) -> ShardedTensor:
    """Fill the tiles of this rank with one value, not recorded by autograd."""
    with torch.no_grad():
        for shard in tensor.local_shards():
            shard.tensor.fill_(value)
    return tensor


def drawn(tensor: ShardedTensor, what: draws.Distribution, generator: torch.Generator | None = None) -> ShardedTensor:
    """Fill a tensor with random numbers and return it; torch's own errors for a wrong dtype or argument come first."""
    if not isinstance(tensor, ShardedTensor):
        raise TypeError(f"tensor: expected a ShardedTensor, got {type(tensor).__name__}")
    what.check(tensor.dtype)
    return fill_randomly(tensor, what, generator)


def fill_randomly(
    tensor: ShardedTensor, what: draws.Distribution, generator: torch.Generator | None = None
) -> ShardedTensor:
    """Fill a tensor with the numbers that for this seed it gets in any tiling, and that a DTensor gets; return it."""
    size, like = tensor.size(), tensor._parts[0]
    tiles = [(shard.tensor.detach(), shard.metadata.shard_offsets) for shard in tensor.local_shards()]
    with torch.no_grad():
        if stream() == TORCH:
            stride = contiguous_stride(size)
            for start, numbers in torch_stream.chunks(size, stride, like.dtype, like.device, what, generator):
                for tile, offsets in tiles:
                    region = tuple(((a, a + n),) if n else () for a, n in zip(offsets, tile.shape, strict=True))
                    if tile.numel():
                        torch_stream.keep_part(tile, region, size, start, numbers)
        else:
            key = next_key(generator)  # on a rank without tiles too: its generator stays in step with the others'
            for tile, offsets in tiles:
                fill_tile(tile, offsets, size, what, key)
    return tensor


# -- from what ranks hold ------------------------------------------------------------------------------------------
init_from_local_shards = ShardedTensor._init_from_local_shards


def scatter(
    tensor: torch.Tensor, spec: ShardingSpec, src_rank: int = 0, process_group: Group | None = None
) -> ShardedTensor:
    """Cut the tensor of one rank of the group into tiles that are sent to their owners, in one exact exchange."""
    group = check_member(as_group(process_group))
    ranks, me = ranks_of(group), dist.get_rank()
    if not isinstance(src_rank, int) or not 0 <= src_rank < len(ranks):
        raise MeshError(f"src_rank={src_rank} is not a rank of the process group of {len(ranks)} ranks {ranks}")
    metadata = spec.build_metadata(tensor.size(), TensorProperties.create_from_tensor(tensor))
    tiles = tiles_of(metadata.shards_metadata, group)
    value = tensor.detach() if me == ranks[src_rank] else tensor.new_empty(0)
    with torch.no_grad():
        parts = move_parts([value], whole_on(ranks[src_rank], tensor.size()), tiles, group, Note("shard"))
    mine = [metadata.shards_metadata[i] for i in tiles.rows_of(me)]
    shards = []
    for part, shard in zip(parts, mine):
        part = part.to(device_of(shard))
        if part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() and part.numel():
            part = part.clone()  # the tiles have memory of their own
        shards.append(Shard(part.requires_grad_(metadata.tensor_properties.requires_grad), shard))
    return ShardedTensor._from_parts(shards, metadata, spec, group, tiles=tiles)


ShardingSpec._scatter = staticmethod(scatter)
