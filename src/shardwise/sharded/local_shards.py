"""A sharded tensor from what each rank holds: the ranks tell each other, and every mismatch is named on all of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.sharded import remote
from shardwise.sharded.checks import check_contiguous, in_order, raise_if_mismatch
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, as_size
from shardwise.sharded.owners import as_group, check_remote_device, is_member, ranks_of
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import in_order_of, spec_of
from shardwise.sharded.telling import tell_all
from shardwise.sharded.tensor import ShardedTensor
from shardwise.sharded.tiling import check_cover, check_disjoint


def init_from_local_shards(
    local_shards: list[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    """The tensor of this global size of which each rank holds the shards it gives. Every rank of the group calls it."""
    group = as_group(process_group)
    if not is_member(group):
        raise ValueError(f"process_group: rank {dist.get_rank()} is not in it; call this on its ranks only")
    if init_rrefs:
        remote.check_ready(group)
    metadata = _agreed(local_shards, global_size, group)
    spec = spec_of(metadata.shards_metadata)
    metadata.shards_metadata = in_order_of(spec, metadata.shards_metadata)
    mine = in_order(local_shards, in_order_of(spec, [shard.metadata for shard in local_shards]))
    return ShardedTensor._made(mine, metadata, spec, group, init_rrefs=init_rrefs)


def _agreed(local_shards: Any, global_size: Sequence[Any], group: Any) -> ShardedTensorMetadata:
    """The global metadata; errors of one rank are raised on all, so that none is left waiting."""
    mine: Any
    try:
        mine = local_metadata(local_shards, as_size(global_size), group)
    except (ValueError, TypeError, RuntimeError) as error:
        mine = error
    told = tell_all(mine, group)
    if isinstance(mine, Exception):
        raise mine
    for rank, other in zip(ranks_of(group), told):
        if isinstance(other, Exception):
            raise type(other)(f"rank {rank}: {other}")
    return global_metadata(told, ranks_of(group))


def local_metadata(local_shards: Any, size: torch.Size, group: Any) -> ShardedTensorMetadata:
    """What this rank says of its shards; they must be alike."""
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
    told: Sequence[ShardedTensorMetadata | None], ranks: Sequence[int] | None = None, *, recalc: bool = False
) -> ShardedTensorMetadata:
    """One metadata out of every rank's; ranks without shards agree with anything but another size.

    With `recalc` the shards are rows one after the other, by rank, wherever they say they are.
    """
    ranks = list(range(len(told))) if ranks is None else ranks
    shards: list[ShardMetadata] = []
    first: tuple[int, ShardedTensorMetadata] | None = None
    size: tuple[int, torch.Size] | None = None
    for rank, metadata in zip(ranks, told):
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
        one_after_the_other(made, 0)
    check_disjoint(made.shards_metadata)
    check_cover(made.shards_metadata, made.size)
    return made


def one_after_the_other(global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int) -> None:
    """Put the shards one after the other along a dim, in place, and make the tensor as long as they are together."""
    at, metadata = 0, global_sharded_tensor_metadata
    for shard in metadata.shards_metadata:
        shard.shard_offsets = [0] * len(shard.shard_sizes)
        shard.shard_offsets[sharded_dim] = at
        at += shard.shard_sizes[sharded_dim]
    size = list(metadata.size)
    size[sharded_dim] = at
    metadata.size = torch.Size(size)


def _from_local_shards(
    cls: type, local_shards: list[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    return init_from_local_shards(local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs)


ShardedTensor._init_from_local_shards = classmethod(_from_local_shards)  # type: ignore[attr-defined]
