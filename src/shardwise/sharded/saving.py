"""Copies of sharded tensors: deepcopy, pickle, torch.save and load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.sharded.base import make_wrapper
from shardwise.sharded.loading import current_process_group
from shardwise.sharded.metadata import MEM_FORMAT_ENCODING, ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ChunkShardingSpec, EnumerableShardingSpec
from shardwise.sharded.surface import Differentiable
from shardwise.torch_private import remote_device


@dataclass
class ProcessGroupState:
    """Where a tensor was saved."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @staticmethod
    def here(group: Any) -> ProcessGroupState:
        return ProcessGroupState(
            dist.get_rank(group), dist.get_rank(), dist.get_world_size(group), dist.get_world_size()
        )


class Savable(Differentiable):
    """Tiles that can be written down, by the rank that holds them."""

    ProcessGroupState = ProcessGroupState

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # type: ignore[override]
        if id(self) in memo:
            return memo[id(self)]
        parts = [part.detach().clone().requires_grad_(part.requires_grad) for part in self._parts]
        result = self._with_parts(parts)
        result._init_rrefs = False
        memo[id(self)] = result
        if getattr(self, "_is_param", False):
            result._is_param = True  # type: ignore[attr-defined]
        return result

    def __getstate__(self) -> tuple[Any, ...]:
        state = ProcessGroupState.here(self._process_group)
        shards = [Shard(_owned_memory(shard.tensor), shard.metadata) for shard in self._local_shards]
        return shards, self._metadata, state, self._sharding_spec, self._init_rrefs

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                'Need to initialize default process group using "init_process_group" before loading ShardedTensor'
            )
        shards, metadata, saved, spec, init_rrefs = state
        group = current_process_group()
        now = ProcessGroupState.here(group)
        for name, text in (
            ("local_rank", "Local rank"),
            ("global_rank", "Global rank"),
            ("local_world_size", "Local world size"),
            ("global_world_size", "Global world size"),
        ):
            then, here = getattr(saved, name), getattr(now, name)
            if then != here:
                raise RuntimeError(f"{text} at save time was {then}, but at load time was {here}")
        self._local_shards, self._metadata, self._sharding_spec = shards, metadata, spec
        self._settle(group, init_rrefs)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:  # type: ignore[override]
        flags = bool(getattr(self, "_is_param", False))
        return _unpickled, (type(self), self._metadata.size, self.dtype, flags), self.__getstate__()


def _owned_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is saved: a leaf, with no memory but its own behind it."""
    flag, tensor = tensor.requires_grad, tensor.detach()
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    return tensor.requires_grad_(flag)


def _unpickled(cls: type, size: torch.Size, dtype: torch.dtype, is_param: bool) -> Any:
    """The wrapper that `__setstate__` fills."""
    made: Any = make_wrapper(cls, size, dtype=dtype)
    made._local_shards = []
    if is_param:
        made._is_param = True
    return made


# What a pickled tensor is made of: torch.load(weights_only=True) may build these.
torch.serialization.add_safe_globals(
    [
        _unpickled,
        ProcessGroupState,
        Shard,
        ShardMetadata,
        ShardedTensorMetadata,
        TensorProperties,
        MEM_FORMAT_ENCODING,
        ChunkShardingSpec,
        EnumerableShardingSpec,
        remote_device,
    ]
)
