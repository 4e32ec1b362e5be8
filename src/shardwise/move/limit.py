"""How much memory a move may use in addition to its source, and how many rounds an exchange needs to stay within
that."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable

from shardwise.errors import MoveError
from shardwise.layout import Layout
from shardwise.layout.local_sizes import largest_bytes
from shardwise.move.exchange import Exchange

_SMALL_ROUND = 1 << 18  # bytes of buffers below which another round costs more than it saves
_FEW = 8  # ranks of an exchange whose buffers are counted exactly
_MOST_ROUNDS = 8192


class _OfThread(threading.local):
    cap: int | None = None  # bytes that a move may hold beyond its source


of_thread = _OfThread()


class memory_cap:
    """In this context, a move uses at most `limit` bytes of memory per rank in addition to its source, its result
    included.

    Without a cap, a move uses at most 1.1 times the memory of its source and result together."""

    def __init__(self, limit: int) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0:
            raise MoveError(f"memory_cap: bytes must be an int > 0, got {limit!r}")
        self.limit = limit

    def __enter__(self) -> memory_cap:
        self.outer = current_cap()
        of_thread.cap = self.limit
        return self

    def __exit__(self, *exc: object) -> None:
        of_thread.cap = self.outer


def current_cap() -> int | None:
    return of_thread.cap


def budget(src: Layout, dst: Layout, memory: int | None) -> int | None:
    """Bytes a move may hold beyond its source; None where it is so small that it does not matter."""
    source, target = largest_bytes(src), largest_bytes(dst)
    if memory is not None:
        return memory
    return None if source + target < _SMALL_ROUND else int(min(1.1 * (source + target), 2 * max(source, target)))


def rounds_for(step: Exchange, room: int, capped: bool) -> int:
    """How many rounds the exchange needs so that its buffers fit into `room` bytes. All ranks must get the same number,
    so all look at the same ranks: the corners of the mesh along the step's axes."""
    bound = _most_buffers(step)
    if bound <= room:
        return 1
    finest = max(1, min(2 * bound if capped else bound // _SMALL_ROUND, _MOST_ROUNDS))
    if room <= 0:
        return finest
    if math.prod(step.src.mesh.shape[a] for a in step.axes) > _FEW:
        return min(math.ceil(bound / room), finest)
    spots, rounds = corners(step.src.mesh.shape, step.axes), 1
    while rounds < finest:
        need = max(step.with_(rounds=rounds).buffer_bytes(coords) for coords in spots)
        if need <= room:
            break
        rounds = min(max(rounds + 1, rounds * need // room), finest)
    return rounds


def _most_buffers(step: Exchange) -> int:
    """An upper bound of the buffers of any rank, whatever the ranks send each other."""
    shape, source, target = step.src.mesh.shape, largest_bytes(step.src), largest_bytes(step.dst)
    parts = math.prod(shape[a] for a in step.reduces)
    copies = math.prod(
        shape[a]
        for a in step.axes
        if step.dst.placements[a].is_replicate() and not step.src.placements[a].is_replicate()
    )
    return parts * target + (source if step.separate else copies * source)


def corners(shape: tuple[int, ...], axes: Iterable[int]) -> list[tuple[int, ...]]:
    """All combinations of the first and the last coordinate along some axes (only some of more than three axes), and
    one coordinate in the middle, whose own part lies between those it receives."""
    ends = [(0, k - 1) if k > 1 and a in axes else (0,) for a, k in enumerate(shape)]
    middle = tuple(k // 2 if a in axes else 0 for a, k in enumerate(shape))
    return list(dict.fromkeys([*itertools.islice(itertools.product(*ends), 8), middle]))
