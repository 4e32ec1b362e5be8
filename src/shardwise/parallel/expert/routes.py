"""Which rows go from which ranks to which: all ranks work it out alike from the number of tokens of each expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
import torch

from shardwise.comm.base import Coords
from shardwise.comm.record import Note
from shardwise.errors import LayoutError
from shardwise.layout import Layout, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, normalize
from shardwise.move import move
from shardwise.sizes import coords_on, cut_as_held
from shardwise.strategy.program import run_local
from shardwise.tensor import DTensor

_BAD = -(1 << 62)  # what a rank adds to the number of an expert that does not exist, in place of its counts


class Run(NamedTuple):
    """Tokens in a row that one rank holds."""

    start: int  # the first token
    holder: tuple[int, ...]  # the rank's coordinates on the axes that cut the tokens


class Routes:
    """Which rank holds which rows, by token before they travel and by expert afterwards.

    Of run r, counts[r, e] tokens chose expert e, which takes kept[r, e] of them: all, or the first ones up to its
    `capacity`. Sorted by expert and then by token, first[r, e] is the first of those rows."""

    def __init__(self, runs: Sequence[Run], counts: numpy.ndarray, capacity: int | None) -> None:
        self.runs, self.counts = list(runs), counts
        before = counts.cumsum(0) - counts
        self.kept = counts if capacity is None else numpy.clip(capacity - before, 0, counts)
        per_expert = self.kept.sum(0)
        self.sizes = tuple(int(n) for n in per_expert)  # how many rows each expert takes, over all ranks
        self.total = sum(self.sizes)
        self.first = (per_expert.cumsum() - per_expert)[None, :] + self.kept.cumsum(0) - self.kept
        self.token_axes: tuple[int, ...] = ()
        self.expert_axes: tuple[int, ...] = ()
        self.experts_at: Callable[[Coords], Sequence[int]] = lambda coords: range(counts.shape[1])

    @staticmethod
    def on_one_device(chosen: torch.Tensor, experts: int, capacity: int | None) -> Routes:
        counts = _checked(_counted(chosen, experts, ((0, len(chosen)),), 1))
        return Routes([Run(0, ())], counts, capacity)

    @staticmethod
    def between_ranks(chosen: DTensor, holders: Layout | None, experts: int, capacity: int | None) -> Routes:
        """The routes of tokens that are cut as `chosen` is, to experts cut as the first dim of `holders`.

        The ranks exchange how often they chose each expert, so that all know what each of them holds."""
        runs, counts = _exchanged_counts(chosen, experts)
        routes = Routes(runs, counts, capacity)
        routes.token_axes = chosen._layout.axes_of(0)
        if holders is not None:
            routes.expert_axes = holders.axes_of(0)
            routes.experts_at = lambda coords: [e for a, b in holders.held(0, coords) for e in range(a, b)]
        return routes

    # -- layouts --------------------------------------------------------------------------------------------
    def layout_by_token(self, tokens: Layout) -> Layout:
        """The layout in which each rank holds the rows of its own tokens; columns as those of `tokens`."""
        every = range(len(self.sizes))
        return self._layout(tokens, self.token_axes, lambda coords: self._rows(self._own_runs(coords), every))

    def layout_by_expert(self, tokens: Layout) -> Layout:
        """The layout in which each rank holds the rows of its experts, of all tokens along the axes that cut these."""
        axes = tuple(sorted({*self.token_axes, *self.expert_axes}))
        return self._layout(tokens, axes, lambda coords: self._rows(self._runs_for(coords), self.experts_at(coords)))

    def _layout(self, tokens: Layout, axes: tuple[int, ...], held: Callable[[Coords], Intervals]) -> Layout:
        places = cut_as_held(tokens, axes, 0, self.total, held)
        return tokens.replace(shape=(self.total, tokens.shape[1]), placements=places)

    def _own_runs(self, coords: Coords) -> list[int]:
        mine = tuple(coords[a] for a in self.token_axes)
        return [r for r, run in enumerate(self.runs) if run.holder == mine]

    def _runs_for(self, coords: Coords) -> list[int]:
        fixed = [(i, coords[a]) for i, a in enumerate(self.token_axes) if a not in self.expert_axes]
        return [r for r, run in enumerate(self.runs) if all(run.holder[i] == c for i, c in fixed)]

    def _rows(self, runs: Sequence[int], experts: Sequence[int]) -> Intervals:
        first, kept = self.first[runs][:, experts], self.kept[runs][:, experts]
        return normalize(zip(first.ravel().tolist(), (first + kept).ravel().tolist(), strict=True))

    # -- numbers for local work -----------------------------------------------------------------------------
    def own_counts(self, coords: Coords) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many rows the rank at `coords` has, and how many of them are kept: for each expert, for each run."""
        mine = self._own_runs(coords)
        return tuple(self.counts[mine].T.ravel().tolist()), tuple(self.kept[mine].T.ravel().tolist())

    def rows_per_expert(self, coords: Coords) -> tuple[int, ...]:
        return tuple(self.kept[self._runs_for(coords)][:, self.experts_at(coords)].sum(0).tolist())


def _exchanged_counts(chosen: DTensor, experts: int) -> tuple[list[Run], numpy.ndarray]:
    """The runs of tokens of all ranks, in order, and how often each expert is chosen in each."""
    layout = chosen._layout
    mesh, axes = layout.mesh, layout.axes_of(0)
    holders = list(numpy.ndindex(*(mesh.shape[a] for a in axes)))
    pieces = {holder: layout.held(0, coords_on(axes, holder, len(mesh.shape))) for holder in holders}
    most = max(1, max(map(len, pieces.values())))
    evenly = [Shard(0) if p.is_shard(0) else REPLICATE for p in layout.placements]
    table = layout.replace(shape=(len(holders) * most, experts), placements=evenly)
    count = lambda local, held: _counted(local, experts, held, most)
    counts = run_local(count, [chosen], table, lambda coords: layout.held(0, coords))
    whole = table.replace(placements=[REPLICATE] * len(table.placements))
    known = mesh.comm.first(move(counts._local, table, whole, Note("dispatch", "sizes")))
    numbers = _checked(known).reshape(len(holders), most, experts)
    found = sorted(
        (Run(start, holder), tuple(numbers[i, j]))
        for i, holder in enumerate(holders)
        for j, (start, _) in enumerate(pieces[holder])
    )
    rows = numpy.array([row for _, row in found], dtype=numpy.int64).reshape(len(found), experts)
    return [run for run, _ in found], rows


def _counted(chosen: torch.Tensor, experts: int, held: Intervals, most: int) -> torch.Tensor:
    """How often each expert is chosen in each run of tokens. There are `most` rows, zeros where there is no run."""
    counts = chosen.new_zeros(most, experts)
    if chosen.numel() and not (int(chosen.min()) >= 0 and int(chosen.max()) < experts):
        return counts + (_BAD + chosen[(chosen < 0) | (chosen >= experts)][0])
    for row, part in zip(counts, chosen.split([b - a for a, b in held]), strict=False):
        row += part.flatten().bincount(minlength=experts)
    return counts


def _checked(counts: torch.Tensor) -> numpy.ndarray:
    """The counts as an array. An expert that does not exist raises on all ranks, since all have the same counts."""
    known = counts.numpy(force=True)
    if known.min(initial=0) < 0:
        raise LayoutError(
            f"dispatch: chosen has {known.min() - _BAD}, but there are {counts.shape[-1]} experts, numbered from 0"
        )
    return known
