"""Look-ups in a table. A table cut by rows answers for the rows it has and adds zeros for the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.layout import Layout
from shardwise.layout.split import is_contiguous
from shardwise.rules.registry import rule
from shardwise.rules.spec import Factors, Operand, PerCoords


@rule("embedding")
def embedding(first: Operand, second: Operand, padding_idx: Any = None, *args: Any, **kwargs: Any) -> Factors | None:
    """``i..., v d -> i... d``; aten gives the table first. With `sparse`, the gradient is dense all the same."""
    ids, table = (second, first) if first.dtype.is_floating_point else (first, second)
    max_norm = args[0] if args else kwargs.get("max_norm")
    if first is table:
        max_norm, by_freq = None, bool(args and args[0]) or kwargs.get("scale_grad_by_freq", False)
    else:
        by_freq = (len(args) > 2 and args[2]) or kwargs.get("scale_grad_by_freq", False)
    if max_norm is not None:
        return None  # rewrites the rows it looks up: by the fallback, which writes them back
    where: tuple[str | None, ...] = tuple(f"i{d}" for d in range(ids.ndim))
    rows = None if by_freq or not _in_order(table.layout) else "v"
    if by_freq:
        where = (None,) * ids.ndim
    if padding_idx == -1 and first is table:
        padding_idx = None
    elif padding_idx is not None and padding_idx < 0:
        padding_idx += table.shape[0]
    inputs = [(rows, "d"), where] if first is table else [where, (rows, "d")]
    size = table.shape[0]

    def local(inputs: list[Layout], outputs: list[Layout]) -> Any:
        layout = inputs[table.index]
        if not layout.is_cut(0):
            pad = -1 if padding_idx is None else padding_idx
            if first is table:
                return lambda table, ids: rows_of(table, ids, pad, by_freq)
            return lambda ids, table: rows_of(table, ids, pad, by_freq)

        def look_up(a: torch.Tensor, b: torch.Tensor, held: Any) -> torch.Tensor:
            return masked_lookup(*((b, a) if first is table else (a, b)), held, size, padding_idx)

        return PerCoords(look_up, lambda coords: layout.held(0, coords))

    return Factors(inputs, [(*where, "d")], linear="each", joint=frozenset({table.index}), local=local)


def rows_of(table: torch.Tensor, ids: torch.Tensor, padding_idx: int, by_freq: bool) -> torch.Tensor:
    """torch.embedding, also for a rank that holds no column: there CUDA's backward kernel reads out of bounds."""
    if not table.shape[1]:
        return table[:0].sum(0).expand(*ids.shape, 0)
    return torch.embedding(table, ids, padding_idx, by_freq, False)


def masked_lookup(
    ids: torch.Tensor, table: torch.Tensor, held: Any, size: int, padding_idx: int | None
) -> torch.Tensor:
    """The rows of `ids` that are mine, zeros for the others."""
    start, stop = held[0] if held else (0, 0)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
        found = f"the ids go from {int(ids.min())} to {int(ids.max())}"
        raise IndexError(f"embedding: index out of range: the table has {size} rows, {found}")
    outside = (ids < start) | (ids >= stop)
    if not held:
        table = F.pad(table, (0, 0, 0, 1))  # something to point at
    mine = (ids - start).masked_fill(outside, 0)
    pad = padding_idx - start if padding_idx is not None and start <= padding_idx < stop else -1
    return rows_of(table, mine, pad, False).masked_fill(outside.unsqueeze(-1), 0)


def _in_order(layout: Layout) -> bool:
    """Whether every rank's rows are one interval."""
    return all(is_contiguous(layout.held(0, layout.mesh.coords(rank))) for rank in layout.mesh.ranks)
