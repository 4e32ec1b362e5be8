"""Padding, and other ops that copy: every output index reads one input index, known beforehand. An output stays with
the rank that holds what it reads, so a cut dim becomes another split and nothing moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from shardwise.comm.bridge import zeros_of
from shardwise.layout import Layout, Partial
from shardwise.layout.split import Intervals, count, intersect, normalize
from shardwise.protocols import Ctx
from shardwise.strategy import Algorithm, Answer, Operand, factors, reduced
from shardwise.strategy.memory import as_first_suggests, stored
from shardwise.strategy.program import indices
from shardwise.strategy.registry import rule
from shardwise.strategy.relayout import Carried, Relayout, call_with, unchanged
from shardwise.torch_private.autograd import is_recorded, is_transforming
from shardwise.torch_private.tensors import without_fake_mode

Sources = dict[int, torch.Tensor]  # dim -> for every output index, the input index it reads


def copied(x: Operand, sources: Sources, keeps: bool = False) -> Any:
    """Output index i of a dim reads input index sources[dim][i]. Where no such dim is cut the op itself is called.
    `keeps`: whether torch keeps the operand for the gradient."""
    if not any(map(x.layout.is_cut, sources)):
        return factors("*d!dim -> *d", [x], "joint", dim=tuple(sources), any_partial=True, never_empty=True)

    @cache
    @torch.inference_mode(False)  # for a later backward too
    def picks(dim: int, held: Intervals) -> torch.Tensor:
        """Where what my outputs read stands in what I hold."""
        with without_fake_mode():  # these are integers of the plan
            mine, read = indices(held), sources[dim]
            return torch.searchsorted(mine, read[torch.isin(read, mine)]).to(x.layout.device)

    def pick(v: torch.Tensor, held: tuple[Intervals, ...]) -> torch.Tensor:
        v = _Kept.apply(v) if keeps and is_recorded(v) and not is_transforming() else v
        for dim, mine in zip(sources, held, strict=True):
            v = v.index_select(dim, picks(dim, mine))
        return v

    held_at = lambda layout, _, at: tuple(layout.held(dim, at) for dim in sources)  # noqa: E731
    return dataclasses.replace(kept_with(x, sources, call_with(pick, held_at)), keeps_more=True)  # the indices


class _Kept(torch.autograd.Function):
    """A value as it is. It is kept for its gradient, which torch takes for a function of it: a derivative of that
    gradient is zeros, and a write to the value before the backward pass is refused."""

    @staticmethod
    def forward(ctx: Ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad + zeros_of([(grad.shape, grad.dtype)], [x])[0] if torch.is_grad_enabled() else grad


def kept_with(x: Operand, sources: Sources, local: Any) -> Relayout:
    """Outputs stay with what they read. Of a dim without indices nothing is read: it is made everywhere."""

    def carry(dim: int) -> list[list[Carried]]:
        change = (lambda held: runs(torch.isin(sources[dim], indices(held)))) if dim in sources else unchanged
        return [[Carried(dim, change)]] if x.shape[dim] else []

    return Relayout(1, carry, local, may_alias=False)


def runs(chosen: torch.Tensor) -> Intervals:
    """Where a mask is true, as a set."""
    edges = torch.nn.functional.pad(chosen, (1, 1)).int().diff().nonzero().flatten().tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


# -- padding -----------------------------------------------------------------------------------------------
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
        return copied(x, sources, keeps=mode != "circular") if known else None
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


@stored("pad", device="cpu")
def of_pad(result: object, x: torch.Tensor, pad: object, mode: str = "constant", value: object = None) -> None:
    if mode in ("reflect", "replicate"):
        as_first_suggests(result, x)


rule("_pad_circular")(lambda x, pad: pad_(x, pad, "circular"))
