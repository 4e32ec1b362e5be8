"""Moving sharded tensors: gathered, resharded, on other devices, of another dtype."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note
from shardwise.layout.tileset import TileSet
from shardwise.move.tile_step import run_tiles
from shardwise.sharded import remote
from shardwise.sharded.checks import wrong_out
from shardwise.sharded.held import HeldTiles, at_home, same_tiles
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata
from shardwise.sharded.owners import as_group, is_member, rank_of, ranks_of
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ShardingSpec, spec_of
from shardwise.sharded.telling import tell_all
from shardwise.sharded.tiling import plan_between, tiles_of, whole_on
from shardwise.torch_private import parse_to


class Movable(HeldTiles):
    """Tiles that can go elsewhere."""

    _init_rrefs: bool = False
    _remote: remote.RemoteShards | None = None

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the whole value into `out`, given on rank `dst` of the group only. Every rank of the group calls it.

        With `dtype` the values travel as that; with `enforce_dtype` as `out`'s, on the ranks that hold tiles as this
        tensor's own.
        """
        ranks = ranks_of(self._process_group)
        if not 0 <= dst < len(ranks):
            raise ValueError(f"dst={dst} is not a rank of the process group of {len(ranks)} ranks {ranks}")
        me = dist.get_rank(self._process_group)
        wrong = wrong_out(me, dst, self.size(), out)
        plan = plan_between(self._tiles, whole_on(ranks[dst], self.size()), self.dtype.itemsize)
        with torch.no_grad():
            parts = [part.to(dtype) if dtype is not None else part for part in self._parts]
            into = None
            if out is not None and wrong is None and (out.dtype, out.device) == (parts[0].dtype, parts[0].device):
                into = [out]
            got = run_tiles(plan, parts, self._process_group, Note("gather"), into=into)
            if wrong is not None:  # after the exchange: the others are not left waiting
                raise ValueError(wrong)
            if me == dst and into is None:
                out.copy_(got[0])  # type: ignore[union-attr]

    def reshard(self, resharding_spec: ShardingSpec) -> Any:
        """Change the tiles, in place: from any spec to any spec, each element that must move once. Differentiable.

        Under `torch.no_grad()` a parameter stays a leaf.
        """
        if not isinstance(resharding_spec, ShardingSpec):
            raise NotImplementedError(f"reshard: expected a ShardingSpec, got {type(resharding_spec).__name__}")
        if resharding_spec == self._sharding_spec:
            return self
        metadata = resharding_spec.build_metadata(self.size(), self._metadata.tensor_properties)
        return self._move_to(tiles_of(metadata.shards_metadata, self._process_group), metadata, resharding_spec)

    def _move_to(
        self, tiles: TileSet, metadata: ShardedTensorMetadata, spec: ShardingSpec, note: Note | None = None
    ) -> Any:
        if not is_member(self._process_group):
            raise RuntimeError(
                f"reshard: rank {dist.get_rank()} is not in the tensor's process group; call it on its ranks only"
            )
        flag, leaf = self.requires_grad, self.is_leaf
        plan = plan_between(self._tiles, tiles, self.dtype.itemsize)
        parts = run_tiles(plan, self._parts, self._process_group, note or Note("reshard"))
        mine = [metadata.shards_metadata[i] for i in tiles.rows_of(dist.get_rank())]
        parts = [at_home(part, shard) for part, shard in zip(parts, mine)] or [self._as_empty(parts[0])]
        if flag and leaf and not torch.is_grad_enabled():
            parts = [part.detach().requires_grad_() for part in parts]
        self._local_shards = [Shard.fitting(part, shard) for part, shard in zip(parts, mine)]
        self._empty = None if mine else parts[0]
        self._metadata = ShardedTensorMetadata(metadata.shards_metadata, self.size(), metadata.tensor_properties)
        self._sharding_spec, self._tiles_kept = spec, tiles
        self.__dict__.pop("_grad_kept", None)
        if self._init_rrefs:
            self._remote = remote.RemoteShards(self, self._process_group)
        return self

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None) -> Any:  # type: ignore[override]
        """A copy in CPU memory; itself if it is there already."""
        _check_format(memory_format)
        if all(s.placement.device().type == "cpu" for s in self._metadata.shards_metadata):  # type: ignore[union-attr]
            return self
        return self._on_devices(lambda rank: torch.device("cpu"), process_group, False)

    def cuda(  # type: ignore[override]
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> Any:
        """A copy in CUDA memory, on the current device of each rank."""
        _check_format(memory_format)
        if device is not None:
            device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
            current = torch.device("cuda", torch.cuda.current_device())
            if device.type != "cuda" or (device.index is not None and device != current):
                raise ValueError(
                    f"Only device without device id (e.g. 'cpu' or 'cuda') is expected for ShardedTensor, but got "
                    f"{device}; the current device is {current}"
                )
        mine = torch.cuda.current_device()
        group = as_group(process_group if process_group is not None else self._process_group)
        home = dict(zip(ranks_of(group), tell_all(mine, group)))
        return self._on_devices(lambda rank: torch.device("cuda", home[rank]), process_group, non_blocking)

    def _on_devices(self, home: Callable[[int], torch.device], process_group: Any, non_blocking: bool) -> Any:
        group = self._process_group if process_group is None else process_group
        if ranks_of(group) != ranks_of(self._process_group):
            raise ValueError(
                f"process_group: ranks {ranks_of(group)}, but the tensor lives on {ranks_of(self._process_group)}"
            )
        moved = []
        for shard in self._metadata.shards_metadata:
            rank = rank_of(shard.placement)
            moved.append(ShardMetadata(shard.shard_offsets, shard.shard_sizes, f"rank:{rank}/{home(rank)}"))
        properties = copying.copy(self._metadata.tensor_properties)
        properties.pin_memory = False
        mine = [moved[i] for i in self._tiles.rows_of(dist.get_rank())]
        parts = [part.to(home(dist.get_rank()), non_blocking=non_blocking) for part in self._parts]
        shards = [Shard(part, shard) for part, shard in zip(parts, mine)]
        metadata = ShardedTensorMetadata(moved, self.size(), properties)
        spec = copying.copy(self._sharding_spec)
        if hasattr(spec, "placements"):
            spec.placements = [shard.placement for shard in moved]
        else:
            spec = spec_of(moved)
        return self._made(
            shards, metadata, spec, group, empty=None if shards else parts[0], init_rrefs=self._init_rrefs
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Tensor.to: another dtype, device, or that of another tensor; itself where nothing changes."""
        group = kwargs.pop("process_group", None)
        device, dtype, non_blocking, copy = _where_to(*args, **kwargs)
        result: Any = self
        if device is not None and device.type != self.device.type:
            if device.type == "cpu":
                result = result.cpu(process_group=group)
            elif device.type == "cuda":
                result = result.cuda(device, non_blocking, process_group=group)
            else:
                result = result._on_devices(lambda rank: torch.device(device.type), group, non_blocking)
        elif device is not None and device.type == "cuda":
            result = result.cuda(device, non_blocking, process_group=group) if device.index is not None else result
        if dtype is not None and dtype != result.dtype:
            result = result._with_parts([part.to(dtype) for part in result._parts])
        return result._with_parts([part.clone() for part in result._parts]) if copy and result is self else result

    def _like(self, other: HeldTiles, note: Note | None = None) -> Any:
        """This tensor in the tiles of another of its size."""
        if same_tiles(self, other):
            return self
        moved = self._with_parts(self._parts)
        metadata = other._metadata
        own = ShardedTensorMetadata(metadata.shards_metadata, self.size(), self._metadata.tensor_properties)
        return moved._move_to(other._tiles, own, other._sharding_spec, note)


def _where_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, bool]:
    """Device, dtype, non_blocking and copy of any form of Tensor.to."""
    _check_format(kwargs.pop("memory_format", torch.preserve_format))
    if "other" in kwargs:
        args = (kwargs.pop("other"), *args)
    if args and isinstance(args[0], (bool, float, complex)):
        raise TypeError(f"to: expected a device, a dtype or a tensor, got {args[0]!r}")
    before = 1 if args and isinstance(args[0], (torch.dtype, torch.Tensor)) else 2  # of non_blocking and copy
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
