"""ShardedTensor: a tensor cut into tiles of any shape, each held by any rank of a process group.

The wrapper knows every tile; the values of its own tiles are plain tensors, which record the autograd graph. A rank
that owns no tile keeps one empty tensor (`_anchor`) that goes through the same ops, so that it takes part in every
collective of a backward pass.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
import torch.distributed as dist

from shardwise.layout.tileset import TileSet
from shardwise.sharded import registry, remote
from shardwise.sharded.base import ShardedTensorBase, blank, new_tile
from shardwise.sharded.checks import check_spec, checked_metadata, in_order
from shardwise.sharded.held import home_of, same_tiles
from shardwise.sharded.metadata import ShardedTensorMetadata, TensorProperties, as_size
from shardwise.sharded.owners import as_group, shards_of
from shardwise.sharded.saving import Savable
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ShardingSpec, in_order_of, spec_of
from shardwise.torch_private import reentrant, with_torch_function

__all__ = ["Options", "ShardedTensor", "ShardedTensorBase", "first_sharded", "new_tile", "same_tiles"]


class Options(TypedDict, total=False):
    """What every way of making a tensor from a spec takes."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: Any
    init_rrefs: bool


class ShardedTensor(Savable):
    """A tensor whose tiles live on the ranks of a process group, as a sharding spec says.

    Made on all ranks of the group alike. Any torch op works on it: on the tiles where they allow it, else over a mesh
    layout, where the communication is in the ledger.
    """

    def __init__(
        self,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> None:
        super().__init__()
        group = as_group(process_group)
        if init_rrefs:
            remote.check_ready(group)
        properties = self._metadata.tensor_properties
        self._local_shards = [
            Shard.fitting(new_tile(shard.shard_sizes, home_of(shard), properties), shard)
            for shard in shards_of(dist.get_rank(), self._metadata.shards_metadata, group)
        ]
        self._settle(group, init_rrefs)

    def _settle(self, group: Any, init_rrefs: bool) -> None:
        """The last step of every constructor."""
        self._process_group, self._init_rrefs = group, init_rrefs
        if init_rrefs:
            self._remote = remote.RemoteShards(self, group)

    @staticmethod
    def _made(
        shards: list[Shard],
        metadata: ShardedTensorMetadata,
        spec: ShardingSpec,
        group: Any,
        *,
        tiles: TileSet | None = None,
        empty: torch.Tensor | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """From parts that are known to fit."""
        made = blank(ShardedTensor, spec, metadata)
        made._local_shards, made._tiles_kept, made._empty = shards, tiles, empty
        made._settle(group, init_rrefs)
        return made

    # -- remote shards --------------------------------------------------------------------------------------
    def remote_shards(self) -> dict[int, list[Any]]:
        """RRefs to the shards of every other rank that holds some, by RPC rank."""
        if not self._init_rrefs or self._remote is None:
            raise RuntimeError("ShardedTensor created with init_rrefs=False, no RRefs to remote shards available")
        return self._remote.rrefs(self._tiles.ranks.tolist())

    # -- torch comes in here --------------------------------------------------------------------------------
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        given = first_sharded((*args, *kwargs.values()))
        if given is not None:
            if func in registry.custom_ops:
                return registry.custom_ops[func](types, args, kwargs, given._process_group)
            if registry.has_spec_op(given._sharding_spec, func):
                return registry.dispatch_spec_op(given._sharding_spec, func, types, args, kwargs, given._process_group)
        return registry.default(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with reentrant(), with_torch_function():
            return registry.fallback[0](func, args, kwargs or {})

    # -- from parts -----------------------------------------------------------------------------------------
    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override]
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: Any = None,
        init_rrefs: bool = False,
        sharding_spec: Any = None,
    ) -> ShardedTensor:
        """From what this rank holds and what everyone knows. No communication; what can be checked here is."""
        group = as_group(process_group)
        if init_rrefs:
            remote.check_ready(group)
        metadata, mine = checked_metadata(local_shards, sharded_tensor_metadata, group)
        spec = sharding_spec
        if spec is None:
            spec = spec_of(metadata.shards_metadata)
            metadata.shards_metadata, mine = (in_order_of(spec, s) for s in (metadata.shards_metadata, mine))
        else:
            check_spec(spec, metadata)
        return cls._made(in_order(local_shards, mine), metadata, spec, group, init_rrefs=init_rrefs)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """From the one tensor this rank holds (its own is ignored where it owns no tile). No communication."""
        if not isinstance(local_tensor, torch.Tensor):
            raise TypeError(f"local_tensor: expected a torch.Tensor, got {type(local_tensor).__name__}")
        if local_tensor.layout != torch.strided or not local_tensor.is_contiguous():
            raise ValueError(
                f"local_tensor is not a contiguous Tensor. It has layout {local_tensor.layout}; call contiguous() first"
            )
        group = as_group(process_group)
        if init_rrefs:
            remote.check_ready(group)
        properties = TensorProperties.create_from_tensor(local_tensor)
        metadata = sharding_spec.build_metadata(as_size(global_size), properties)
        mine = shards_of(dist.get_rank(), metadata.shards_metadata, group)
        if len(mine) > 1:
            raise ValueError(
                f"sharding_spec gives rank {dist.get_rank()} {len(mine)} shards, but local_tensor is one; use "
                f"init_from_local_shards"
            )
        shards = [Shard(local_tensor, shard) for shard in mine]
        return cls._made(shards, metadata, sharding_spec, group, init_rrefs=init_rrefs)


def first_sharded(values: Any) -> ShardedTensor | None:
    """The first ShardedTensor among arguments, in lists too."""
    for value in values:
        if isinstance(value, ShardedTensor):
            return value
        if isinstance(value, (list, tuple)):
            found = first_sharded(value)
            if found is not None:
                return found
    return None


torch.serialization.add_safe_globals([ShardedTensor])
