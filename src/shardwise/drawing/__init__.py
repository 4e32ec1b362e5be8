"""Pictures of who holds what, of numbers and words alone: as HTML that needs nothing else, and for terminals."""

from shardwise.drawing.html import figure, page_table
from shardwise.drawing.mesh import mesh_picture
from shardwise.drawing.picture import Box, Panel, Picture
from shardwise.drawing.terminal import markup, plain
from shardwise.drawing.words import rank_names, size_name

__all__ = [
    "Box", "Panel", "Picture", "figure", "markup", "mesh_picture", "page_table", "plain", "rank_names", "size_name",
]  # fmt: skip
