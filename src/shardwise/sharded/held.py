"""What a rank holds of a sharded tensor: its tiles, their values, and what plain tensors are asked for as well."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.errors import DimError
from shardwise.layout.tileset import TileSet
from shardwise.sharded.base import ShardedTensorBase, device_of, new_tile
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata
from shardwise.sharded.owners import communication_device, ranks_of
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ShardingSpec
from shardwise.sharded.tiling import tiles_of


class HeldTiles(ShardedTensorBase):
    """Tiles on the ranks of a process group, seen from one of them."""

    _process_group: Any
    _tiles_kept: TileSet | None = None
    _empty: torch.Tensor | None = None
    _made: Callable[..., Any]  # from parts that are known to fit

    def sharding_spec(self) -> ShardingSpec:
        """The spec the tiles come from."""
        return self._sharding_spec

    def local_tensor(self) -> torch.Tensor:
        """The one tensor this rank holds."""
        if len(self._local_shards) != 1:
            raise NotImplementedError(
                f"Only single local shard is supported. Number of shards: {len(self._local_shards)}"
            )
        return self._local_shards[0].tensor

    @property
    def _tiles(self) -> TileSet:
        if self._tiles_kept is None:
            self._tiles_kept = tiles_of(self._metadata.shards_metadata, self._process_group)
        return self._tiles_kept

    @property
    def _parts(self) -> list[torch.Tensor]:
        """The plain tensors whose graphs stand for this tensor's: of the local shards, or the empty stand-in."""
        return [shard.tensor for shard in self._local_shards] or [self._anchor]

    @property
    def _anchor(self) -> torch.Tensor:
        if self._empty is None:
            properties = self._metadata.tensor_properties
            home = device_of(self._metadata)
            if home.type == "cuda" and not torch.cuda.is_available():
                home = torch.device("cpu")  # tiles of others: nothing is computed here
            elif home.type == "cuda":
                home = torch.device("cuda", torch.cuda.current_device())
            self._empty = self._as_empty(new_tile([0], home, properties).detach())
            self._empty.requires_grad_(properties.requires_grad)
        return self._empty

    def _as_empty(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor without elements in the form of a tile."""
        return part.view([0] * max(1, self.dim()))

    def _with_parts(self, parts: Sequence[torch.Tensor]) -> Any:
        """The same tiles with other values, of another dtype perhaps."""
        properties = copying.copy(self._metadata.tensor_properties)
        properties.dtype, properties.requires_grad = parts[0].dtype, parts[0].requires_grad
        metadata = ShardedTensorMetadata(self._metadata.shards_metadata, self._metadata.size, properties)
        shards = [Shard.fitting(part, shard.metadata) for part, shard in zip(parts, self._local_shards)]
        empty = None if shards else parts[0]
        return self._made(
            shards, metadata, self._sharding_spec, self._process_group, tiles=self._tiles_kept, empty=empty
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._parts[0].device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return self.device.type == "meta"

    def is_pinned(self, device: Any = None) -> bool:  # type: ignore[override]
        """Whether the tiles are in pinned memory."""
        return self._metadata.tensor_properties.pin_memory

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._metadata.size

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._metadata.tensor_properties.dtype

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return self._metadata.tensor_properties.layout

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._metadata.size)

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """The global size, or that of one dim."""
        size = self._metadata.size
        if dim is None:
            return size
        if not -len(size) <= dim < len(size):
            raise DimError(
                f"Argument ``dim`` must be within the range of tensor dimensions [{-len(size)}, {len(size)})"
            )
        return size[dim]

    def dim(self) -> int:
        return len(self._metadata.size)

    def numel(self) -> int:
        return self._metadata.size.numel()

    def __len__(self) -> int:
        if not self._metadata.size:
            raise TypeError("len() of a 0-d tensor")
        return self._metadata.size[0]

    def _get_preferred_device(self) -> torch.device:
        """Where tensors must lie for collectives of this tensor's group."""
        return communication_device(self._process_group)


def same_tiles(one: HeldTiles, other: HeldTiles) -> bool:
    """Whether two tensors have the same tiles on the same ranks, in the same order, and share a process group."""
    if one._metadata.shards_metadata is other._metadata.shards_metadata:
        return True
    if ranks_of(one._process_group) != ranks_of(other._process_group):
        return False
    a, b = one._tiles, other._tiles
    return (
        len(a.ranks) == len(b.ranks)
        and bool((a.ranks == b.ranks).all())
        and a.tiles.starts.shape == b.tiles.starts.shape
        and bool((a.tiles.starts == b.tiles.starts).all() and (a.tiles.ends == b.tiles.ends).all())
    )


def home_of(shard: ShardMetadata) -> torch.device:
    return shard.placement.device()  # type: ignore[union-attr]


def at_home(part: torch.Tensor, shard: ShardMetadata) -> torch.Tensor:
    home = home_of(shard)
    return part if part.device == home else part.to(home)
