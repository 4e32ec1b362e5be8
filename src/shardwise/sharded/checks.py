"""Checks before a sharded tensor is made or gathered; each error names the values and the ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.sharded.groups import Group, check_remote_device, shards_of
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ShardingSpec, in_order_of, spec_of
from shardwise.sharded.tiles import check_cover, check_disjoint

Parts = tuple[list[Shard], ShardedTensorMetadata, ShardingSpec]  # what a tensor is made of, besides its group


def checked_properties(
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    pin_memory: bool,
    memory_format: torch.memory_format,
) -> TensorProperties:
    """Return the properties of a new tensor; raise where one has the wrong type or is not supported."""
    for name, value, kind in (
        ("layout", layout, torch.layout),
        ("requires_grad", requires_grad, bool),
        ("pin_memory", pin_memory, bool),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected a {kind.__name__}, got {value!r}")
    if layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, got layout={layout}")
    if memory_format != torch.contiguous_format:
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported, got memory_format={memory_format}"
        )
    return TensorProperties(dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory)


def check_strided(properties: TensorProperties) -> None:
    if properties.layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, got layout={properties.layout}")


def wrong_out(me: int, dst: int, size: torch.Size, out: torch.Tensor | None) -> str | None:
    """Return what is wrong with the `out` of `gather` on this rank, or None."""
    if me != dst:
        if out is None:
            return None
        return (
            f"Argument ``dst_tensor`` must NOT be specified on non-destination ranks: rank {me} has out, dst is {dst}"
        )
    if out is None:
        return f"Argument ``dst_tensor`` must be specified on destination rank {dst}: pass out"
    if tuple(out.size()) != tuple(size):
        return f"Argument ``dst_tensor`` have size {tuple(out.size())},but should be {tuple(size)}"
    return None


def raise_if_mismatch(
    expected: Any, actual: Any, prop_name: str, ranks: int | Sequence[int], is_local: bool = True
) -> None:
    """Raise ValueError where a property differs between shards of one rank, or between two ranks."""
    if expected == actual:
        return
    if is_local:
        raise ValueError(
            f"Local shards' tensor {prop_name} property need to be the same on rank:{ranks}! Found one local shard "
            f"tensor {prop_name}={expected}, the other local shard tensor {prop_name}={actual}."
        )
    one, other = ranks  # type: ignore[misc]
    raise ValueError(
        f"ShardedTensor {prop_name} property does not match from different ranks! Found {prop_name}={expected} on "
        f"rank:{one}, and {prop_name}={actual} on rank:{other}."
    )


def parts_from_local_tensor(local_tensor: torch.Tensor, spec: ShardingSpec, size: torch.Size, group: Group) -> Parts:
    """Return what a tensor is made of whose tile on this rank, if it owns one, has these values."""
    if not isinstance(local_tensor, torch.Tensor):
        raise TypeError(f"local_tensor: expected a torch.Tensor, got {type(local_tensor).__name__}")
    if local_tensor.layout != torch.strided or not local_tensor.is_contiguous():
        raise ValueError(
            f"local_tensor is not a contiguous Tensor. It has layout {local_tensor.layout}; call contiguous() first"
        )
    metadata = spec.build_metadata(size, TensorProperties.create_from_tensor(local_tensor))
    mine = shards_of(dist.get_rank(), metadata.shards_metadata, group)
    if len(mine) > 1:
        raise ValueError(
            f"sharding_spec gives rank {dist.get_rank()} {len(mine)} shards, but local_tensor is one; use "
            f"init_from_local_shards"
        )
    return [Shard(local_tensor, shard) for shard in mine], metadata, spec


def checked_parts(
    local_shards: list[Shard], metadata: ShardedTensorMetadata, spec: ShardingSpec | None, group: Group
) -> Parts:
    """Return what a tensor is made of, once the metadata fits itself, the shards of this rank and the spec."""
    metadata, mine = _checked_metadata(local_shards, metadata, group)
    if spec is None:
        spec = spec_of(metadata.shards_metadata)
        metadata.shards_metadata, mine = (in_order_of(spec, s) for s in (metadata.shards_metadata, mine))
    else:
        _check_spec(spec, metadata)
    return in_order(local_shards, mine), metadata, spec


def _checked_metadata(
    local_shards: list[Shard], metadata: ShardedTensorMetadata, group: Group
) -> tuple[ShardedTensorMetadata, list[ShardMetadata]]:
    """Return a copy of the global metadata, which must fit this rank's shards, and this rank's part of it."""
    if not isinstance(metadata, ShardedTensorMetadata):
        raise TypeError(f"sharded_tensor_metadata: expected ShardedTensorMetadata, got {type(metadata).__name__}")
    properties, me = metadata.tensor_properties, dist.get_rank()
    check_strided(properties)
    mine = shards_of(me, metadata.shards_metadata, group)
    if len(mine) != len(local_shards):
        raise RuntimeError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata in "
            f"sharded_tensor_metadata ({len(mine)}) on rank ({dist.get_rank(group)}) "
        )
    for shard, known in zip(local_shards, mine):
        rank, _ = check_remote_device(group, shard.metadata.placement)
        if rank != me:
            raise ValueError(
                f"Local shard metadata's rank does not match with the rank in its process group! Found current rank in "
                f"the process group: {me}, local ShardMetadata placement's rank: {rank}"
            )
        if shard.metadata != known and shard.metadata not in mine:
            raise ValueError(f"rank {me} holds {shard.metadata}, but by the global metadata it holds {mine}")
        check_contiguous(shard.tensor, me)
        for name in ("dtype", "layout", "requires_grad", "pin_memory"):
            want = getattr(properties, name)
            have = shard.tensor.is_pinned() if name == "pin_memory" else getattr(shard.tensor, name)
            if want != have:
                raise ValueError(
                    f"Local shards' tensor {name} property is incompatible with tensor property on rank "
                    f"{dist.get_rank(group)}: tensor property {name}={want}, local shard tensor {name}={have}."
                )
    check_disjoint(metadata.shards_metadata)
    check_cover(metadata.shards_metadata, metadata.size)
    properties = copy.copy(properties)
    properties.memory_format = torch.contiguous_format
    return ShardedTensorMetadata(list(metadata.shards_metadata), torch.Size(metadata.size), properties), mine


def check_contiguous(tensor: torch.Tensor, rank: int) -> None:
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported! Found strides {tensor.stride()} for "
            f"sizes {tuple(tensor.size())} on rank:{rank}; call contiguous() first"
        )


def in_order(local_shards: Sequence[Shard], mine: Sequence[ShardMetadata]) -> list[Shard]:
    """Return the shards of a rank in the order of its metadata, from which the other ranks know which is which."""
    if all(shard.metadata is known or shard.metadata == known for shard, known in zip(local_shards, mine)):
        return list(local_shards)
    left: dict[ShardMetadata, list[Shard]] = {}
    for shard in local_shards:
        left.setdefault(shard.metadata, []).append(shard)
    ordered = [left[known].pop(0) for known in mine if left.get(known)]
    if len(ordered) != len(local_shards):
        twice = next(known for known, shards in left.items() if shards)
        raise ValueError(f"local_shards: {twice} is there more often than in the metadata")
    return ordered


def _check_spec(spec: object, metadata: ShardedTensorMetadata) -> None:
    if not isinstance(spec, ShardingSpec):
        raise ValueError(f"Expecting ShardingSpec but got: {type(spec)}")
    built = spec.build_metadata(metadata.size, metadata.tensor_properties).shards_metadata
    if set(built) != set(metadata.shards_metadata):
        odd = next(iter(set(built) ^ set(metadata.shards_metadata)))
        raise ValueError(f"sharding_spec: {spec} does not give the shards of the metadata; they differ in {odd}")
