"""Cumulative ops. Along a cut dim the pieces are scanned apart: their totals are exchanged, one row a piece, and every
piece goes on from the scan of the totals before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.layout import Partial
from shardwise.rules.reduce import along, whole_along, wide
from shardwise.rules.view import dim_of
from shardwise.strategy.program import needs_grad, reduced, run_local
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Operand

along("cummax cummin", outputs=2)

Scan = Callable[..., torch.Tensor]


def linked(scan: Scan, x: torch.Tensor, dim: int, neutral: float) -> torch.Tensor:
    """The scan of what a rank holds. Of no or one element torch's have no second derivatives; other ranks' have,
    and all must build the same graph."""
    if x.numel() == 0:
        return x * x
    if x.numel() == 1 and x.dim():
        return scan(torch.cat([torch.full_like(x, neutral), x], dim), dim).narrow(dim, 1, 1)
    return scan(x, dim)


def scan_rule(names: str, scan: Scan, neutral: float, total: Scan) -> None:
    """Ops (x, dim) that keep the shape; total(piece, dim) is one row."""

    @rule(names)
    def cumulative(x: Operand, dim: int, *, dtype: Any = None) -> Any:
        along = dim_of(dim, x.ndim)
        kept = dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
        branches = scan is torch.logcumsumexp and x.dtype.is_complex  # torch's logarithm depends on the way there
        few = scan is not torch.cumsum and any(math.prod(x.layout.local_shape(rank)) < 2 for rank in x.mesh.ranks)
        if x.ndim and not branches and not x.layout.is_plain and (few or x.layout.is_cut(along)):
            return Algorithm(lambda x, *args, **kwargs: by_pieces(x, along, kept))
        spec = whole_along(x, (along,), True)
        spec.linear = "joint" if scan is torch.cumsum and kept == x.dtype else "none"
        return spec

    def by_pieces(x: Any, dim: int, kept: Any) -> Any:
        x = reduced(x).to(wide(kept))
        if scan is torch.cumprod and needs_grad(x):  # behind a zero torch has no gradient, not even of NaNs
            zero = x == 0
            x = torch.where(zero.cumsum(dim) > zero, x.detach(), x)
        layout, mesh = x._layout, x._layout.mesh
        starts = sorted({start for rank in mesh.ranks for start, _ in layout.held(dim, mesh.coords(rank))})
        number = {start: i for i, start in enumerate(starts)}

        def pieces(v: torch.Tensor, held: Any) -> Any:
            """What a rank holds, each piece with its number; of nothing, one piece."""
            numbers = [number[start] for start, _ in held] or [0]
            return zip(numbers, v.split([stop - start for start, stop in held] or [0], dim), strict=True)

        def rows_of(v: torch.Tensor, rows: int, value: float) -> torch.Tensor:
            return v.new_full((*v.shape[:dim], rows, *v.shape[dim + 1 :]), value)

        def totals(v: torch.Tensor, held: Any) -> torch.Tensor:
            mine = torch.cat([total(part, dim) for _, part in pieces(v, held)], dim) if held else v
            where = torch.tensor([number[start] for start, _ in held], dtype=torch.long, device=v.device)
            return rows_of(v, len(starts), 0).index_copy(dim, where, mine)

        def scanned(v: torch.Tensor, rows: torch.Tensor, held: Any) -> torch.Tensor:
            before = torch.cat([rows_of(v, 1, neutral), linked(scan, rows, dim, neutral)], dim)
            parts = [torch.cat([before.narrow(dim, i, 1), part], dim) for i, part in pieces(v, held)]
            return torch.cat([linked(scan, p, dim, neutral).narrow(dim, 1, p.shape[dim] - 1) for p in parts], dim)

        def of(coords: Any) -> Any:
            return layout.held(dim, coords)

        shape = (*x.shape[:dim], len(starts), *x.shape[dim + 1 :])
        places = [Partial() if p.is_shard(dim) else p for p in layout.placements]
        rows = run_local(totals, [x], layout.replace(shape=shape, placements=places), of)
        return run_local(scanned, [x, reduced(rows)], layout.replace(shape=layout.shape), of).to(kept)


def log_total(x: torch.Tensor, dim: int) -> torch.Tensor:
    """logsumexp, with no gradient (torch's is NaN) for a piece of nothing but -inf: others may have more to add."""
    nothing = (x == -torch.inf).all(dim, keepdim=True)
    return x.masked_fill(nothing, 0).logsumexp(dim, keepdim=True).masked_fill(nothing, -torch.inf)


scan_rule("cumsum", torch.cumsum, 0, lambda x, dim: x.sum(dim, True))
scan_rule("cumprod", torch.cumprod, 1, lambda x, dim: linked(torch.cumprod, x, dim, 1).narrow(dim, -1, 1))
scan_rule("logcumsumexp _logcumsumexp", torch.logcumsumexp, -torch.inf, log_total)
