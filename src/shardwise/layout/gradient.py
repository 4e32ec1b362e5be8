"""The layout of a gradient follows from the layout of its value."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from shardwise.layout.layout import Layout
from shardwise.layout.on_mesh import cached_on_mesh
from shardwise.layout.placement import REPLICATE, Partial, Placement
from shardwise.layout.shapes import is_dense


def grad_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements of a gradient, from those of its value. Shard and Replicate stay. The parts of a sum all have the
    gradient of the sum (Replicate). The parts of another reduction each have a part of the gradient (Partial)."""
    of_parts = lambda p: REPLICATE if p.reduce_op == "sum" else Partial()
    return tuple(of_parts(p) if isinstance(p, Partial) else p for p in placements)


@functools.partial(cached_on_mesh, "grad layouts", 4096)
def grad_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor with this layout. Its strides are those of the tensor if that has no holes
    in memory, else those of a contiguous tensor: torch accumulates gradients in this way."""
    stride = layout.stride if is_dense(layout.shape, layout.stride) else None
    return layout.replace(placements=grad_placements(layout.placements), stride=stride)


@functools.partial(cached_on_mesh, "summed axes", 4096)
def summed_axes(layout: Layout) -> tuple[int, ...]:
    """The axes along which ranks hold the parts of a sum."""
    return tuple(axis for axis, p in enumerate(layout.placements) if p.is_partial("sum"))


@functools.partial(cached_on_mesh, "unsummed axes", 4096)
def unsummed_axes(layout: Layout) -> tuple[int, ...]:
    """The axes along which ranks hold the parts of a reduction that is not a sum."""
    return tuple(axis for axis, p in enumerate(layout.placements) if p.is_partial() and not p.is_partial("sum"))
