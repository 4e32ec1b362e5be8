"""How much memory a move may take beyond its source, and in how many rounds an exchange must go to stay inside."""

from __future__ import annotations

import math
import threading
from typing import Any

from shardwise.errors import MoveError
from shardwise.layout import Layout
from shardwise.layout.split import count
from shardwise.move.exchange import Exchange

_SMALL_ROUND = 1 << 18  # bytes of buffers below which another round costs more than it saves
_state = threading.local()


class memory_cap:
    """Inside, a move may hold at most `bytes` on a rank beyond its source, its result included.

    Without a cap a move holds at most what its source and result take together, and a tenth more."""

    def __init__(self, bytes: int) -> None:
        if not isinstance(bytes, int) or isinstance(bytes, bool) or bytes <= 0:
            raise MoveError(f"memory_cap: bytes must be an int > 0, got {bytes!r}")
        self.bytes = bytes

    def __enter__(self) -> memory_cap:
        self.outer = current_cap()
        _state.cap = self.bytes
        return self

    def __exit__(self, *exc: Any) -> None:
        _state.cap = self.outer


def current_cap() -> int | None:
    return getattr(_state, "cap", None)


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


def rounds_for(step: Exchange, memory: int | None) -> int:
    """In how many rounds the exchange goes. Every rank must say the same, so sizes are the largest of all."""
    if step.kind == "local":
        return 1
    source, target = largest_bytes(step.src), largest_bytes(step.dst)
    if memory is None and source + target < _SMALL_ROUND:
        return 1
    if step.stacks:
        return 1
    shape = step.src.mesh.shape
    parts = math.prod(shape[a] for a in step.reduces)
    copies = math.prod(
        shape[a]
        for a in step.axes
        if step.dst.placements[a].is_replicate() and not step.src.placements[a].is_replicate()
    )
    buffers = parts * target + (source if step.kind == "all_gather" else copies * source)
    room = (memory if memory is not None else int(min(1.1 * (source + target), 2 * max(source, target)))) - target
    if memory is not None and room <= 0:
        raise MoveError(
            f"{step} of shape {step.dst.shape} needs {target:,} bytes for its result alone on the fullest rank, more "
            f"than the memory cap of {memory:,}; allow at least {target + max(target // 8, 1):,}"
        )
    if buffers <= room or (step.slices and parts * target <= room):  # slices are sent from where they lie
        return 1
    finest = max(1, buffers // _SMALL_ROUND) if memory is None else 2 * buffers
    return max(1, min(math.ceil(2 * buffers / max(room, 1)), finest, 8192))  # two rounds are under way at a time
