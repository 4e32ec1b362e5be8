"""Padding: an output stays with the rank that holds what it reads, so a cut dim becomes another split and nothing
moves (`strategy/copying.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.layout import Layout, Partial
from shardwise.layout.split import count, intersect, normalize
from shardwise.strategy import Algorithm, Answer, Operand, call_with, reduced
from shardwise.strategy.copying import copied, kept_with
from shardwise.strategy.memory import as_first_suggests, stored
from shardwise.strategy.registry import rule


def sources_of(mode: str, n: int, left: int, right: int) -> torch.Tensor:
    """What padding reads; a constant one stands by the first and the last index."""
    at = torch.arange(max(n + left + right, 0)) - left
    if mode == "reflect":
        return (n - 1) - ((n - 1) - at.abs()).abs()
    if mode == "circular":  # what negative padding takes away is not there to come round
        first, size = max(-left, 0), n + min(left, 0) + min(right, 0)
        return first + (at - first) % max(size, 1)
    return at.clamp(0, max(n - 1, 0))


@rule("pad")
def pad_(x: Operand, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Answer:
    sides = {x.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}  # from the last dim on
    sources = {dim: sources_of(mode, x.shape[dim], *side) for dim, side in sides.items()}
    if mode != "constant":
        known = mode in ("reflect", "replicate", "circular") and not value
        return copied(x, sources, "" if mode == "circular" else "operand") if known else None
    if any(isinstance(p, Partial) and (value or p.reduce_op not in ("sum", "avg")) for p in x.layout.placements):
        return Algorithm(lambda x, *args, **kwargs: torch.constant_pad_nd(reduced(x), pad, value or 0))

    def padding_at(layout: Layout, outputs: list[Layout], coords: tuple[int, ...]) -> tuple[int, ...]:
        """My part of the padding, less what negative padding takes from me."""
        found: list[int] = []
        for dim, (left, right) in sides.items():
            n, m = x.shape[dim], outputs[0].shape[dim]
            had, has = layout.held(dim, coords), outputs[0].held(dim, coords)
            for before, after in [((0, -left), (0, left)), ((n + right, n), (m - right, m))]:
                found.append(count(intersect(has, normalize([after]))) - count(intersect(had, normalize([before]))))
        return tuple(found)

    return kept_with(x, sources, call_with(lambda v, mine: torch.constant_pad_nd(v, mine, value or 0), padding_at))


rule("constant_pad_nd")(lambda x, pad, value=0: pad_(x, pad, "constant", value))
rule("reflection_pad1d reflection_pad2d reflection_pad3d")(lambda x, padding: pad_(x, padding, "reflect"))
rule("replication_pad1d replication_pad2d replication_pad3d")(lambda x, padding: pad_(x, padding, "replicate"))
stored("reflection_pad2d reflection_pad3d replication_pad2d replication_pad3d", device="cpu")(as_first_suggests)
_repeats_pixels = lambda x, pad, mode="constant", value=None: mode in ("reflect", "replicate")
stored("pad", "cpu", when=_repeats_pixels)(as_first_suggests)
rule("_pad_circular")(lambda x, pad: pad_(x, pad, "circular"))
