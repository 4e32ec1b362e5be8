"""Tensors as backends carry them: flat, of a dtype that every backend knows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

WIRE = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8, torch.float16, torch.bfloat16}


def width(dtype: torch.dtype) -> int:
    """How many wire elements one element takes (bytes for a dtype that no backend carries)."""
    return 1 if dtype in WIRE else dtype.itemsize


def as_wire(x: torch.Tensor) -> torch.Tensor:
    """A flat tensor of a dtype every backend carries; of a contiguous one, the same memory."""
    if x.dtype in WIRE and x.is_contiguous() and not x.is_neg():
        return x if x.dim() == 1 else x.view(-1)
    flat = x.resolve_conj().resolve_neg().contiguous().view(-1)
    if x.dtype in WIRE:
        return flat
    return as_bytes(flat)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous flat tensor: one element may come with any stride, but a view of bytes asks for 1."""
    return (flat.as_strided(flat.shape, (1,)) if flat.numel() <= 1 else flat).view(torch.uint8)


def from_wire(wire: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if not wire.numel():  # nothing, at an offset that a view of another dtype may refuse
        return wire.new_empty(shape, dtype=dtype)
    return (wire if wire.dtype == dtype else wire.contiguous().view(dtype)).view(shape)


def numel(shape: Sequence[int]) -> int:
    return math.prod(shape)
