"""One exchange among the ranks along some axes: everyone gets what it needs from those who hold it.

A rank needs its tiles of the target layout. What it holds itself never travels; of several holders the one with the
needer's own coordinates (on the axes where the source is Replicate) sends. Where the source is a sum of parts, every
part is sent and they are added up where they arrive. All-gather, reduce-scatter, all-to-all and slice are cases of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shardwise.comm.base import Coords
from shardwise.comm.boxes import Box, box_shape, build, cut_box, pick
from shardwise.errors import MoveError
from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.overlap import holders_of
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import count, intersect, positions


class Route(NamedTuple):
    """A part of a rank's tensor, and the ranks it comes from (the parts of a sum, in order) or goes to."""

    peers: tuple[Coords, ...]
    box: Box  # positions in the rank's own tensor


@dataclass(frozen=True, eq=False)
class Exchange:
    """From `src` to `dst`, which differ on `axes` only (or whose splits there are nested in one that differs).

    On the axes in `spread` the result, Replicate there, enters a call that is split: the gradients add up. What
    travels goes in `rounds` parts, so that buffers stay small.
    """

    src: Layout
    dst: Layout
    axes: tuple[int, ...]
    spread: tuple[int, ...] = ()
    rounds: int = 1
    _routes: dict[Any, tuple[Route, ...]] = field(default_factory=dict)

    routed = True
    uniform = False

    @cached_property
    def reduces(self) -> tuple[int, ...]:
        """The axes whose parts are added up."""
        return tuple(a for a in self.axes if self.src.placements[a].is_partial())

    @cached_property
    def reduce_op(self) -> str:
        ops = {self.src.placements[a].reduce_op for a in self.reduces}  # type: ignore[attr-defined]
        return ops.pop() if len(ops) == 1 else "sum"

    @cached_property
    def kind(self) -> str:
        """The collective it is: what the ledger shows."""
        ways = {(self._way(self.src, a), self._way(self.dst, a)) for a in self.axes}
        if self.reduces:
            return "reduce_scatter" if ways == {("P", "S")} else "all_to_all"
        if all(before == "R" for before, _ in ways):
            return "local"
        return "all_gather" if ways == {("S", "R")} else "all_to_all"

    @staticmethod
    def _way(layout: Layout, axis: int) -> str:
        p = layout.placements[axis]
        return "S" if isinstance(p, Shard) else "P" if isinstance(p, Partial) else "R"

    @property
    def partner(self) -> Exchange:
        """The way of the gradient: the parts of a sum all get the sum's gradient, and a spread value's add up."""
        if self.reduces and self.reduce_op != "sum":
            raise MoveError(f"{self} has no gradient")
        others: dict[int, Placement] = {
            a: REPLICATE for a, p in enumerate(self.src.placements) if p.is_partial() and a not in self.axes
        }
        added = _with(self.dst, others | dict.fromkeys(self.spread, Partial("sum")))
        spread = _with(self.src, others | dict.fromkeys(self.reduces, REPLICATE))
        return Exchange(added, spread, self.axes, self.reduces, self.rounds)

    # -- who sends what to whom -----------------------------------------------------------------------------
    def incoming(self, coords: Coords) -> tuple[Route, ...]:
        """For each part of what `coords` will hold: who has it (itself, where it does)."""
        found = self._routes.get(("in", coords))
        if found is None:
            found = self._routes["in", coords] = tuple(self._incoming(coords))
        return found

    def outgoing(self, coords: Coords) -> dict[Coords, Box]:
        """For each rank that gets something from `coords`: the positions it gets (itself included)."""
        found = self._routes.get(("out", coords))
        if found is None:
            found = self._routes["out", coords] = dict(self._outgoing(coords))  # type: ignore[assignment]
        return found  # type: ignore[return-value]

    def _incoming(self, coords: Coords) -> Any:
        pinned = {a: c for a, c in enumerate(coords) if a not in self.axes}
        needed = [self.dst.held(dim, coords) for dim in range(self.dst.ndim)]
        sides = [holders_of(self.src, dim, need, pinned) for dim, need in enumerate(needed)]
        for choice in itertools.product(*sides):
            holder = dict(pair for spot, _ in choice for pair in spot)
            box = tuple(positions(need, part) for need, (_, part) in zip(needed, choice, strict=True))
            ranges = [
                range(self.src.mesh.shape[a]) if a in self.reduces else (holder.get(a, c),)
                for a, c in enumerate(coords)
            ]
            yield Route(tuple(itertools.product(*ranges)), box)

    def _outgoing(self, coords: Coords) -> Any:
        """The same pairs, seen from the sender."""
        fixed = [a for a in range(len(coords)) if a not in self.axes or self.src.placements[a].is_replicate()]
        pinned = {a: coords[a] for a in fixed}
        held = [self.src.held(dim, coords) for dim in range(self.src.ndim)]
        sides = [holders_of(self.dst, dim, have, pinned) for dim, have in enumerate(held)]
        for choice in itertools.product(*sides):
            needer = dict(pair for spot, _ in choice for pair in spot)
            box = tuple(positions(have, part) for have, (_, part) in zip(held, choice, strict=True))
            ranges = [
                (pinned[a],) if a in pinned else (needer[a],) if a in needer else range(self.dst.mesh.shape[a])
                for a in range(len(coords))
            ]
            for peer in itertools.product(*ranges):
                yield peer, box

    def shared_by(self, coords: Coords) -> Coords:
        """Ranks along the axes for which this is equal end up with the same value."""
        return tuple(
            c if a not in self.axes or a in self.spread or self._way(self.dst, a) != "R" else 0
            for a, c in enumerate(coords)
        )

    # -- local work -----------------------------------------------------------------------------------------
    def result_shape(self, coords: Coords) -> tuple[int, ...]:
        return self.dst.local_shape_at(coords)

    def from_holders(self, coords: Coords, value_of: Any, reduce: Any) -> torch.Tensor:
        """What `coords` will hold, where every holder's tensor is at hand."""
        parts, some = [], value_of(coords)
        for peers, box in self.incoming(coords):
            taken = [pick(value_of(peer), self.outgoing(peer)[coords]) for peer in peers]
            parts.append((box, taken[0] if len(taken) == 1 else reduce(taken, self.reduce_op)))
        shape = self.result_shape(coords)
        if len(parts) == 1 and box_shape(parts[0][0]) == shape:
            part = parts[0][1]
            return part.contiguous() if self.reduces else part.clone(memory_format=torch.contiguous_format)
        return build(shape, parts, some).contiguous()

    def part(self, box: Box, round: int) -> Box:
        return cut_box(box, self.rounds, round)

    @cached_property
    def stacks(self) -> bool:
        """Whether an all-gather's parts, one rank after another in memory, are the result."""
        if self.kind != "all_gather":
            return False
        first = self.incoming((0,) * len(self.src.mesh.shape))
        dims = {self.src.placements[a].dim for a in self.axes}  # type: ignore[attr-defined]
        if len(dims) != 1 or not self.even:
            return False
        dim = dims.pop()
        starts = [box[dim][0][0] for _, box in first if box[dim]]
        outer = math.prod(self.dst.local_shape_at((0,) * len(self.src.mesh.shape))[:dim])
        return outer == 1 and starts == sorted(starts) and all(len(box[dim]) == 1 for _, box in first)

    @cached_property
    def slices(self) -> bool:
        """Whether a sum's parts lie in memory in the order of the ranks that get them."""
        one_sum = self.kind == "reduce_scatter" and self.reduce_op == "sum" and len(self.axes) == 1
        return one_sum and self.partner.stacks

    @cached_property
    def even(self) -> bool:
        """Whether all ranks hold tensors of one shape, before and after."""
        return is_even(self.src) and is_even(self.dst)

    # -- what it costs --------------------------------------------------------------------------------------
    def bytes_in(self, coords: Coords) -> int:
        needed = have = 1
        for dim in range(self.dst.ndim):
            target = self.dst.held(dim, coords)
            needed *= count(target)
            have *= count(intersect(target, self.src.held(dim, coords)))
        parts = math.prod(self.src.mesh.shape[a] for a in self.reduces)
        return (parts * needed - have) * self.dst.dtype.itemsize

    def bytes_out(self, coords: Coords) -> int:
        if self.kind == "local":
            return 0
        sent = (math.prod(box_shape(box)) for peer, box in self.outgoing(coords).items() if peer != coords)
        return sum(sent) * self.dst.dtype.itemsize

    def buffer_bytes(self, coords: Coords) -> int:
        """The most bytes of packed parts, out and in, that are alive at once (of several rounds, two are)."""
        if self.kind == "local" or self.stacks:
            return 0
        if self.slices and self.rounds == 1:
            return math.prod(self.src.local_shape_at(coords)) * self.dst.dtype.itemsize
        if self.kind == "all_gather":
            out = math.prod(self.src.local_shape_at(coords)) * self.dst.dtype.itemsize
        else:
            out = self.bytes_out(coords)
        return -(-min(2, self.rounds) * (out + self.bytes_in(coords)) // self.rounds)

    def __str__(self) -> str:
        names = "+".join(self.src.mesh.axis_names[a] for a in self.axes)
        changes = ", ".join(f"{self.src.placements[a]} -> {self.dst.placements[a]}" for a in self.axes)
        rounds = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{'slice' if self.kind == 'local' else self.kind} on {names} ({changes}){rounds}"


def is_even(layout: Layout) -> bool:
    """Whether every rank holds a tensor of the same shape."""
    for dim, n in enumerate(layout.shape):
        for axis in layout.axes_of(dim):
            k = layout.mesh.shape[axis]
            if layout.placements[axis].pieces is not None or n % k:  # type: ignore[attr-defined]
                return False
            n //= k
    return True


def _with(layout: Layout, changes: dict[int, Placement]) -> Layout:
    if not changes:
        return layout
    places: Sequence[Placement] = [changes.get(a, p) for a, p in enumerate(layout.placements)]
    return layout.replace(placements=tuple(places))
