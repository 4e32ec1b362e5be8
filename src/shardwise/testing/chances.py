"""What a rule leaves on the table: layouts that would have been right without communication, and plans that would have
been cheaper than the one it took."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from shardwise.comm.reduction import reduce_parts
from shardwise.layout import Layout, Partial, Shard
from shardwise.mesh import as_mesh
from shardwise.move import plan_move
from shardwise.testing.spread import Combination, Parts, can_add
from shardwise.testing.trial import Outcome, Reference, different


def missed_chance(expected: Reference, mesh: Any, layouts: Combination, seed: int) -> str:
    """If the op on each rank's own tensors gives the right results in some layout: those layouts; else nothing.

    Only layouts in which every rank holds something are asked: of nothing, anything is right."""
    inner = as_mesh(mesh)
    sample = expected.sample
    if not sample.apart:
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
            torch.manual_seed(0)
            with torch.no_grad():
                ranks.append(tree_flatten(sample.call([parts.at(inner.coords(rank)) for parts in held]))[0])
    except Exception:  # the op does not take what a rank holds: no chance
        return ""
    outs = []
    for i, want in enumerate(expected.outputs):
        found = _layout_of([results[i] for results in ranks], want) if all(len(r) > i for r in ranks) else None
        if found is None:
            return ""
        outs.append(found)
    return f"{pattern(layouts)} -> {' '.join(outs)}"


def _layout_of(parts: Sequence[Any], want: Any) -> str | None:
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
    """Layouts as short text: one word an operand."""
    return " ".join("·".join(map(str, places)) for places in layouts)


def is_plain(layouts: Combination) -> bool:
    """Whether the layouts are what people write: chunks, sums and whole tensors."""
    flat = [p for places in layouts for p in places]
    return all((isinstance(p, Shard) and p.pieces is None) or p.is_replicate() or p == Partial() for p in flat)


@lru_cache(maxsize=100_000)
def _move_bytes(src: Layout, dst: Layout) -> int:
    plan = plan_move(src, dst)
    return sum(plan.bytes_in(rank) for rank in src.mesh.ranks)


def cheapest_known(
    expected: Reference, mesh: Any, here: Combination, cost: Outcome, tried: Sequence[tuple[Combination, Outcome]]
) -> tuple[int, Combination]:
    """The fewest bytes of any plan the trials know that leaves no more pending: move the operands to a layout that was
    tried, run the op there."""
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
