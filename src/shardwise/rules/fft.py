"""Fourier transforms: the transformed dims are whole, the others pass, and a transform of parts is a part of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwise.rules.linalg import or_empty
from shardwise.strategy.reading import factors
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Factors, Operand, operands_in


def transform(func: Any, x: Operand, dim: Any, *args: Any, **kwargs: Any) -> Factors:
    """torch.fft's functions go by these, and by padding or slicing to the size asked for."""
    local = or_empty(lambda v: func(v, dim, *args, **kwargs))
    return factors("*d!dim -> *d", [x], "joint", dim=dim, call=local)


for _name in ("_fft_c2c", "_fft_r2c", "_fft_c2r"):
    rule(_name)(partial(transform, getattr(torch, _name)))


@rule("stft")
def stft(
    x: Operand, n_fft: int, hop_length: Any = None, win_length: Any = None, window: Any = None, *args: Any, **more: Any
) -> Factors:
    """Linear in the signal and in the window; batches pass."""
    local = or_empty(lambda v, w=None: torch.stft(v, n_fft, hop_length, win_length, w, *args, **more))
    operands = list(operands_in((x, window)))
    return factors("*b t!, w!? -> *b f t", operands, "each", call=local)
