"""The names of torch.distributed._shard._utils: the part of a tensor that a tile is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.sharded.metadata import ShardMetadata


def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view of the box at `offsets` of these sizes."""
    return tensor[tuple(slice(start, start + length) for start, length in zip(offsets, sizes))]


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """A view of a tile."""
    return narrow_tensor_by_index(tensor, metadata.shard_offsets, metadata.shard_sizes)
