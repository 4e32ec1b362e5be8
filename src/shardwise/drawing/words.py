"""Few words for many ranks, and for many bytes."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_RANKS = 6


def rank_names(ranks: Sequence[int], count: int | None = None) -> str:
    """Ranks in words, however many.

    Args:
        ranks: The ranks, or the first of them.
        count: How many they are, if more than those in `ranks`.

    >>> rank_names([3]), rank_names([0, 1, 2, 3]), rank_names(range(0, 64, 2))
    ('rank 3', 'ranks 0, 1, 2, 3', 'ranks 0, 2, 4 ... 62 (32 of them)')
    """
    if len(ranks) == 1 and count in (None, 1):
        return f"rank {ranks[0]}"
    if count is not None and count > len(ranks):
        return f"ranks {', '.join(map(str, ranks[:3]))} ... ({count:,} of them)"
    if len(ranks) <= _MOST_RANKS:
        return f"ranks {', '.join(map(str, ranks))}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:3]))} ... {ranks[-1]} ({len(ranks):,} of them)"


def size_name(count: float) -> str:
    """Bytes in words.

    >>> size_name(0), size_name(2048), size_name(3.5 * 2**30)
    ('0 B', '2.0 KiB', '3.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""
