"""Layouts: which rank holds which indices. Pure integers; imports nothing of the layers above."""

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
