"""How much the ranks of a layout hold. Every rank computes the same answers without asking the others."""

from __future__ import annotations

import math

from shardwise.layout.layout import Layout
from shardwise.layout.split import count


def largest_bytes(layout: Layout) -> int:
    """Bytes of the largest local tensor; the same number on all ranks."""
    n = layout.dtype.itemsize
    for dim, size in enumerate(layout.shape):
        axes = layout.axes_of(dim)
        if axes and any(layout.placements[a].pieces is not None for a in axes):  # type: ignore[attr-defined]
            spots = math.prod(layout.mesh.shape[a] for a in axes)
            n *= max(_held_at(layout, dim, axes, i) for i in range(spots))
        else:
            for axis in axes:
                size = -(-size // layout.mesh.shape[axis])
            n *= size
    return n


def _held_at(layout: Layout, dim: int, axes: tuple[int, ...], i: int) -> int:
    coords = [0] * len(layout.mesh.shape)
    for axis in reversed(axes):
        i, coords[axis] = divmod(i, layout.mesh.shape[axis])
    return count(layout.held(dim, coords))


def is_even(layout: Layout) -> bool:
    """Whether every rank holds a tensor of the same shape."""
    for dim, n in enumerate(layout.shape):
        for axis in layout.axes_of(dim):
            k = layout.mesh.shape[axis]
            if layout.placements[axis].pieces is not None or n % k:  # type: ignore[attr-defined]
                return False
            n //= k
    return True
