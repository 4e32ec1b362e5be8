"""cat and stack. Along a cut dim every rank joins what it holds of each operand: several pieces, nothing moves."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import dim_from_front
from shardwise.layout import Layout, Shard
from shardwise.layout.nesting import shards_from_table
from shardwise.layout.split import Intervals, normalize, shift
from shardwise.strategy import Algorithm, Answer, Factors, Operand, Tensor, factors, operands_in
from shardwise.strategy.program import constant, leaves_empty, padded
from shardwise.strategy.registry import program, rule
from shardwise.strategy.spec import Assignment, Spec


@dataclass
class Cat(Spec):
    """Axes that cut another dim than the joined one are planned like any factor. Axes that cut the joined dim of every
    operand stay, each operand with its own split."""

    dim: int
    others: Factors  # the joined dim whole

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        plain = self.others.assign(operands, outputs, pinned)
        axes = operands[0].layout.axes_of(self.dim)
        if plain is None or not axes or any(op.layout.axes_of(self.dim) != axes for op in operands):
            return plain
        ins = [
            tuple(now if axis in axes else p for axis, (p, now) in enumerate(zip(planned, op.layout.placements)))
            for planned, op in zip(plain.inputs, operands, strict=True)
        ]
        layouts = [op.layout.replace(placements=places) for op, places in zip(operands, ins, strict=True)]
        joined = dict(zip(axes, self._split(layouts, axes), strict=True))
        out = tuple(joined.get(axis, p) for axis, p in enumerate(plain.outputs[0]))
        return Assignment(ins, [out], plain.local)

    def _split(self, layouts: Sequence[Layout], axes: Sequence[int]) -> tuple[Shard, ...]:
        mesh = layouts[0].mesh
        *starts, total = itertools.accumulate((layout.shape[self.dim] for layout in layouts), initial=0)

        def table(c: tuple[int, ...]) -> Intervals:
            at = dict(zip(axes, c, strict=True))
            coords = [at.get(axis, 0) for axis in range(len(mesh.shape))]
            return normalize(p for x, start in zip(layouts, starts) for p in shift(x.held(self.dim, coords), start))

        return shards_from_table([mesh.shape[a] for a in axes], total, table, self.dim)


@rule("cat concat concatenate")
def cat(tensors: Any, dim: int = 0, axis: int | None = None) -> Answer:
    operands, dim = list(operands_in(tensors)), dim if axis is None else axis
    if len({op.ndim for op in operands}) != 1:
        # torch lets an empty 1-D tensor join anything: it counts for the result's dtype and requires_grad only
        kept = [i for i, op in enumerate(operands) if op.shape != (0,)]
        if len({operands[i].ndim for i in kept}) != 1:
            return None  # torch's own error
        dtype = functools.reduce(torch.promote_types, (op.dtype for op in operands))

        def join(tensors: Sequence[Tensor], *args: object, **kwargs: object) -> Tensor:
            joined = torch.cat([tensors[i] for i in kept], dim).to(dtype)
            return joined if joined.requires_grad else constant(joined, tensors)

        return Algorithm(join)
    d = dim_from_front(dim, operands[0].ndim)
    some_empty = operands[0].ndim == 1 and any(leaves_empty(op.layout) for op in operands)
    call, alike = _end_to_end if some_empty else None, _are_alike(operands)
    return Cat(d, factors("*d!dim, .. -> *d", operands, "joint", dim=d, call=call, any_partial=alike))


def _are_alike(operands: Sequence[Operand]) -> bool:
    """Whether parts of any reduction may stay: all are parts of the same one, and elements are only copied."""
    return len({(op.dtype, op.layout.placements) for op in operands}) == 1


def _end_to_end(*parts: torch.Tensor) -> torch.Tensor:
    """cat of 1-D tensors. Torch's own has no second derivatives for those without elements."""
    return torch.cat([part[None] for part in parts], 1)[0]


@rule("stack")
def stack(tensors: Sequence[Operand], dim: int = 0) -> Answer:
    operands = list(operands_in(tensors))
    if len({op.shape for op in operands}) != 1:
        return None  # torch's own error
    return factors("*d, .. -> *d+dim", operands, "joint", dim=dim, any_partial=_are_alike(operands))


@program("pad_sequence")
def in_rows(sequences: Tensor, batch_first: bool = False, padding_value: float = 0, padding_side: str = "right") -> Any:
    most, left = max(map(len, sequences)), padding_side == "left"
    sides = [(most - len(s), 0) if left else (0, most - len(s)) for s in sequences]
    rows = [padded(s, {0: side}, padding_value) for s, side in zip(sequences, sides)]
    return torch.stack(rows, 0 if batch_first else 1)


@rule("_chunk_cat")
def chunk_cat(tensors: Any, dim: int, num_chunks: int) -> Algorithm:
    """Every tensor padded along `dim` to `num_chunks` equal chunks; the n-th chunks of all, flat, are row n."""
    dim = dim_from_front(dim, next(operands_in(tensors)).ndim)

    def chunks(x: Tensor) -> Tensor:
        x = padded(x, {dim: (0, -x.shape[dim] % num_chunks)})
        return x.unflatten(dim, (num_chunks, -1)).flatten(dim + 1)

    return Algorithm(lambda tensors, *args, **kwargs: torch.cat([chunks(x) for x in tensors], dim + 1))
