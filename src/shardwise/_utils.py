"""What a rank holds of a tensor, under the name that programs written for torch's DTensor import it by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.layout import Layout, as_placements
from shardwise.mesh import as_mesh

__all__ = ["compute_local_shape_and_global_offset"]


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: Any, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of what this rank (the first one, of a simulated mesh) holds, and where in the tensor it starts; an
    empty part starts at the end."""
    home = as_mesh(mesh, outside=True)
    if home.comm.outside:
        return (0,), ()
    layout = Layout.make(home, as_placements(placements), tuple(global_shape), torch.get_default_dtype())
    coords = next(iter(home.comm.played()))
    shape = layout.local_shape_at(coords)
    held = [layout.held(dim, coords) for dim in range(layout.ndim)]
    if any(len(pieces) > 1 for pieces in held):
        raise LayoutError(
            f"placements = {list(layout.placements)}: the rank at {coords} holds several pieces of a dim, which "
            f"have no one offset; ask the layout for its tiles"
        )
    starts = [pieces[0][0] if pieces else n for pieces, n in zip(held, layout.shape, strict=True)]
    return shape, tuple(starts)
