"""A mixture-of-experts layer, and its parts: the router, and what experts do with their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import LayoutError, check_type
from shardwise.layout import Partial, Placement, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.parallel.expert.dispatch import Routed, Routes, combine, dispatch
from shardwise.strategy.program import run_local
from shardwise.tensor import DTensor


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of two-layer experts, of which each token goes through some.

    It is written for one device, and laid out over a mesh by giving `up`, `down` and their biases a Shard(0). The
    forward gives the output and `balance_loss`.

    Args:
        width: of the tokens.
        hidden: the width inside of an expert.
        experts: how many there are.
        k: how many of them each token goes through.
        capacity_factor: an expert takes at most this many times its even share of rows; None takes all.
    """

    def __init__(self, width: int, hidden: int, experts: int, k: int, capacity_factor: float | None = None) -> None:
        super().__init__()
        for name, value in (("width", width), ("hidden", hidden), ("experts", experts), ("k", k)):
            check_type(value, int, f"MixtureOfExperts: {name}")
        check_type(capacity_factor, (int, float, type(None)), "MixtureOfExperts: capacity_factor")
        self.k, self.capacity_factor = k, capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.up, self.down = (nn.Parameter(torch.empty(experts, *s)) for s in ((hidden, width), (width, hidden)))
        self.up_bias, self.down_bias = (nn.Parameter(torch.zeros(experts, n)) for n in (hidden, width))
        for weight in (self.up, self.down):
            nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[2]), 1 / math.sqrt(weight.shape[2]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the experts make of the tokens, and the loss that balances them.

        Args:
            x: (..., width), a token per row.
        """
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        weights, chosen = top_k(logits, self.k)
        capacity = None
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * tokens.shape[0] * self.k / self.up.shape[0])
        routed = dispatch(tokens, chosen, self.up, capacity=capacity)
        y = F.gelu(grouped_linear(routed, routed.rows, self.up, self.up_bias))
        y = combine(routed, grouped_linear(routed, y, self.down, self.down_bias), weights)
        return y.unflatten(0, x.shape[:-1]), balance_loss(logits, chosen)


# -- the router --------------------------------------------------------------------------------------------
def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest experts of each token.

    Args:
        logits: (tokens, experts).
        k: how many.

    Returns:
        Their weights, which add up to one, and their numbers; both (tokens, k).

    Raises:
        LayoutError: k is not an int from 1 to the number of experts.
    """
    check_type(logits, torch.Tensor, "top_k: logits")
    experts = logits.shape[-1]
    if not isinstance(k, int) or isinstance(k, bool) or not 0 < k <= experts:
        raise LayoutError(f"top_k: k must be an int from 1 to the number of experts {experts}, got {k!r}")
    values, chosen = logits.softmax(-1).topk(k, -1)
    return values / values.sum(-1, keepdim=True), chosen


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return a loss that is 1 where all experts get equally many tokens, and grows as the router prefers some of them.

    Args:
        logits: (tokens, experts).
        chosen: (tokens, k), the numbers of the experts.

    Raises:
        LayoutError: `chosen` is not of torch.int64.
    """
    check_type(logits, torch.Tensor, "balance_loss: logits")
    check_type(chosen, torch.Tensor, "balance_loss: chosen")
    if chosen.dtype != torch.int64:
        raise LayoutError(f"balance_loss: chosen must be int64, the numbers of experts, got {chosen.dtype}")
    experts = logits.shape[-1]
    share = F.one_hot(chosen, experts).to(logits.dtype).mean((0, 1))
    return experts * (share * logits.softmax(-1).mean(0)).sum()


# -- the experts -------------------------------------------------------------------------------------------
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
    check_type(routed, Routed, "grouped_linear: routed", "give what dispatch(...) gave")
    check_type(rows, torch.Tensor, "grouped_linear: rows")
    check_type(weight, torch.Tensor, "grouped_linear: weight")
    check_type(bias, (torch.Tensor, type(None)), "grouped_linear: bias")
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
    target = layout.replace(shape=shape, placements=placements)
    out = run_local(_multiplied, [rows, weight], target, routes.rows_per_expert)
    if bias is None:
        return out
    places = [p if isinstance(p, Shard) else REPLICATE for p in placements]
    pairs = zip(weight.placements, places, strict=True)
    wanted = [w if w.is_shard(0) else p if p.is_shard(1) else REPLICATE for w, p in pairs]
    laid = bias.redistribute(placements=wanted)  # type: ignore[attr-defined]
    return out + run_local(_repeated, [laid], target.replace(placements=places), routes.rows_per_expert)


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
    times = torch.tensor(sizes, dtype=torch.int64, device=bias.device)
    return bias.repeat_interleave(times, 0, output_size=sum(sizes))
