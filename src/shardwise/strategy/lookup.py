"""Who holds what an index asks for, where a dim that is looked up or written to is cut. Every rank answers for the
indices it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.capturing import tape_here, tapes, unwritten
from shardwise.layout import Layout
from shardwise.layout.split import Intervals, count
from shardwise.move.pack import BITS
from shardwise.strategy.empty_ranks import imitating
from shardwise.strategy.program import padded
from shardwise.strategy.spec import Assignment, Factors, LocalCall, MakeLocal, Operand, PerCoords
from shardwise.torch_private.tensors import assert_async, is_abstract

Held = Sequence[Intervals | None]  # of each of several dims, the indices that a rank holds; None for all


def adds_up(x: Operand) -> bool:
    """Whether torch can add tensors of this dtype: then what the ranks find may be left as a pending sum."""
    return x.dtype not in BITS


def sum_of(x: Operand) -> str:
    """The reduction that gives a value which one rank holds and for which all others have zero."""
    return "bor" if x.dtype == torch.bool else "sum"


def is_any(outside: torch.Tensor) -> bool:
    """Whether any element is true. Where a program is captured, each run of it looks again, and raises if one is."""
    if not tapes or tape_here() is None:
        return bool(outside.any())
    with unwritten():
        found = bool(outside.any())
    if not found:
        assert_async(~outside.any())
    return found


def located(
    index: torch.Tensor,
    held: Intervals,
    size: int,
    error: type[Exception] = IndexError,
    from_end: bool = False,
    counted: torch.Tensor | None = None,
    says: str = "index {} is out of bounds for a dimension with size {}",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where indices of a dim of `size` stand in what a rank holds, and whether it holds them (if not, they stand at 0).

    Args:
        error, says: What is raised for an index out of bounds: of the index and the size.
        from_end: Whether negative indices count from the end.
        counted: Where the index counts; elsewhere it may be anything, and nobody holds it."""
    outside = (index < (-size if from_end else 0)) | (index >= size)
    outside = outside if counted is None else outside & counted
    if is_abstract(index):
        pass
    elif index.is_cuda:
        assert_async(~outside.any(), says.format("of some element", size))  # as torch does there: nobody waits for it
    elif is_any(outside):
        raise error(says.format(int(index[outside][0]), size))
    if from_end:
        index = torch.where(index < 0, index + size, index)
    if len(held) <= 1:
        start, stop = held[0] if held else (0, 0)
        mine, at = (index >= start) & (index < stop), index - start
    else:
        starts, stops = torch.tensor(held, dtype=index.dtype, device=index.device).T.contiguous()
        piece = (torch.searchsorted(starts, index.contiguous(), right=True) - 1).clamp(min=0)
        mine = (index >= starts[piece]) & (index < stops[piece])
        at = index - (stops - (stops - starts).cumsum(0))[piece]
    mine = mine if counted is None else mine & counted
    return at.masked_fill(~mine, 0), mine


def located_all(indices: Sequence[Any], held: Held, sizes: Sequence[int]) -> tuple[list[torch.Tensor], Any]:
    """The same for indices of several dims, broadcast."""
    places, mine = list(indices), None
    for n, intervals in enumerate(held):
        if intervals is not None:
            places[n], here = located(indices[n], intervals, sizes[n], from_end=True)
            mine = here if mine is None else mine & here
    return places, mine


def places_of_mine(mine: torch.Tensor, held: Held, sizes: Sequence[int]) -> torch.Tensor:
    """The places, in one line, of the looked-up indices that a rank holds. Without values, indices are taken to be
    spread evenly: it holds as many of them as it has of the dims."""
    if not is_abstract(mine):
        return mine.reshape(-1).nonzero().squeeze(1)
    parts = [count(part) / max(1, size) for part, size in zip(held, sizes, strict=True) if part is not None]
    return mine.new_empty(round(math.prod(parts) * mine.numel()), dtype=torch.int64)


def pointable(x: torch.Tensor, *dims: int) -> torch.Tensor:
    """`x`, with something to point at where a rank holds nothing of one of these dims."""
    for dim in dims:
        x = x if x.shape[dim] else padded(x, {dim: (0, 1)})
    return x


def by_holders(dims: Sequence[int], mine: Callable[..., Any], whole: Callable[..., Any], operand: int = 0) -> MakeLocal:
    """The local call of an op at indices of these dims of an operand: mine(*values, held) where one of them is cut,
    else whole(*values)."""

    def local(inputs: list[Layout], outputs: list[Layout]) -> LocalCall:
        layout, cut = inputs[operand], [inputs[operand].is_cut(d) for d in dims]
        held = lambda coords: tuple(layout.held(d, coords) if c else None for d, c in zip(dims, cut))
        return PerCoords(mine, held) if any(cut) else whole

    return local


@dataclass
class Written(Factors):
    """Factors of an op that writes at indices of `dims` of its first operand. Where those are cut, write(suffix,
    *operands, held) does it on a rank that holds `held` of them, with torch's suffix if in place."""

    dims: Sequence[int] = ()
    write: Callable[..., Any] = lambda *args: None

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        assignment = super().assign(operands, outputs, pinned)
        suffix = "_" if pinned else ""
        write = lambda *values: self.write(suffix, *values)
        write.__name__ = "write" + suffix  # as torch marks what writes into its first argument
        if assignment is not None:
            layout = operands[0].layout.replace(placements=assignment.inputs[0])
            cut = [layout.is_cut(d) for d in self.dims]
            if any(cut):
                mine = write if any(0 in op.shape for op in operands) else self._asking(write, operands, cut)
                assignment.local = by_holders(self.dims, mine, write)
        return assignment

    def _asking(
        self, write: Callable[..., Any], operands: Sequence[Operand], cut: Sequence[bool]
    ) -> Callable[..., Any]:
        """`write`, which on its first call also writes one element into another tensor of one. Where nothing is to be
        written, torch does not say that a kernel is missing, and the ranks that have something to write would raise
        alone."""
        one = tuple(((0, 1),) if c else None for c in cut)
        asking = imitating(write, [(1,) * op.ndim for op in operands], (one,), writes=True)
        asking.__name__ = write.__name__
        return asking
