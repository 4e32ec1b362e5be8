"""The metadata of a tensor from the shards that each rank holds: gathered, and every mismatch named on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.sharded.checks import Parts, check_contiguous, in_order, raise_if_mismatch
from shardwise.sharded.groups import Group, all_gather_objects, check_remote_device, ranks_of
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, as_size
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import in_order_of, spec_of
from shardwise.sharded.tiles import check_cover, check_disjoint


def agreed_parts(local_shards: list[Shard], global_size: Sequence[int | Sequence[int]], group: Group) -> Parts:
    """Return what a tensor is made of whose shards on each rank are those that the rank passes. One collective."""
    metadata = _agreed(local_shards, global_size, group)
    spec = spec_of(metadata.shards_metadata)
    metadata.shards_metadata = in_order_of(spec, metadata.shards_metadata)
    mine = in_order(local_shards, in_order_of(spec, [shard.metadata for shard in local_shards]))
    return mine, metadata, spec


def _agreed(
    local_shards: list[Shard], global_size: Sequence[int | Sequence[int]], group: Group
) -> ShardedTensorMetadata:
    """Return the metadata of all ranks; an error of one rank is raised on all, so that none is left waiting."""
    mine: ShardedTensorMetadata | Exception
    try:
        mine = local_metadata(local_shards, as_size(global_size), group)
    except (ValueError, TypeError, RuntimeError) as error:
        mine = error
    gathered = all_gather_objects(mine, group)
    if isinstance(mine, Exception):
        raise mine
    for rank, other in zip(ranks_of(group), gathered):
        if isinstance(other, Exception):
            raise type(other)(f"rank {rank}: {other}")
    return global_metadata(gathered, ranks_of(group))


def local_metadata(local_shards: list[Shard], size: torch.Size, group: Group) -> ShardedTensorMetadata:
    """Return the metadata of this rank's shards, which must have the same properties."""
    if not isinstance(local_shards, (list, tuple)):
        raise TypeError(f"local_shards: expected a list of Shard, got {type(local_shards).__name__}")
    me, shards, first = dist.get_rank(), [], None
    for shard in local_shards:
        if not isinstance(shard, Shard):
            raise TypeError(f"local_shards: expected Shards, found a {type(shard).__name__} on rank:{me}")
        rank, device = check_remote_device(group, shard.metadata.placement)
        _check_strided(shard.tensor, me)
        if rank != me:
            raise ValueError(
                f"Local shard metadata's rank does not match with the rank in its process group! Found current rank in "
                f"the process group: {me}, local ShardMetadata placement's rank: {rank}"
            )
        if shard.tensor.device != device:
            raise ValueError(
                f"Local shard tensor device does not match with local Shard's placement! Found local shard tensor "
                f"device: {shard.tensor.device}, local shard metadata placement device: {device}"
            )
        here = TensorProperties.create_from_tensor(shard.tensor)
        first = first or here
        for name in ("dtype", "layout", "requires_grad", "pin_memory"):
            raise_if_mismatch(getattr(first, name), getattr(here, name), name, me)
        shards.append(shard.metadata)
    return ShardedTensorMetadata(shards, size, first or TensorProperties())


def _check_strided(tensor: torch.Tensor, rank: int) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, but found {tensor.layout} on rank:{rank}!")
    check_contiguous(tensor, rank)


def global_metadata(
    gathered: Sequence[ShardedTensorMetadata | None], ranks: Sequence[int] | None = None, *, recalc: bool = False
) -> ShardedTensorMetadata:
    """Join the metadata of all ranks. A rank without shards must agree in the size only.

    With `recalc` the shards are taken as rows one after the other, by rank, whatever their offsets say.
    """
    ranks = list(range(len(gathered))) if ranks is None else ranks
    shards: list[ShardMetadata] = []
    first: tuple[int, ShardedTensorMetadata] | None = None
    size: tuple[int, torch.Size] | None = None
    for rank, metadata in zip(ranks, gathered):
        if metadata is None:
            continue
        size = size or (rank, metadata.size)
        raise_if_mismatch(size[1], metadata.size, "global_size", (size[0], rank), is_local=False)
        if not metadata.shards_metadata:
            continue
        first = first or (rank, metadata)
        for name in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"):
            one, other = (getattr(m.tensor_properties, name) for m in (first[1], metadata))
            raise_if_mismatch(one, other, name, (first[0], rank), is_local=False)
        shards += metadata.shards_metadata
    if first is None or size is None:
        raise ValueError("ShardedTensor have no local shards on all ranks!")
    made = ShardedTensorMetadata(shards, size[1], copy.copy(first[1].tensor_properties))
    if recalc:
        made.shards_metadata = [copy.deepcopy(shard) for shard in shards]
        put_one_after_the_other(made, 0)
    check_disjoint(made.shards_metadata)
    check_cover(made.shards_metadata, made.size)
    return made


def put_one_after_the_other(global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int) -> None:
    """Put the shards one after the other along a dim, in place, and make the tensor as long as they are together."""
    at, metadata = 0, global_sharded_tensor_metadata
    for shard in metadata.shards_metadata:
        shard.shard_offsets = [0] * len(shard.shard_sizes)
        shard.shard_offsets[sharded_dim] = at
        at += shard.shard_sizes[sharded_dim]
    size = list(metadata.size)
    size[sharded_dim] = at
    metadata.size = torch.Size(size)
