"""Tensors of `into` that share memory: what is loaded into one of them would be overwritten by the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise.checkpoint.holders import Held
from shardwise.errors import CheckpointError


class _Piece(NamedTuple):
    """A tensor in this process, and the bytes from its first to its last element."""

    start: int
    stop: int
    name: str
    values: torch.Tensor


def check_overlaps(tensors: Mapping[str, Sequence[Held]]) -> None:
    """Raise where elements share memory, within a tensor or between two that are not one and the same."""
    known: set[object] = set()
    pieces: list[_Piece] = []
    for name, found in tensors.items():
        for _, values in found:
            key = values.data_ptr(), tuple(values.shape), values.stride(), values.dtype
            if key not in known and not values.is_meta:
                known.add(key)
                pieces.append(_piece(name, values))
    pieces.sort(key=lambda piece: piece.start)
    open_: list[_Piece] = []  # that reach beyond where the next one starts
    for piece in pieces:
        open_ = [other for other in open_ if other.stop > piece.start]
        for other in open_:
            if _share(other.values, piece.values):
                raise CheckpointError(
                    f"{other.name!r} and {piece.name!r} share a part of their memory in `into`, so that one would "
                    f"overwrite the other; load into tensors of their own, or into one of them with strict=False"
                )
        open_.append(piece)


def _piece(name: str, values: torch.Tensor) -> _Piece:
    reach = sum((n - 1) * step for n, step in zip(values.shape, values.stride(), strict=True))
    if _overlaps_itself(values):
        raise CheckpointError(
            f"{name!r}: elements of the tensor share memory in `into`; load into a tensor without such (x.clone())"
        )
    return _Piece(values.data_ptr(), values.data_ptr() + (reach + 1) * values.itemsize, name, values)


def _overlaps_itself(values: torch.Tensor) -> bool:
    """Whether two elements of a tensor are one. If each dim steps over all that is inside of it, none are; else the
    places are counted."""
    if values.is_contiguous():
        return False
    dims = sorted((step, n) for n, step in zip(values.shape, values.stride(), strict=True) if n > 1)
    reach = 0
    for step, n in dims:
        if step <= reach:
            return _places(values).unique().numel() < values.numel()
        reach += (n - 1) * step
    return False


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of the one is where one of the other is. Those of other sizes are taken to be, where both have
    bytes in the same range."""
    if one.itemsize != other.itemsize or (one.data_ptr() - other.data_ptr()) % one.itemsize:
        return True
    apart = (other.data_ptr() - one.data_ptr()) // one.itemsize
    return bool(torch.isin(_places(one), _places(other) + apart).any())


def _places(values: torch.Tensor) -> torch.Tensor:
    """Where the elements are, counted in elements from the first."""
    found = torch.zeros((), dtype=torch.int64)
    for n, step in zip(values.shape, values.stride(), strict=True):
        found = found.unsqueeze(-1) + torch.arange(n) * step
    return found.reshape(-1)
