"""The names of torch.distributed._shard.sharded_tensor.utils."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.sharded.local_shards import global_metadata, local_metadata
from shardwise.sharded.metadata import ShardedTensorMetadata, as_size
from shardwise.sharded.owners import check_remote_device as _parse_and_validate_remote_device
from shardwise.sharded.shard import Shard

__all__ = [
    "_flatten_tensor_size",
    "_parse_and_validate_remote_device",
    "build_global_metadata",
    "build_metadata_from_local_shards",
]


def _flatten_tensor_size(size: Any) -> torch.Size:
    """A size given as ints or as one sequence of them."""
    return as_size(size)


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """One metadata out of every rank's."""
    if recalc_metadata:
        raise NotImplementedError("recalc_metadata: offsets are taken as given; give each shard its true offsets")
    return global_metadata(gathered_metadatas)


def build_metadata_from_local_shards(
    local_shards: list[Shard], global_size: torch.Size, current_rank: int, pg: Any
) -> ShardedTensorMetadata:
    """What this rank knows of its shards."""
    return local_metadata(local_shards, global_size, pg)
