"""Results whose sizes depend on the data. Every rank computes its part, the ranks exchange their counts, and the result
is cut into the parts as they are. For that the parts must lie in the order of the ranks: where they do not, the operand
is first cut along its first dim, which is cheaper than gathering it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.context import relaxed
from shardwise.layout import Shard
from shardwise.layout.nesting import shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import sizes_to_pieces
from shardwise.strategy.program import Tensor, run_local, whole
from shardwise.wrapper import wrap


def in_order(x: Tensor, dims: Sequence[int], by: Tensor = None) -> tuple[Any, int]:
    """`x` with only the one of `dims` that is returned cut, an interval for each rank in the order of the ranks; cut as
    `by`, which covers these dims, where they are whole."""
    lead = next((d for d in dims if x.shape[d] != 1), dims[0]) if dims else 0
    places = wanted = x._layout.placements
    axes = [a for a, p in enumerate(places) if p.is_shard() and p.dim in dims]
    if not axes and by is not None:
        wanted = [p.at(p.dim + dims[0]) if p.is_shard() else p for p in by._layout.placements]
        axes = [a for a, p in enumerate(wanted) if p.is_shard()]
        axes = axes if all(places[a].is_replicate() for a in axes) else []
    kept = all(wanted[a].dim == lead and (wanted[a].pieces is None or wanted[a].sizes is not None) for a in axes)
    target = [p if a not in axes else wanted[a] if kept else Shard(lead) for a, p in enumerate(places)]
    return x.redistribute(placements=target), lead


def with_counted_size(out: Tensor, dim: int, axes: Sequence[int]) -> Tensor:
    """`out` with its true layout, once the ranks along `axes` have told each other their sizes of `dim`."""
    layout, mesh = out._layout, out._layout.mesh
    sizes = [mesh.shape[a] for a in axes]
    cells = list(itertools.product(*map(range, sizes)))
    one_each = layout.replicated(shape=(len(cells),), dtype=torch.int64).placed(dict.fromkeys(axes, Shard(0)))
    with relaxed(), torch.no_grad():  # under strict() too: such an op is nothing without this exchange
        counts = whole(run_local(lambda v: torch.tensor([v.shape[dim]], device=v.device), [out], one_each))
        alike = [mesh.comm.first(out._local).shape[dim]] * len(cells)  # without values, all are taken to find as many
        found = alike if mesh.comm.outlined else mesh.comm.agreed(counts._local, "sizes that ranks found").tolist()
    pieces = dict(zip(cells, sizes_to_pieces(found), strict=True))
    shards = shards_from_table(sizes, sum(found), lambda cell: pieces[cell], dim)
    new = dict(zip(axes, shards, strict=True))
    places = [new.get(a, p) for a, p in enumerate(layout.placements)]
    shape = (*layout.shape[:dim], sum(found), *layout.shape[dim + 1 :])
    return wrap(out._local, layout.replace(shape=shape, placements=places))


def chosen_along(func: Callable[..., Any], x: Tensor, by: Tensor, at: int) -> Tensor:
    """func(x, by) on each rank; the dims of `by` are those of `x` from `at` on, and become one dim there."""
    dims = range(at, at + by.dim())
    x, lead = in_order(x, dims, by)
    layout, axes = x._layout, x._layout.axes_of(lead)
    by = by.redistribute(placements=[p.at(lead - at) if p.is_shard(lead) else REPLICATE for p in layout.placements])
    moved = (p.at(p.dim - by.dim() + 1) if p.is_shard() and p.dim > lead else p for p in layout.placements)
    places = [Shard(at) if axis in axes else p for axis, p in enumerate(moved)]
    shape = (*x.shape[:at], 0, *x.shape[dims.stop :])
    return with_counted_size(run_local(func, [x, by], layout.replace(shape=shape, placements=places)), at, axes)
