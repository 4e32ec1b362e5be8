"""Checks before a sharded tensor is made or gathered, and what all ranks know made from what each one knows: every
error names the values and the ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.sharded.groups import Group, all_gather_objects, check_remote_device, ranks_of, shards_of
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, as_size
from shardwise.sharded.shard import Shard, check_device
from shardwise.sharded.spec import ShardingSpec, in_order_of, spec_of
from shardwise.sharded.tiles import check_cover, check_disjoint

Parts = tuple[list[Shard], ShardedTensorMetadata, ShardingSpec]  # what a tensor is made of, besides its group


def checked_properties(
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    **others: object,
) -> TensorProperties:
    """Return the properties of a new tensor; raise where one has the wrong type or is not supported."""
    for name, value, kind in (
        ("layout", layout, torch.layout),
        ("requires_grad", requires_grad, bool),
        ("pin_memory", pin_memory, bool),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected a {kind.__name__}, got {value!r}")
    check_strided(layout)
    if memory_format != torch.contiguous_format:
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported, got memory_format={memory_format}"
        )
    return TensorProperties(dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory)


def check_strided(layout: torch.layout) -> None:
    if layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, got layout={layout}")


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
    expected: object, actual: object, prop_name: str, ranks: int | Sequence[int], is_local: bool = True
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
        return in_order(local_shards, mine), metadata, spec
    if not isinstance(spec, ShardingSpec):
        raise ValueError(f"Expecting ShardingSpec but got: {type(spec)}")
    built = spec.build_metadata(metadata.size, metadata.tensor_properties).shards_metadata
    odd = next(iter(set(built) ^ set(metadata.shards_metadata)), None)
    if odd is not None:
        raise ValueError(f"sharding_spec: {spec} does not give the shards of the metadata; they differ in {odd}")
    return in_order(local_shards, mine), metadata, spec


def _checked_metadata(
    local_shards: list[Shard], metadata: ShardedTensorMetadata, group: Group
) -> tuple[ShardedTensorMetadata, list[ShardMetadata]]:
    """Return a copy of the global metadata, which must fit this rank's shards, and this rank's part of it."""
    if not isinstance(metadata, ShardedTensorMetadata):
        raise TypeError(f"sharded_tensor_metadata: expected ShardedTensorMetadata, got {type(metadata).__name__}")
    properties, me = metadata.tensor_properties, dist.get_rank()
    check_strided(properties.layout)
    mine = shards_of(me, metadata.shards_metadata, group)
    if len(mine) != len(local_shards):
        raise RuntimeError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata in "
            f"sharded_tensor_metadata ({len(mine)}) on rank ({dist.get_rank(group)}) "
        )
    for shard, known in zip(local_shards, mine):
        _device_here(shard, group)
        if shard.metadata != known and shard.metadata not in mine:
            raise ValueError(f"rank {me} holds {shard.metadata}, but by the global metadata it holds {mine}")
        _check_contiguous(shard.tensor, me)
        for name in ("dtype", "layout", "requires_grad", "pin_memory"):
            want, have = (getattr(of, name) for of in (properties, TensorProperties.create_from_tensor(shard.tensor)))
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


def _device_here(shard: Shard, group: Group) -> torch.device:
    """Return the device that the placement of a shard names, which must be this rank's."""
    rank, device = check_remote_device(group, shard.metadata.placement)
    if rank != dist.get_rank():
        raise ValueError(
            f"Local shard metadata's rank does not match with the rank in its process group! Found current rank in "
            f"the process group: {dist.get_rank()}, local ShardMetadata placement's rank: {rank}"
        )
    return device


def _check_contiguous(tensor: torch.Tensor, rank: int) -> None:
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


# -- the metadata of all ranks: gathered, and every mismatch named on all ------------------------------------------
def agreed_parts(local_shards: list[Shard], global_size: Sequence[int | Sequence[int] | None], group: Group) -> Parts:
    """Return what a tensor is made of whose shards on each rank are those that the rank passes. An error of one
    rank is raised on all. A size with a None in it is found from the shards, as rows one after the other by rank."""
    known: ShardedTensorMetadata | Exception
    stacked = any(n is None for n in global_size)
    try:
        known = local_metadata(local_shards, torch.Size() if stacked else as_size(global_size), group)
    except (ValueError, TypeError, RuntimeError) as error:
        known = error
    gathered = all_gather_objects(known, group, "init_from_local_shards")
    if isinstance(known, Exception):
        raise known
    for rank, other in zip(ranks_of(group), gathered):
        if isinstance(other, Exception):
            raise type(other)(f"rank {rank}: {other}")
    metadata = global_metadata(gathered, stacked, ranks=ranks_of(group))
    if stacked and local_shards:
        before = gathered[: ranks_of(group).index(dist.get_rank())]
        first = sum(len(other.shards_metadata) for other in before)
        placed = metadata.shards_metadata[first : first + len(local_shards)]
        local_shards = [Shard.unchecked(shard.tensor, where) for shard, where in zip(local_shards, placed, strict=True)]
    spec = spec_of(metadata.shards_metadata)
    metadata.shards_metadata = in_order_of(spec, metadata.shards_metadata)
    mine = in_order(local_shards, in_order_of(spec, [shard.metadata for shard in local_shards]))
    return mine, metadata, spec


def local_metadata(local_shards: list[Shard], size: torch.Size, group: Group) -> ShardedTensorMetadata:
    """Return the metadata of this rank's shards, which must have the same properties."""
    if not isinstance(local_shards, (list, tuple)):
        raise TypeError(f"local_shards: expected a list of Shard, got {type(local_shards).__name__}")
    me, shards, first = dist.get_rank(), [], None
    for shard in local_shards:
        if not isinstance(shard, Shard):
            raise TypeError(f"local_shards: expected Shards, found a {type(shard).__name__} on rank:{me}")
        device = _device_here(shard, group)
        layout = shard.tensor.layout
        if layout != torch.strided:
            raise ValueError(f"Only torch.strided layout is currently supported, but found {layout} on rank:{me}!")
        _check_contiguous(shard.tensor, me)
        check_device(shard.tensor, device)
        here = TensorProperties.create_from_tensor(shard.tensor)
        first = first or here
        for name in ("dtype", "layout", "requires_grad", "pin_memory"):
            raise_if_mismatch(getattr(here, name), getattr(first, name), name, me)
        shards.append(shard.metadata)
    return ShardedTensorMetadata(shards, size, first or TensorProperties())


def global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None],
    recalc_metadata: bool = False,
    ranks: Sequence[int] | None = None,
) -> ShardedTensorMetadata:
    """Join the metadata of all ranks; one without shards must agree in the size only. With `recalc_metadata` the shards
    count as rows one after the other, by rank, whatever their offsets say."""
    shards: list[ShardMetadata] = []
    first: tuple[int, ShardedTensorMetadata] | None = None
    size: tuple[int, torch.Size] | None = None
    for rank, metadata in zip(ranks or itertools.count(), gathered_metadatas):
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
    if recalc_metadata:
        made.size = made.size or torch.Size(shards[0].shard_sizes)
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
