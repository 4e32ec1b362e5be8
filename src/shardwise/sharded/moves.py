"""Moves of sharded tensors: gathered on one rank, resharded, to other devices, to another dtype."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note
from shardwise.layout.tileset import TileSet
from shardwise.sharded import remote
from shardwise.sharded.checks import wrong_out
from shardwise.sharded.groups import Group, all_gather_objects, as_group, is_member, rank_of, ranks_of, same_ranks
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, device_of
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ShardingSpec, spec_of
from shardwise.sharded.tiles import move_parts, whole_on
from shardwise.torch_private.tensors import parse_to

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


def same_tiles(one: ShardedTensor, other: ShardedTensor) -> bool:
    """Whether two tensors have the same tiles on the same ranks, in the same order, in groups of the same ranks."""
    if one._metadata.shards_metadata is other._metadata.shards_metadata:
        return True
    if not same_ranks(one._process_group, other._process_group):
        return False
    a, b = one._tiles, other._tiles
    return a is b or (
        len(a.ranks) == len(b.ranks)
        and bool((a.ranks == b.ranks).all())
        and a.tiles.starts.shape == b.tiles.starts.shape
        and bool((a.tiles.starts == b.tiles.starts).all() and (a.tiles.ends == b.tiles.ends).all())
    )


def gather(
    self: ShardedTensor,
    dst: int = 0,
    out: torch.Tensor | None = None,
    enforce_dtype: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the whole value into a tensor of one rank. Every rank of the group calls it.

    Args:
        dst: The rank of the group that gets the value.
        out: The tensor to write into, on rank `dst` only. Values are cast to its dtype.
        enforce_dtype: Whether values travel in this tensor's dtype, whatever `dtype` says. Deprecated in torch.
        dtype: The dtype in which values travel. The default is this tensor's.

    Raises:
        ValueError: If `dst` is no rank of the group, or `out` is missing, of another size, or passed elsewhere.
    """
    group, ranks = self._process_group, ranks_of(self._process_group)
    if not 0 <= dst < len(ranks):
        raise ValueError(f"dst={dst} is not a rank of the process group of {len(ranks)} ranks {ranks}")
    me = dist.get_rank(group)
    wrong = wrong_out(me, dst, self.size(), out)
    with torch.no_grad():
        parts = self._parts if dtype is None or enforce_dtype else [part.to(dtype) for part in self._parts]
        into = None
        if out is not None and wrong is None and (out.dtype, out.device) == (parts[0].dtype, parts[0].device):
            into = [out]
        got = move_parts(parts, self._tiles, whole_on(ranks[dst], self.size()), group, Note("gather"), into)
        if wrong is not None:  # raised after the exchange, so that the other ranks do not wait
            raise ValueError(wrong)
        if out is not None and into is None:
            out.copy_(got[0])


def move_to(
    tensor: ShardedTensor, tiles: TileSet, metadata: ShardedTensorMetadata, spec: ShardingSpec, note: Note
) -> ShardedTensor:
    """Move a tensor to other tiles, in place, and return it. `metadata` and `spec` are those of the tiles."""
    group = tensor._process_group
    if not is_member(group):
        raise RuntimeError(
            f"reshard: rank {dist.get_rank()} is not in the tensor's process group; call it on its ranks only"
        )
    stays_leaf = tensor.requires_grad and tensor.is_leaf and not torch.is_grad_enabled()
    parts = move_parts(tensor._parts, tensor._tiles, tiles, group, note)
    mine = [metadata.shards_metadata[i] for i in tiles.rows_of(dist.get_rank())]
    parts = [part.to(device_of(shard)) for part, shard in zip(parts, mine)] or [tensor._as_empty(parts[0])]
    if stays_leaf:
        parts = [part.detach().requires_grad_() for part in parts]
    tensor._local_shards = [Shard.unchecked(part, shard) for part, shard in zip(parts, mine)]
    tensor._empty = None if mine else parts[0]
    tensor._metadata = ShardedTensorMetadata(metadata.shards_metadata, tensor.size(), metadata.tensor_properties)
    tensor._sharding_spec, tensor._tiles_kept, tensor._grad_kept = spec, tiles, None
    if tensor._init_rrefs:
        before, tensor._remote = tensor._remote, remote.RemoteShards(tensor)
        if before is not None:
            before.end()
    return tensor


# -- devices -------------------------------------------------------------------------------------------------------
def cpu(
    self: ShardedTensor, memory_format: torch.memory_format = torch.preserve_format, process_group: Group | None = None
) -> ShardedTensor:
    """Return a copy in CPU memory; itself if it is there already.

    Args:
        memory_format: `torch.preserve_format` or `torch.contiguous_format`.
        process_group: A group of the same ranks whose backend works on the CPU.
    """
    _check_format(memory_format)
    if all(device_of(s).type == "cpu" for s in self._metadata.shards_metadata):
        return self
    return _on_devices(self, lambda rank: torch.device("cpu"), process_group, False)


