"""cat and stack. Along a cut dim every rank joins what it holds of each operand: several pieces, nothing moves."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.layout import shards_from_table
from shardwise.layout.split import Intervals, normalize, shift
from shardwise.rules.view import dim_of
from shardwise.strategy.notation import operands_in
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Assignment, Factors, Operand


@dataclass
class Cat:
    """Axes that cut another dim are planned like any factor; axes on which every operand is cut along the joined dim
    stay so, each operand with its own split."""

    dim: int
    others: Factors  # the joined dim whole

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        plain = self.others.assign(operands, outputs, pinned)
        if plain is None:
            return None
        joined = [
            axis
            for axis in range(len(operands[0].layout.placements))
            if all(op.layout.placements[axis].is_shard(self.dim) for op in operands)
        ]
        strays = any(
            op.layout.placements[a].is_shard(self.dim)
            for op in operands
            for a in range(len(plain.inputs[0]))
            if a not in joined
        )
        if not joined or strays:
            return plain
        ins = [self._mixed(plain.inputs[i], op.layout.placements, joined) for i, op in enumerate(operands)]
        layouts = [op.layout.replace(placements=places) for op, places in zip(operands, ins, strict=True)]
        out: list[Placement] = list(plain.outputs[0])
        total = sum(op.shape[self.dim] for op in operands)
        for axis, shard in zip(joined, self._split(layouts, joined, total), strict=True):
            out[axis] = shard
        return Assignment(ins, [tuple(out)], plain.local)

    def _mixed(
        self, planned: Sequence[Placement], present: Sequence[Placement], joined: Sequence[int]
    ) -> tuple[Placement, ...]:
        return tuple(present[a] if a in joined else p for a, p in enumerate(planned))

    def _split(self, layouts: Sequence[Layout], axes: Sequence[int], total: int) -> tuple[Shard, ...]:
        mesh = layouts[0].mesh
        starts = list(itertools.accumulate((layout.shape[self.dim] for layout in layouts), initial=0))

        def table(c: tuple[int, ...]) -> Intervals:
            coords = [0] * len(mesh.shape)
            for axis, i in zip(axes, c, strict=True):
                coords[axis] = i
            return normalize(
                piece
                for layout, start in zip(layouts, starts, strict=False)
                for piece in shift(layout.held(self.dim, coords), start)
            )

        return shards_from_table([mesh.shape[a] for a in axes], total, table, self.dim)


@rule("cat concat concatenate")
def cat(tensors: Any, dim: int = 0, axis: int | None = None) -> Any:
    operands = list(operands_in(tensors))
    if len({op.ndim for op in operands}) != 1:
        return _without_nothing(operands, dim if axis is None else axis)
    d = dim_of(dim if axis is None else axis, operands[0].ndim)
    names = tuple(None if i == d else f"d{i}" for i in range(operands[0].ndim))
    return Cat(d, Factors([names] * len(operands), [names], linear="joint"))


@rule("stack")
def stack(tensors: Any, dim: int = 0) -> Factors:
    operands = list(operands_in(tensors))
    names = tuple(f"d{i}" for i in range(operands[0].ndim))
    d = dim_of(dim, len(names) + 1)
    return Factors([names] * len(operands), [(*names[:d], None, *names[d:])], linear="joint")


def _without_nothing(operands: Sequence[Operand], dim: int) -> Algorithm | None:
    """torch lets an empty 1-D tensor join anything. It counts for the dtype of the result only."""
    kept = [i for i, op in enumerate(operands) if op.shape != (0,)]
    if len({operands[i].ndim for i in kept}) != 1:
        return None  # torch's own error
    dtype = functools.reduce(torch.promote_types, (op.dtype for op in operands))
    return Algorithm(lambda tensors, *args, **kwargs: torch.cat([tensors[i] for i in kept], dim).to(dtype))


@rule("_chunk_cat")
def chunk_cat(tensors: Any, dim: int, num_chunks: int) -> Algorithm:
    """Every tensor padded along `dim` to `num_chunks` equal chunks; the n-th chunks of all, flat, are row n."""
    dim = dim_of(dim, next(operands_in(tensors)).ndim)

    def chunks(x: Any) -> Any:
        x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, -x.shape[dim] % num_chunks))
        return x.unflatten(dim, (num_chunks, -1)).flatten(dim + 1)

    return Algorithm(lambda tensors, *args, **kwargs: torch.cat([chunks(x) for x in tensors], dim + 1))
