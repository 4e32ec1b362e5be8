"""Layouts: pure integers. Imports nothing above it."""

from shardwise.layout.layout import Layout, Tile, contiguous_stride
from shardwise.layout.placement import Partial, Placement, Replicate, Shard, as_placement, as_placements

__all__ = [
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Tile",
    "as_placement",
    "as_placements",
    "contiguous_stride",
]
