"""Where a rule could do better: layouts for which no communication was needed, and plans that move fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from shardwise.argument_types import MeshArgument
from shardwise.comm.reduction import reduce_parts
from shardwise.layout import Layout, Partial, Shard
from shardwise.mesh import as_mesh
from shardwise.testing.seeding import seed_torch
from shardwise.testing.spread import Combination, Parts, can_add
from shardwise.testing.trial import Outcome, Reference, different, move_bytes

Trial = tuple[Combination, Outcome]
_move_bytes = lru_cache(maxsize=100_000)(move_bytes)


def missed_chance(expected: Reference, mesh: MeshArgument, layouts: Combination, seed: int) -> str:
    """The layouts of operands and results, as text, if running the op on the ranks' own tensors gives right results;
    else an empty text. Layouts under which a rank holds nothing are skipped: any result would be right there."""
    inner, sample = as_mesh(mesh), expected.sample
    if not sample.takes_any_sizes:
        return ""
    held = []
    for i, (t, places) in enumerate(zip(sample.tensors, layouts, strict=True)):
        layout = Layout.make(inner, places, tuple(t.shape), t.dtype)
        held.append(Parts(t, layout, seed + i))
        if any(0 in layout.local_shape_at(inner.coords(rank)) for rank in inner.ranks):
            return ""
    ranks = []
    try:
        for rank in inner.ranks:
            seed_torch()
            with torch.no_grad():
                ranks.append(tree_flatten(sample.call([parts.at(inner.coords(rank)) for parts in held]))[0])
    except Exception:  # the op does not accept what a rank holds
        return ""
    if any(len(results) < len(expected.outputs) for results in ranks):
        return ""
    outs = [_layout_of([results[i] for results in ranks], want) for i, want in enumerate(expected.outputs)]
    return f"{pattern(layouts)} -> {' '.join(map(str, outs))}" if None not in outs else ""


def _layout_of(parts: Sequence[Any], want: object) -> str | None:
    """The one-axis layout in which the parts make up `want`."""
    if not isinstance(want, torch.Tensor) or not all(isinstance(p, torch.Tensor) for p in parts):
        return None
    if all(not different(p, want) for p in parts):
        return "R"
    for dim in range(want.dim()):
        shapes = {(*p.shape[:dim], *p.shape[dim + 1 :]) for p in parts if p.dim() == want.dim()}
        if shapes == {(*want.shape[:dim], *want.shape[dim + 1 :])} and not different(torch.cat(list(parts), dim), want):
            return f"S({dim})"
    adds = can_add(want.dtype) and all(p.shape == want.shape for p in parts)
    return "P(sum)" if adds and not different(reduce_parts(parts, "sum"), want) else None


def pattern(layouts: Combination) -> str:
    """Layouts as short text: one word per operand."""
    return " ".join("·".join(map(str, places)) for places in layouts)


def is_plain(layouts: Combination) -> bool:
    """Whether the layouts are common ones: even shards, sums and whole tensors."""
    flat = [p for places in layouts for p in places]
    return all((isinstance(p, Shard) and p.pieces is None) or p.is_replicate() or p == Partial() for p in flat)


def cheapest_known(
    expected: Reference, mesh: MeshArgument, here: Combination, cost: Outcome, tried: Sequence[Trial]
) -> tuple[int, Combination]:
    """The cheapest way that the trials show, to move the operands to a layout that was tried and run the op there: its
    bytes and that layout. Ways whose results leave larger sums pending do not count."""
    inner = as_mesh(mesh)

    def moves(there: Combination) -> int:
        total = 0
        for t, a, b in zip(expected.sample.tensors, here, there, strict=True):
            if a != b:
                src = Layout.make(inner, a, tuple(t.shape), t.dtype)
                total += _move_bytes(src, src.replace(placements=b))
        return total

    known = [(there, outcome.bytes) for there, outcome in tried if outcome.pending <= cost.pending]
    return min(((moves(there) + moved, there) for there, moved in known), key=lambda found: found[0])
