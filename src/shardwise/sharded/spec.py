"""Sharding specs: which tiles a tensor is cut into, and who owns them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.errors import check_type
from shardwise.sharded.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    as_remote_device,
    state_of,
)
from shardwise.sharded.tiles import check_cover, check_disjoint
from shardwise.torch_private.distributed import remote_device

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor


class PlacementSpec(ABC):  # noqa: B024
    """Where something lives. Subclass it for placements of your own."""


def _remote(placement: remote_device | torch.device | str) -> remote_device:
    if isinstance(placement, remote_device):
        return placement
    if not isinstance(placement, (str, torch.device)):
        raise TypeError(f"Invalid type for remote_device: {type(placement)}; write a string such as 'rank:0/cpu'")
    return as_remote_device(str(placement))


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """One device of one rank.

    Args:
        device: The device, such as "rank:1/cuda:0".
    """

    device: remote_device

    def __post_init__(self) -> None:
        self.device = _remote(self.device)

    def __setstate__(self, state: object) -> None:
        self.device = _remote(state_of(self, state)["device"])


class ShardingSpec(ABC):
    """How tensors are cut into tiles, and who owns them. A spec of your own implements `build_metadata`."""

    _scatter: Callable[..., ShardedTensor]  # set by factories.py: tensors need specs

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return the tiles of a tensor with their owners.

        Args:
            tensor_sizes: The global size of the tensor.
            tensor_properties: Its dtype and other properties.

        Raises:
            ValueError: A tensor of this size cannot be cut so.
        """

    def shard(
        self, tensor: torch.Tensor, src_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> ShardedTensor:
        """Cut the tensor of one rank into tiles that are sent to their owners. Every rank of the group calls it.

        Args:
            tensor: The values on `src_rank`; the other ranks pass a tensor of the same size and dtype.
            src_rank: The rank of the group whose values are taken.
            process_group: The default is the default process group.

        Returns:
            The sharded tensor.

        Raises:
            MeshError: The group has no rank `src_rank`.
            ValueError: This rank is not in the group.
        """
        return ShardingSpec._scatter(tensor, self, src_rank, process_group)


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """Cuts along one dim like `torch.chunk`: one chunk for each placement, in order.

    Args:
        dim: The dim that is cut.
        placements: The owners of the chunks, such as "rank:1/cuda:0".

    Raises:
        NotImplementedError: If `dim` is a name.
        ValueError: If `dim` is not an int.
        TypeError: If `placements` is not a list of placements.
    """

    ShardingDim = int | str  # torch's name for the type of `dim`

    dim: int | str
    placements: list[remote_device | str]

    def __post_init__(self) -> None:
        self._verify_dim(self.dim)
        if isinstance(self.placements, str) or not isinstance(self.placements, Iterable):
            raise TypeError(f"placements: expected a list, got {self.placements!r}; write [{self.placements!r}]")
        self.placements = [_remote(p) for p in self.placements]

    def __setstate__(self, state: object) -> None:
        values = state_of(self, state)
        self.dim, self.placements = values["dim"], values["placements"]
        self.__post_init__()

    @staticmethod
    def _verify_dim(dim: object) -> None:
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
            start, end = i * step, min((i + 1) * step, n)  # an empty chunk may start behind the end, as in torch
            offsets, lengths = zeros.copy(), sizes.copy()
            offsets[dim], lengths[dim] = start, max(end - start, 0)
            shards.append(ShardMetadata(offsets, lengths, placement))
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """Any tiles with any owners, listed one by one.

    Args:
        shards: The tiles.

    Raises:
        ValueError: If there are none, or two of them overlap.
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        check_type(self.shards, (list, tuple), "shards")
        if not self.shards:
            raise ValueError(f"Empty shard list provided: {self.shards}")
        for i, shard in enumerate(self.shards):
            check_type(shard, ShardMetadata, f"shards[{i}]")
        check_disjoint(self.shards)

    def __setstate__(self, state: object) -> None:
        self.shards = state_of(self, state)["shards"]
        self.__post_init__()

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        check_cover(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)


def chunk_size(dim_size: int, chunks: int) -> int:
    """Return how many indices each chunk has, as in torch.chunk; the last chunks may have fewer."""
    return (dim_size + chunks - 1) // chunks


def spec_of(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """Return a spec that makes these tiles: chunks of one dim where they are that, else the list of them."""
    if not shards_metadata:
        raise ValueError(f"Empty shard list provided: {list(shards_metadata)}")
    found = _as_chunks(shards_metadata)
    return found if found is not None else EnumerableShardingSpec(list(shards_metadata))


def in_order_of(spec: ShardingSpec, shards_metadata: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    """Return tiles in the order in which their spec lists them: chunks one after the other."""
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
    n = max((s.shard_offsets[dim] + s.shard_sizes[dim] for s in shards if s.shard_sizes[dim]), default=0)
    step = chunk_size(n, len(shards))
    for i, shard in enumerate(order):
        start, end = i * step, min((i + 1) * step, n)
        if shard.shard_offsets[dim] not in (start, min(start, n)) or shard.shard_sizes[dim] != max(end - start, 0):
            return None
        if any(s != f for d, (s, f) in enumerate(zip(shard.shard_sizes, first.shard_sizes)) if d != dim):
            return None
    return ChunkShardingSpec(dim, [s.placement for s in order])  # type: ignore[misc]
