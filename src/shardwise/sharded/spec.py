"""Sharding specs: which tiles a tensor is cut into, and who owns them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, asremote_device
from shardwise.sharded.tiles import check_cover, check_disjoint
from shardwise.torch_private import remote_device


class PlacementSpec(ABC):  # noqa: B024
    """Where something lives; subclass it for placements of your own."""


def _remote(placement: Any) -> Any:
    return placement if isinstance(placement, remote_device) else asremote_device(_text(placement))


def _text(placement: Any) -> str:
    if isinstance(placement, torch.device):
        return str(placement)
    if not isinstance(placement, str):
        raise TypeError(f"Invalid type for remote_device: {type(placement)}; write a string such as 'rank:0/cpu'")
    return placement


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """One device of one rank."""

    device: remote_device

    def __post_init__(self) -> None:
        self.device = _remote(self.device)


class ShardingSpec(ABC):
    """How tensors are cut into tiles. `build_metadata` is all that a spec of your own must say."""

    _scatter: Callable[..., Any]  # set by factories.py, which needs the class of tensors, which needs the specs

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The tiles of a tensor of this size, with their owners."""

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        """The tensor that `src_rank` of the group holds, cut into tiles that are sent to their owners."""
        return ShardingSpec._scatter(tensor, self, src_rank, process_group)


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """Cut along one dim like torch.chunk: one chunk for each placement, in order."""

    dim: int | str
    placements: list[remote_device | str]

    def __post_init__(self) -> None:
        self._verify_dim(self.dim)
        if isinstance(self.placements, str):
            raise TypeError(f"placements: expected a list, got {self.placements!r}; write [{self.placements!r}]")
        self.placements = [_remote(p) for p in self.placements]

    @staticmethod
    def _verify_dim(dim: Any) -> None:
        if isinstance(dim, str):
            raise NotImplementedError(f"ChunkShardingSpec does not support named dimension yet! Got dim={dim!r}")
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise ValueError(f"Sharding dim needs to be an integer, found: {dim}")

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        self._verify_dim(self.dim)
        ndim, dim = len(tensor_sizes), int(self.dim)
        if not -ndim <= dim < ndim:
            raise ValueError(f"Invalid sharding dim: {dim} for a tensor of size {list(tensor_sizes)}")
        if not self.placements:
            raise ValueError("placements: the list is empty; name at least one, such as 'rank:0/cpu'")
        dim, n = dim % ndim, tensor_sizes[dim]
        step = chunk_size(n, len(self.placements))
        sizes, zeros = list(tensor_sizes), [0] * ndim
        shards = []
        for i, placement in enumerate(self.placements):
            start, end = min(i * step, n), min((i + 1) * step, n)
            offsets, lengths = zeros.copy(), sizes.copy()
            offsets[dim], lengths[dim] = start, end - start
            shards.append(ShardMetadata(offsets, lengths, placement))
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """Any tiles with any owners, one by one. They may not overlap."""

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError(f"Empty shard list provided: {self.shards}")
        check_disjoint(self.shards)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        check_cover(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)


def chunk_size(dim_size: int, chunks: int) -> int:
    """How many indices all chunks but the last ones get, as torch.chunk deals them out."""
    return (dim_size + chunks - 1) // chunks


def spec_of(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The spec behind tiles: chunks of one dim where they are that, else the list of them."""
    if not shards_metadata:
        raise ValueError(f"Empty shard list provided: {list(shards_metadata)}")
    found = _as_chunks(shards_metadata)
    return found if found is not None else EnumerableShardingSpec(list(shards_metadata))


def in_order_of(spec: ShardingSpec, shards_metadata: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    """Tiles as the spec that was found for them lists them: chunks one after the other."""
    if isinstance(spec, ChunkShardingSpec):
        return _along(int(spec.dim), shards_metadata)
    return list(shards_metadata)


def _along(dim: int, shards: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    return sorted(shards, key=lambda s: (s.shard_offsets[dim], -s.shard_sizes[dim]))


def _as_chunks(shards: Sequence[ShardMetadata]) -> ChunkShardingSpec | None:
    first = shards[0]
    cut = {
        dim
        for shard in shards
        for dim, (a, b) in enumerate(zip(shard.shard_offsets, first.shard_offsets, strict=True))
        if a != b
    }
    if len(cut) != 1:
        return None
    (dim,) = cut
    order = _along(dim, shards)
    n = max(s.shard_offsets[dim] + s.shard_sizes[dim] for s in shards)
    step = chunk_size(n, len(shards))
    for i, shard in enumerate(order):
        start = min(i * step, n)
        if shard.shard_offsets[dim] != start or shard.shard_sizes[dim] != min(start + step, n) - start:
            return None
        if any(s != f for d, (s, f) in enumerate(zip(shard.shard_sizes, first.shard_sizes)) if d != dim):
            return None
    return ChunkShardingSpec(dim, [s.placement for s in order])  # type: ignore[misc]
