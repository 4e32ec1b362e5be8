"""Sorting, ranks within a dim, and finding places in sorted values: what is sorted is whole, the rest passes."""

from __future__ import annotations

from typing import Any

from shardwise.rules.reduce import along, dims_of, whole_along
from shardwise.strategy.notation import operands_in
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Factors, Operand

along("sort", outputs=2)
along("argsort")
along("msort", default=0)


@rule("kthvalue")
def kthvalue(x: Operand, k: int, dim: int = -1, keepdim: bool = False) -> Factors:
    return whole_along(x, dims_of(dim, x.ndim), keepdim, outputs=2)


@rule("mode")
def mode(x: Operand, dim: int = -1, keepdim: bool = False) -> Factors:
    return whole_along(x, dims_of(dim, x.ndim), keepdim, outputs=2)


@rule("median nanmedian")
def median(x: Operand, dim: Any = None, keepdim: bool = False) -> Factors:
    """Of all elements one value; along a dim values and indices."""
    return whole_along(x, dims_of(dim, x.ndim), keepdim, outputs=1 if dim is None else 2)


# -- looked up one by one, in values that are whole --------------------------------------------------------
def lookup(x: Any, *args: Any, rows: int = 0) -> Factors:
    """Elements of `x` (or a number) are looked up in the other operands, rows (the first dims) in rows."""
    names = tuple(f"d{i}" for i in range(x.ndim)) if isinstance(x, Operand) else ()
    among = lambda op: (*names[:rows], *(None,) * (op.ndim - rows))  # noqa: E731
    return Factors([names if op is x else among(op) for op in operands_in(args)], [names])


@rule("bucketize")
def bucketize(x: Any, boundaries: Operand, **kwargs: Any) -> Factors:
    return lookup(x, x, boundaries)


@rule("isin")
def isin(elements: Any, test_elements: Any, **kwargs: Any) -> Factors:
    return lookup(elements, elements, test_elements)


@rule("searchsorted")
def searchsorted(sorted_sequence: Operand, input: Any, *, sorter: Any = None, **kwargs: Any) -> Factors:
    rows = sorted_sequence.ndim - 1 if isinstance(input, Operand) else 0
    return lookup(input, sorted_sequence, input, sorter, rows=rows)
