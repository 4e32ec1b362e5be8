"""Normalisation over trailing dims: those are whole, what stands before them passes."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.layout import contiguous_stride
from shardwise.layout.placement import REPLICATE
from shardwise.rules.notation import operands_in
from shardwise.rules.registry import rule
from shardwise.rules.spec import Algorithm, Factors, Operand, Result


@rule("layer_norm rms_norm")
def layer_norm(x: Operand, normalized_shape: Any, *args: Any, **kwargs: Any) -> Factors:
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    names = tuple(f"d{i}" if i < x.ndim - count else None for i in range(x.ndim))
    scale_and_shift = list(operands_in((*args, *kwargs.values())))
    inputs = [names, *((None,) * op.ndim for op in scale_and_shift)]
    same = all(op.dtype == x.dtype for op in scale_and_shift)
    return Factors(inputs, [names], result=Result(x.shape, x.dtype, contiguous_stride(x.shape)) if same else None)


def with_statistics(name: str) -> None:
    """Batch norm kernels write the running statistics, though their schemas do not say so: what was gathered is written
    back."""
    func = getattr(torch, name)

    @rule(name)
    def batch_norm(x: Operand, weight: Any, bias: Any, mean: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
        statistics = list(operands_in((mean, var)))
        if all(p.is_replicate() for op in statistics for p in op.layout.placements):
            return None
        return Algorithm(run)

    def run(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
        whole = [t.redistribute(placements=[REPLICATE] * len(t.placements)) for t in (mean, var)]
        result = func(x, weight, bias, *whole, *args, **kwargs)
        for statistic, value in zip((mean, var), whole, strict=True):
            if value is not statistic:
                statistic.copy_(value)
        return result


for _name in ["native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"]:
    with_statistics(_name)


@rule("normalize")
def normalize(x: Operand, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, **kwargs: Any) -> Factors | None:
    if not isinstance(dim, int) or kwargs:
        return None
    names = tuple(None if i == dim % x.ndim else f"d{i}" for i in range(x.ndim))
    return Factors([names], [names])
