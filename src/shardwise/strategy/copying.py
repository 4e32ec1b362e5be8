"""Ops that copy: every output index reads one input index, known beforehand. An output stays with the rank that holds
what it reads, so a cut dim becomes another split and nothing moves."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch
import torch.nn.functional as F

from shardwise.layout.split import Intervals
from shardwise.strategy.program import indices
from shardwise.strategy.reading import factors
from shardwise.strategy.relayout import Relayout, call_with
from shardwise.strategy.set_maps import Carried, unchanged
from shardwise.strategy.spec import MakeLocal, Operand, Spec
from shardwise.strategy.unsaved import rows
from shardwise.torch_private.tensors import without_fake_mode

Sources = dict[int, torch.Tensor]  # dim -> for every output index, the input index it reads


def copied(x: Operand, sources: Sources, keeps: str = "") -> Spec:
    """Output index i of a dim reads input index sources[dim][i]. Where no such dim is cut the op itself is called.
    `keeps` as in `Spec`."""
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
        for dim, mine in zip(sources, held, strict=True):
            v = rows(v, dim, picks(dim, mine)) if keeps == "" else v.index_select(dim, picks(dim, mine))
        return v

    held_at = lambda layout, _, at: tuple(layout.held(dim, at) for dim in sources)
    return dataclasses.replace(kept_with(x, sources, call_with(pick, held_at)), keeps=keeps)


def kept_with(x: Operand, sources: Sources, local: MakeLocal) -> Relayout:
    """Outputs stay with what they read. Of a dim without indices nothing is read: it is made everywhere."""

    def carry(dim: int) -> list[list[Carried]]:
        change = (lambda held: runs(torch.isin(sources[dim], indices(held)))) if dim in sources else unchanged
        return [[Carried(dim, change)]] if x.shape[dim] else []

    return Relayout(1, carry, local, may_alias=False)


def runs(chosen: torch.Tensor) -> Intervals:
    """Where a mask is true, as a set."""
    edges = F.pad(chosen, (1, 1)).int().diff().nonzero().flatten().tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))
