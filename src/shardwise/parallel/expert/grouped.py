"""What experts do with their rows: each multiplies its own by its own matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.layout import Partial, Placement, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.parallel.expert.dispatch import Routed
from shardwise.parallel.expert.routes import Routes
from shardwise.strategy.program import run_local
from shardwise.tensor import DTensor


def grouped_linear(
    routed: Routed, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Each expert's rows times its own matrix; differentiable.

    Args:
        routed: what `dispatch` gave.
        rows: (kept, in), laid out as `routed.rows`.
        weight: (experts, out, in). Beside the experts, it may be cut along `out` or, where the columns of `rows` are
            cut alike, along `in`.
        bias: (experts, out).

    Returns:
        (kept, out).

    Raises:
        LayoutError: the shapes or layouts do not fit.
    """
    if weight.dim() != 3 or rows.shape[-1] != weight.shape[2] or weight.shape[0] != len(routed.sizes):
        raise LayoutError(
            f"grouped_linear: weight must be ({len(routed.sizes)} experts, out, in = {rows.shape[-1]}), "
            f"got {tuple(weight.shape)}"
        )
    if not isinstance(rows, DTensor):
        out = _multiplied(rows, weight, routed.sizes)
        return out if bias is None else out + _repeated(bias, routed.sizes)
    if not isinstance(weight, DTensor):
        raise LayoutError(f"grouped_linear: weight must be a DTensor on {rows._layout.mesh!r}, as rows are")
    routes, layout = routed._routes, rows._layout
    rows, placements = _fitting(rows, weight, routes)
    shape = (layout.shape[0], weight.shape[1])
    out = run_local(
        _multiplied, [rows, weight], layout.replace(shape=shape, placements=placements), routes.rows_per_expert
    )
    if bias is None:
        return out
    places = [p if isinstance(p, Shard) else REPLICATE for p in placements]
    laid: Any = bias
    laid = laid.redistribute(placements=[_bias_place(w, p) for w, p in zip(weight.placements, places, strict=True)])
    return out + run_local(_repeated, [laid], layout.replace(shape=shape, placements=places), routes.rows_per_expert)


def _bias_place(weight: Placement, rows: Placement) -> Placement:
    if weight.is_shard(0):
        return weight
    return rows if rows.is_shard(1) else REPLICATE


def _fitting(rows: DTensor, weight: DTensor, routes: Routes) -> tuple[DTensor, list[Placement]]:
    """The rows as the weight needs them, and how the product is laid out."""
    if weight._layout.axes_of(0) != routes.expert_axes:
        raise LayoutError(
            f"grouped_linear: weight is laid out {list(weight.placements)}, but the rows were dispatched to experts "
            f"cut on axes {list(routes.expert_axes)}; give dispatch this weight"
        )
    places, results = list(rows.placements), list(rows.placements)
    for axis, w in enumerate(weight.placements):
        if axis in routes.expert_axes:
            continue
        if not w.is_replicate() and places[axis].is_shard(0):
            raise LayoutError(
                f"grouped_linear: weight is {w} on axis {axis}, which cuts the tokens; replicate it there"
            )
        if w.is_partial():
            raise LayoutError(f"grouped_linear: weight is {w} on axis {axis}; redistribute it first")
        if w.is_shard(1):
            places[axis], results[axis] = REPLICATE, w
        elif w.is_shard(2):
            places[axis], results[axis] = w.at(1), Partial("sum")  # type: ignore[attr-defined]
        elif not places[axis].is_shard(0):
            places[axis] = results[axis] = REPLICATE
    return rows.redistribute(placements=places), results


def _multiplied(rows: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    if not len(sizes):
        return rows.new_zeros(len(rows), weight.shape[1]) + 0 * (rows.sum() + weight.sum())  # the same graph everywhere
    return torch.cat([part @ w.T for part, w in zip(rows.split(list(sizes)), weight.unbind(0), strict=True)])


def _repeated(bias: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return bias.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device=bias.device), 0)
