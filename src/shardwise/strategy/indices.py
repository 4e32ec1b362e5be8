"""What an index says: an entry per dim, each a number, a slice, a new dim, a mask or a tensor of numbers."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from shardwise.strategy.spec import Operand


def is_mask(index: Any) -> bool:
    return isinstance(index, (torch.Tensor, Operand)) and index.dtype in (torch.bool, torch.uint8)


def one_number(index: object) -> bool:
    """Whether an index is a tensor that selects, as a number does."""
    return isinstance(index, torch.Tensor) and not (index.ndim or is_mask(index) or index.is_floating_point())


def as_index(entry: object) -> Any:
    """A sequence or an array as the tensor it stands for: a mask, or integers that torch makes of all other numbers."""
    if isinstance(entry, (list, tuple, range)):
        entry = numpy.array(entry, dtype=None if len(entry) else int)
    if not isinstance(entry, numpy.ndarray):
        return entry
    found = torch.as_tensor(entry)
    return found if is_mask(found) else found.long()


def spelled_out(index: Any, ndim: int) -> list[Any]:
    """The index as a list, an entry per dim (besides None). As in torch, a short list not all numbers is a tuple."""
    short = isinstance(index, list) and len(index) < 32 and not all(isinstance(e, (int, float)) for e in index)
    entries = [as_index(e) for e in (index if short or isinstance(index, tuple) else (index,))]
    used = sum(e.ndim if is_mask(e) else 1 for e in entries if e is not None and e is not ... and type(e) is not bool)
    where = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    return [*entries[:where], *[slice(None)] * (ndim - used), *entries[where + 1 :]]