def cuda(
    self: ShardedTensor,
    device: torch.device | str | int | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
    process_group: Group | None = None,
) -> ShardedTensor:
    """Return a copy in CUDA memory, on the current device of each rank.

    Args:
        device: "cuda" or the current device; another one raises a ValueError.
        non_blocking: As in `torch.Tensor.cuda`.
        memory_format: `torch.preserve_format` or `torch.contiguous_format`.
        process_group: A group of the same ranks for CUDA.
    """
    _check_format(memory_format)
    if device is not None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        current = torch.device("cuda", torch.cuda.current_device())
        if device.type != "cuda" or (device.index is not None and device != current):
            raise ValueError(
                f"Only device without device id (e.g. 'cpu' or 'cuda') is expected for ShardedTensor, but got "
                f"{device}; the current device is {current}"
            )
    mine = torch.cuda.current_device()
    group = as_group(process_group if process_group is not None else self._process_group)
    devices = dict(zip(ranks_of(group), all_gather_objects(mine, group, "cuda")))
    return _on_devices(self, lambda rank: torch.device("cuda", devices[rank]), process_group, non_blocking)


def _on_devices(
    tensor: ShardedTensor,
    device_of_rank: Callable[[int], torch.device],
    process_group: Group | None,
    non_blocking: bool,
) -> ShardedTensor:
    """Return a copy whose tiles are on the device that `device_of_rank` says for their rank."""
    group, me = tensor._process_group if process_group is None else process_group, dist.get_rank()
    if not same_ranks(group, tensor._process_group):
        raise ValueError(
            f"process_group: ranks {ranks_of(group)}, but the tensor lives on {ranks_of(tensor._process_group)}"
        )
    moved = []
    for shard in tensor._metadata.shards_metadata:
        rank = rank_of(shard.placement)
        moved.append(ShardMetadata(shard.shard_offsets, shard.shard_sizes, f"rank:{rank}/{device_of_rank(rank)}"))
    properties = copying.copy(tensor._metadata.tensor_properties)
    properties.pin_memory = False
    parts = [part.to(device_of_rank(me), non_blocking=non_blocking) for part in tensor._parts]
    shards = [Shard(part, moved[i]) for part, i in zip(parts, tensor._tiles.rows_of(me))]
    metadata, empty = ShardedTensorMetadata(moved, tensor.size(), properties), None if shards else parts[0]
    spec = _with_placements(tensor._sharding_spec, moved)
    return tensor._from_parts(shards, metadata, spec, group, empty=empty, init_rrefs=tensor._init_rrefs)


def _with_placements(spec: ShardingSpec, moved: list[ShardMetadata]) -> ShardingSpec:
    """Return the spec with the placements that its tiles have now."""
    if not hasattr(spec, "placements"):  # a user's own class of specs may have them too
        return spec_of(moved)
    copy = copying.copy(spec)
    copy.placements = [shard.placement for shard in moved]
    return copy


def to(self: ShardedTensor, *args: object, process_group: Group | None = None, **kwargs: object) -> ShardedTensor:
    """Return the tensor with another dtype or on another device; itself where nothing changes.

    Args:
        *args: As in `torch.Tensor.to`.
        process_group: A group of the same ranks for the new device.
        **kwargs: As in `torch.Tensor.to`.
    """
    device, dtype, non_blocking, copy = _parse_to(*args, **kwargs)
    result = self
    if device is not None and device.type != self.device.type:
        if device.type == "cpu":
            result = result.cpu(process_group=process_group)
        elif device.type == "cuda":
            result = result.cuda(device, non_blocking, process_group=process_group)
        else:
            result = _on_devices(result, lambda rank: torch.device(device.type), process_group, non_blocking)
    elif device is not None and device.type == "cuda" and device.index is not None:
        result = result.cuda(device, non_blocking, process_group=process_group)
    if dtype is not None and dtype != result.dtype:
        result = result._with_parts([part.to(dtype) for part in result._parts])
    return result._with_parts([part.clone() for part in result._parts]) if copy and result is self else result


def _parse_to(*args: object, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, bool]:
    """Return device, dtype, non_blocking and copy of any form of Tensor.to."""
    _check_format(kwargs.pop("memory_format", torch.preserve_format))
    if "other" in kwargs:
        args = (kwargs.pop("other"), *args)
    if args and isinstance(args[0], (bool, float, complex)):
        raise TypeError(f"to: expected a device, a dtype or a tensor, got {args[0]!r}")
    before = 1 if args and isinstance(args[0], (torch.dtype, torch.Tensor)) else 2  # arguments before non_blocking
    copy = kwargs.pop("copy", args[before + 1] if len(args) > before + 1 else False)
    args = args[: before + 1]
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, _ = parse_to(*args, **kwargs)
    return device, dtype, non_blocking, bool(copy)


def _check_format(memory_format: torch.memory_format) -> None:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported, got memory_format={memory_format}"
        )
