"""Normalisation over trailing dims: those are whole, what stands before them passes."""

from __future__ import annotations

from typing import Any

from shardwise.layout import contiguous_stride
from shardwise.rules.notation import operands_in
from shardwise.rules.registry import rule
from shardwise.rules.spec import Factors, Operand, Result


@rule("layer_norm rms_norm")
def layer_norm(x: Operand, normalized_shape: Any, *args: Any, **kwargs: Any) -> Factors:
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    names = tuple(f"d{i}" if i < x.ndim - count else None for i in range(x.ndim))
    scale_and_shift = list(operands_in((*args, *kwargs.values())))
    inputs = [names, *((None,) * op.ndim for op in scale_and_shift)]
    same = all(op.dtype == x.dtype for op in scale_and_shift)
    return Factors(inputs, [names], result=Result(x.shape, x.dtype, contiguous_stride(x.shape)) if same else None)


@rule("normalize")
def normalize(x: Operand, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, **kwargs: Any) -> Factors | None:
    if not isinstance(dim, int) or kwargs:
        return None
    names = tuple(None if i == dim % x.ndim else f"d{i}" for i in range(x.ndim))
    return Factors([names], [names])
