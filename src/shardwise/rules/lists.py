"""foreach and fused ops: lists of tensors, each position its own elementwise call, one local call for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.layout import Placement
from shardwise.layout.placement import REPLICATE
from shardwise.rules.pointwise import broadcast
from shardwise.rules.registry import rule
from shardwise.rules.spec import Algorithm, Assignment, Operand

_JOINT = {"_foreach_add", "_foreach_sub", "_foreach_neg", "_foreach_copy", "_foreach_zero", "_foreach_lerp"}
_EACH = {"_foreach_mul"}


@dataclass
class Columns:
    """`columns[j]` are the operands at position j of the lists; `shared` are tensors that meet every position."""

    in_place_without_meta = True  # fused steps have no meta kernels, and need none

    columns: Sequence[Sequence[Operand]]
    shared: Sequence[Operand]
    linear: str

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        ins: dict[int, tuple[Placement, ...]] = {}
        outs = []
        for column in self.columns:
            members = [Operand(op.layout, i) for i, op in enumerate((*column, *self.shared))]
            spec = broadcast(members, linear=self.linear if not self.shared else "none")
            found = spec.assign(members, [], pinned)
            if found is None:
                return None
            for op, places in zip(column, found.inputs, strict=False):
                ins[op.index] = places
            outs.append(found.outputs[0])
        for op in self.shared:
            ins[op.index] = (REPLICATE,) * len(op.layout.placements)
        return Assignment([ins[i] for i in range(len(operands))], outs)


def _columns(args: Sequence[Any]) -> tuple[list[list[Operand]], list[Operand]]:
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and all(isinstance(x, Operand) for x in a)]
    return [list(column) for column in zip(*lists, strict=True)], [a for a in args if isinstance(a, Operand)]


def _foreach(name: str) -> None:
    linear = "joint" if name in _JOINT else "each" if name in _EACH else "none"

    def elementwise(*args: Any, **kwargs: Any) -> Columns:
        columns, shared = _columns((*args, *kwargs.values()))
        scalars_only = len(columns[0]) == 1 and linear == "joint" and name in ("_foreach_add", "_foreach_sub")
        return Columns(columns, shared, "none" if scalars_only else linear)

    rule(name, any_float=True)(elementwise)


for _name in [
    "abs",
    "acos",
    "add",
    "addcdiv",
    "addcmul",
    "asin",
    "atan",
    "ceil",
    "clamp_max",
    "clamp_min",
    "copy",
    "cos",
    "cosh",
    "div",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lerp",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "maximum",
    "minimum",
    "mul",
    "neg",
    "pow",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "sub",
    "tan",
    "tanh",
    "trunc",
    "zero",
]:
    _foreach("_foreach_" + _name)


@rule("_foreach_norm")
def foreach_norm(tensors: Sequence[Operand], ord: Any = 2, dtype: Any = None) -> Algorithm:
    def each(tensors: Any, ord: Any = 2, dtype: Any = None) -> list[Any]:
        return [torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors]

    return Algorithm(each)


@rule("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_", any_float=True)
def fused_optimizer(*args: Any, **kwargs: Any) -> Columns | None:
    """Steps on local tensors where parameter, gradient and state are laid out alike."""
    columns, shared = _columns(args)
    for column in columns:
        placed = {op.layout.placements for op in column if op.ndim or column[0].ndim == 0}
        if len(placed) != 1 or any(p.is_partial() for p in column[0].layout.placements):
            return None
    return Columns(columns, shared, "none")
