"""Fourier transforms: the transformed dims are whole, the others pass, and a transform of parts is a part of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwise.rules.linalg import or_empty
from shardwise.rules.reduce import dims_of, whole_along
from shardwise.strategy.notation import operands_in
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Factors, Operand


def transform(func: Any, x: Operand, dim: Any, *args: Any, **kwargs: Any) -> Factors:
    """torch.fft's functions go by these, and by padding or slicing to the size asked for."""
    local, dims = or_empty(lambda v: func(v, dim, *args, **kwargs)), dims_of(dim, x.ndim) if dim else ()
    return whole_along(x, dims, True, linear="joint", local=lambda inputs, outputs: local)


for _name in ("_fft_c2c", "_fft_r2c", "_fft_c2r"):
    rule(_name)(partial(transform, getattr(torch, _name)))


@rule("stft")
def stft(
    x: Operand, n_fft: int, hop_length: Any = None, win_length: Any = None, window: Any = None, *args: Any, **more: Any
) -> Factors:
    """Linear in the signal and in the window; batches pass."""
    batch = ("b",) * (x.ndim - 1)
    names = [(*batch, None), *((None,) for _ in operands_in((window,)))]
    local = or_empty(lambda v, w=None: torch.stft(v, n_fft, hop_length, win_length, w, *args, **more))
    return Factors(names, [(*batch, None, None)], linear="each", local=lambda inputs, outputs: local)
