"""The names of torch.distributed._shard.sharded_tensor.utils."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.sharded.checks import raise_if_mismatch as _raise_if_mismatch
from shardwise.sharded.checks import wrong_out
from shardwise.sharded.local_shards import global_metadata, local_metadata
from shardwise.sharded.local_shards import one_after_the_other as recalc_global_sharded_tensor_metadata
from shardwise.sharded.metadata import ShardedTensorMetadata, TensorProperties, as_size
from shardwise.sharded.owners import check_remote_device as _parse_and_validate_remote_device
from shardwise.sharded.shard import Shard
from shardwise.sharded.tiling import check_cover as check_tensor
from shardwise.sharded.tiling import check_disjoint as validate_non_overlapping_shards_metadata

__all__ = [
    "TensorProperties",
    "_flatten_tensor_size",
    "_parse_and_validate_remote_device",
    "_raise_if_mismatch",
    "_validate_output_tensor_for_gather",
    "build_global_metadata",
    "build_metadata_from_local_shards",
    "check_tensor",
    "recalc_global_sharded_tensor_metadata",
    "validate_non_overlapping_shards_metadata",
]


def _flatten_tensor_size(size: Any) -> torch.Size:
    """A size given as ints or as one sequence of them."""
    return as_size(size)


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """One metadata out of every rank's. With `recalc_metadata` the shards count as rows one after the other, by rank:
    their offsets and the number of rows are worked out anew."""
    return global_metadata(gathered_metadatas, recalc=recalc_metadata)


def _validate_output_tensor_for_gather(
    my_rank: int, dst_rank: int, size: torch.Size, dst_tensor: torch.Tensor | None
) -> None:
    """Raise where `gather` cannot write to what a rank gives it."""
    wrong = wrong_out(my_rank, dst_rank, size, dst_tensor)
    if wrong is not None:
        raise ValueError(wrong)


def build_metadata_from_local_shards(
    local_shards: list[Shard], global_size: torch.Size, current_rank: int, pg: Any
) -> ShardedTensorMetadata:
    """What this rank knows of its shards."""
    return local_metadata(local_shards, global_size, pg)
