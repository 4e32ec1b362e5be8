"""Layouts: pure integers. Imports nothing above it."""

from shardwise.layout.layout import Layout
from shardwise.layout.placement import Partial, Placement, Replicate, Shard, StridedShard, as_placement, as_placements
from shardwise.layout.region import Region
from shardwise.layout.shapes import contiguous_stride
from shardwise.layout.tiles import Tile

__all__ = [
    "Layout",
    "Partial",
    "Placement",
    "Region",
    "Replicate",
    "Shard",
    "StridedShard",
    "Tile",
    "as_placement",
    "as_placements",
    "contiguous_stride",
]
