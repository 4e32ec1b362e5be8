"""Reductions of parts that are at hand on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def reduce_parts(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The parts, reduced one after the other."""
    return functools.reduce(REDUCTIONS[op], parts[1:], parts[0].clone())
