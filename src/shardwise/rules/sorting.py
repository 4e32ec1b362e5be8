"""Sorting, ranks within a dim, and finding places in sorted values: what is sorted is whole, the rest passes."""

from __future__ import annotations

from functools import partial
from typing import Any

from shardwise.rules.reduce import along, dims_of, whole_along
from shardwise.strategy.notation import operands_in
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Factors, Operand

rule("sort")(partial(along, 2))
rule("argsort")(partial(along, 1))
rule("msort")(partial(along, 1, dim=0))
rule("kthvalue")(lambda x, k, dim=-1, keepdim=False: whole_along(x, dims_of(dim, x.ndim), keepdim, outputs=2))
rule("mode")(lambda x, dim=-1, keepdim=False: whole_along(x, dims_of(dim, x.ndim), keepdim, outputs=2))


@rule("median nanmedian")
def median(x: Operand, dim: Any = None, keepdim: bool = False) -> Factors:
    """Of all elements one value; along a dim values and indices."""
    return whole_along(x, dims_of(dim, x.ndim), keepdim, outputs=1 if dim is None else 2)


@rule("bucketize isin")
def lookup(x: Any, *args: Any, rows: int = 0, **kwargs: Any) -> Factors:
    """Elements of `x` (or a number) are looked up in the others, which are whole; rows (the first dims) in rows."""
    names = tuple(f"d{i}" for i in range(x.ndim)) if isinstance(x, Operand) else ()
    operands = sorted(operands_in((x, *args, *kwargs.values())), key=lambda op: op.index)
    inputs = [names if op is x else (*names[:rows], *(None,) * (op.ndim - rows)) for op in operands]
    return Factors(inputs, [names])


@rule("searchsorted")
def searchsorted(sorted_sequence: Operand, input: Any, *, sorter: Any = None, **kwargs: Any) -> Factors:
    return lookup(input, sorted_sequence, sorter, rows=sorted_sequence.ndim - 1 if isinstance(input, Operand) else 0)
