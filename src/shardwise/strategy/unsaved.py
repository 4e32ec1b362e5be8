"""Local calls with numbers of the plan, for which autograd keeps nothing. What torch's own functions save is freed by a
backward pass, so that the next one raises; where plain torch saves nothing for an op, it does not."""

from __future__ import annotations

import torch

from shardwise.protocols import Ctx
from shardwise.torch_private.autograd import is_transforming


def _is_recorded(*tensors: torch.Tensor) -> bool:
    """Whether a node is made that would save something. Transforms have own graphs, in which nothing is freed."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors) and not is_transforming()


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, x: torch.Tensor, dim: int, at: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.at, ctx.count = dim, at, x.shape[dim]
        return x.index_select(dim, at)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return rows_back(grad, ctx.dim, ctx.at, ctx.count), None, None


def rows(x: torch.Tensor, dim: int, at: torch.Tensor) -> torch.Tensor:
    """x.index_select(dim, at)."""
    return _Rows.apply(x, dim, at) if _is_recorded(x) else x.index_select(dim, at)


class _RowsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, x: torch.Tensor, dim: int, at: torch.Tensor, count: int) -> torch.Tensor:
        ctx.dim, ctx.at = dim, at
        return rows_back(x, dim, at, count)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return rows(grad, ctx.dim, ctx.at), None, None, None


def rows_back(x: torch.Tensor, dim: int, at: torch.Tensor, count: int) -> torch.Tensor:
    """`count` rows: each row of `x` is added to row `at` of zeros, from where `rows` took it."""
    if _is_recorded(x):
        return _RowsBack.apply(x, dim, at, count)
    return x.new_zeros([count if d == dim else n for d, n in enumerate(x.shape)]).index_add(dim, at, x)


def gathered(x: torch.Tensor, dim: int, at: torch.Tensor) -> torch.Tensor:
    """x.gather(dim, at). Its gradient asks `x` for its sizes alone, so that `x` may be written before that."""
    return torch.ops.aten._unsafe_view(x, x.shape).gather(dim, at)
