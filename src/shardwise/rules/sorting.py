"""Sorting, ranks within a dim, and finding places in sorted values: what is sorted is whole, the rest passes."""

from __future__ import annotations

from typing import Any

from shardwise.rules.reduce import dims_of, whole_along
from shardwise.strategy.lines import line
from shardwise.strategy.reading import factors
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Factors, Operand, operands_in

line("sort", "*d!dim -> *d, *d", takes="x dim=-1")
line("argsort", "*d!dim -> *d", takes="x dim=-1")
line("msort", "n! *d -> n *d")
line("kthvalue", "*d!dim -> *d-dim, *d-dim", takes="x k dim=-1 keepdim=False")
line("mode", "*d!dim -> *d-dim, *d-dim", takes="x dim=-1 keepdim=False")


@rule("median nanmedian")
def median(x: Operand, dim: int | None = None, keepdim: bool = False) -> Factors:
    """Of all elements one value; along a dim values and indices."""
    return whole_along(x, dims_of(dim, x.ndim), keepdim, outputs=1 if dim is None else 2)


@rule("bucketize isin")
def lookup(x: Operand | float, *args: Any, **kwargs: Any) -> Factors:
    """Elements (or one number) are looked up in the other tensors, which are whole."""
    operands = list(operands_in((x, *args, *kwargs.values())))
    return factors("*d, *s!, .. -> *d" if isinstance(x, Operand) else "*s!, .. -> ", operands)


@rule("searchsorted")
def searchsorted(sorted_sequence: Operand, input: Any, *, sorter: Operand | None = None, **kwargs: object) -> Factors:
    """A row of the input is looked up in the same row of the sorted ones, or all of it in the only one."""
    rows = "*r s!, *r i, *r s!? -> *r i" if sorted_sequence.ndim > 1 else "s!, *d, s!? -> *d"
    text = rows if isinstance(input, Operand) else "*s!, .. -> "
    return factors(text, list(operands_in((sorted_sequence, input, sorter))))
