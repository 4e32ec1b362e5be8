"""Cumulative ops. Along a cut dim every piece is scanned by itself: the totals are exchanged, one row per piece, and
every piece continues from the scan of the totals before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.errors import dim_from_front
from shardwise.layout.nesting import parent_sets
from shardwise.layout.split import count
from shardwise.strategy import Algorithm, Answer, Operand, Tensor, line, needs_grad, reduced, run_local
from shardwise.strategy.program import sum_dtype, without_dims
from shardwise.strategy.registry import rule
from shardwise.strategy.two_stages import whole_along

Pieces = tuple[tuple[int, ...], tuple[int, ...]]  # their numbers and their sizes

# torch's gradient of an empty tensor is that tensor itself
line("cummax cummin", "*d!dim -> *d, *d", takes="x dim", never_empty=True)


def linked(scan: Callable[..., Any], x: torch.Tensor, dim: int, neutral: float) -> torch.Tensor:
    """The scan of what a rank holds. torch's scans of less than two elements have no second derivatives, but all ranks
    must build the same graph. That of a sum keeps nothing, so that a gradient may go through it more than once."""
    if x.numel() == 0:
        return x + x if scan is torch.cumsum else x * x
    if x.numel() == 1 and x.dim():
        return scan(torch.cat([torch.full_like(x, neutral), x], dim), dim).narrow(dim, 1, 1)
    return scan(x, dim)


def scan_rule(names: str, scan: Callable[..., Any], neutral: float, total: Callable[..., Any]) -> None:
    """Ops (x, dim) that keep the shape; total(piece, dim) is one row."""

    @rule(names)
    def cumulative(x: Operand, dim: int, *, dtype: torch.dtype | None = None) -> Answer:
        along = dim_from_front(dim, x.ndim)
        kept = dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
        if scan is torch.cumprod and x.ndim and (x.shape[along] == 1 or math.prod(x.shape) <= 1):
            return Algorithm(lambda x, *args, **named: reduced(x).to(kept, copy=True))  # torch hands the gradient on
        branches = scan is torch.logcumsumexp and x.dtype.is_complex  # torch's logarithm depends on the way there
        sets = (parent_sets(x.mesh, x.layout.placements, d, n) for d, n in enumerate(x.shape))
        few = scan is not torch.cumsum and math.prod(min(map(count, held)) for held in sets) < 2
        refused = branches or kept == torch.bool  # torch has no kernel for bools, and says so
        if x.ndim and not refused and not x.layout.is_plain and (few or x.layout.is_cut(along)):
            return Algorithm(lambda x, *args, **kwargs: by_pieces(x, along, kept))
        linear = "joint" if scan is torch.cumsum and kept == x.dtype else "none"
        if branches:  # of nothing torch's scan has no second derivatives
            return whole_along(x, (along,), True, never_empty=True)
        return whole_along(x, (along,), True, linear=linear)

    def by_pieces(x: Tensor, dim: int, kept: torch.dtype) -> Tensor:
        whole_numbers = not (kept.is_floating_point or kept.is_complex)  # torch's sums of these are int64
        x = reduced(x).to(kept).to(torch.int64 if whole_numbers else sum_dtype(kept))
        if scan is torch.cumprod and needs_grad(x):  # behind a zero torch has no gradient, not even of NaNs
            zero, odd = x == 0, ~x.detach().isfinite().all(dim, keepdim=True)
            x = torch.where((zero.cumsum(dim) > zero) & odd, x.detach(), x)
        layout = x._layout
        sets = parent_sets(layout.mesh, layout.placements, dim, x.shape[dim])
        starts = sorted(start for held in sets for start, _ in held)
        number = {start: i for i, start in enumerate(starts)}

        def pieces_at(coords: tuple[int, ...]) -> Pieces:
            """The numbers and the sizes of the pieces that a rank holds."""
            held = layout.held(dim, coords)
            return tuple(number[start] for start, _ in held), tuple(stop - start for start, stop in held)

        def totals(v: torch.Tensor, held: Pieces) -> torch.Tensor:
            numbers, sizes = held
            mine = dict(zip(numbers, v.split(sizes, dim))) if sizes else {}
            nothing = v.new_zeros((*v.shape[:dim], 1, *v.shape[dim + 1 :]))
            rows = [total(mine[i], dim) if i in mine else nothing for i in range(len(starts))]
            return torch.cat(rows if mine else [v, *rows], dim)  # which keeps nothing for its gradient

        def scanned(v: torch.Tensor, rows: torch.Tensor, held: Pieces) -> torch.Tensor:
            numbers, sizes = held if held[0] else ((0,), (0,))  # of nothing, one piece
            first = v.new_full((*v.shape[:dim], 1, *v.shape[dim + 1 :]), neutral)
            before = torch.cat([first, linked(scan, rows, dim, neutral)], dim)
            pieces = zip(numbers, v.split(sizes, dim), strict=True)
            parts = [torch.cat([before.narrow(dim, i, 1), piece], dim) for i, piece in pieces]
            return torch.cat([linked(scan, p, dim, neutral).narrow(dim, 1, p.shape[dim] - 1) for p in parts], dim)

        shape = (*x.shape[:dim], len(starts), *x.shape[dim + 1 :])
        rows = run_local(totals, [x], without_dims(layout, (dim,), True).replace(shape=shape), pieces_at)
        return run_local(scanned, [x, reduced(rows)], layout.replace(shape=layout.shape), pieces_at).to(kept)


def log_total(x: torch.Tensor, dim: int) -> torch.Tensor:
    """logsumexp, with no gradient (torch's is NaN) for a piece of nothing but -inf: others may have more to add."""
    nothing = (x == -torch.inf).all(dim, keepdim=True)
    return x.masked_fill(nothing, 0).logsumexp(dim, keepdim=True).masked_fill(nothing, -torch.inf)


scan_rule("cumsum", torch.cumsum, 0, lambda x, dim: x.sum(dim, True))
scan_rule("cumprod", torch.cumprod, 1, lambda x, dim: linked(torch.cumprod, x, dim, 1).narrow(dim, -1, 1))
scan_rule("logcumsumexp _logcumsumexp", torch.logcumsumexp, -torch.inf, log_total)
