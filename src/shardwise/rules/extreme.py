"""Extremes and statistics along dims."""

from __future__ import annotations

from typing import Any

from shardwise.rules.reduce import dims_of, whole_along
from shardwise.rules.registry import rule
from shardwise.rules.spec import Factors, Operand
from shardwise.rules.view import dim_of


@rule("amax amin argmax argmin var std")
def over_dims(x: Operand, dim: Any = None, *args: Any, keepdim: bool = False, **kwargs: Any) -> Factors | None:
    if isinstance(dim, bool) or len(args) > 1 or (args and not isinstance(args[0], bool)):
        return None
    return whole_along(x, dims_of(dim, x.ndim), bool(args[0]) if args else keepdim)


@rule("var_mean std_mean aminmax")
def over_dims_twice(x: Operand, dim: Any = None, *, keepdim: bool = False, **kwargs: Any) -> Factors | None:
    if isinstance(dim, bool):
        return None
    return whole_along(x, dims_of(dim, x.ndim), keepdim, outputs=2)


@rule("max min median nanmedian")
def extreme(x: Operand, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Of all elements one value; along a dim values and indices; of two tensors elementwise."""
    if dim is None:
        return whole_along(x, tuple(range(x.ndim)), False)
    if not isinstance(dim, int):
        return None
    return whole_along(x, (dim_of(dim, x.ndim),), keepdim, outputs=2)


@rule("mode")
def mode(x: Operand, dim: int = -1, keepdim: bool = False) -> Factors:
    return whole_along(x, (dim_of(dim, x.ndim),), keepdim, outputs=2)
