"""One exchange among the ranks along some axes: everyone gets what it needs from those who hold it.

A rank needs its tiles of the target layout. What it holds itself never travels; of several holders the one with the
needer's own coordinates (on the axes where the source is Replicate) sends. Where the source is a sum of parts, every
part is sent and they are added up where they arrive. All-gather, reduce-scatter, all-to-all and slice are cases of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shardwise.comm.base import Coords
from shardwise.comm.boxes import Box, box_shape, build, cut_box, pick, place
from shardwise.comm.schedule import round_of
from shardwise.errors import MoveError
from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.overlap import holders_of
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import count, intersect, positions

_APART = 1 << 16  # bytes of a rank's tensor


class Route(NamedTuple):
    """A part of a rank's tensor, and the ranks it comes from (the parts of a sum, in order) or goes to."""

    peers: tuple[Coords, ...]
    box: Box  # positions in the rank's own tensor


@dataclass(frozen=True, eq=False)
class Exchange:
    """From `src` to `dst`, which differ on `axes` only (or whose splits there are nested in one that differs).

    On the axes in `spread` the result, Replicate there, enters a call that is split: the gradients add up. What
    travels goes in `rounds` parts, so that buffers stay small. Where a `Padded` step follows, the result stands at its
    place among the zeros of a tensor of the layout `inside`.
    """

    src: Layout
    dst: Layout
    axes: tuple[int, ...]
    spread: tuple[int, ...] = ()
    rounds: int = 1
    inside: Layout | None = None
    kept: dict[Any, Any] = field(default_factory=dict)  # what was worked out for a rank

    routed = True
    uniform = False
    fresh = False

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
        found = self.kept.get(("in", coords))
        if found is None:
            found = self.kept["in", coords] = tuple(self._incoming(coords))
        return found

    def outgoing(self, coords: Coords) -> dict[Coords, Box]:
        """For each rank that gets something from `coords`: the positions it gets (itself included)."""
        found = self.kept.get(("out", coords))
        if found is None:
            found = self.kept["out", coords] = dict(self._outgoing(coords))
        return found

    def _incoming(self, coords: Coords) -> Any:
        pinned = {a: c for a, c in enumerate(coords) if a not in self.axes}
        needed = [self.dst.held(dim, coords) for dim in range(self.dst.ndim)]
        places = [self.result.held(dim, coords) for dim in range(self.dst.ndim)]
        sides = [holders_of(self.src, dim, need, pinned) for dim, need in enumerate(needed)]
        for choice in itertools.product(*sides):
            holder = dict(pair for spot, _ in choice for pair in spot)
            box = tuple(positions(held, part) for held, (_, part) in zip(places, choice, strict=True))
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

    @cached_property
    def crossed(self) -> tuple[int, ...]:
        """The axes along which anything travels: where the source is Replicate, everyone has it from its own kind."""
        return tuple(a for a in self.axes if not self.src.placements[a].is_replicate())

    def shared_by(self, coords: Coords) -> Coords:
        """Ranks along the axes for which this is equal end up with the same value."""
        return tuple(
            c if a not in self.axes or a in self.spread or self._way(self.dst, a) != "R" else 0
            for a, c in enumerate(coords)
        )

    # -- local work -----------------------------------------------------------------------------------------
    @property
    def result(self) -> Layout:
        """The layout whose local tensors it makes."""
        return self.inside or self.dst

    def result_shape(self, coords: Coords) -> tuple[int, ...]:
        return self.result.local_shape_at(coords)

    def new_result(self, like: torch.Tensor, coords: Coords) -> torch.Tensor:
        return (like.new_empty if self.inside is None else like.new_zeros)(self.result_shape(coords))

    def source_shape(self, coords: Coords) -> tuple[int, ...]:
        return self.src.local_shape_at(coords)

    def from_holders(self, coords: Coords, value_of: Any, reduce: Any) -> torch.Tensor:
        """What `coords` will hold, where every holder's tensor is at hand."""
        own = self.kept.get(("own", coords))
        if own is not None:
            return pick(value_of(coords), own).clone(memory_format=torch.contiguous_format)
        parts, some = [], value_of(coords)
        for peers, box in self.incoming(coords):
            taken = [pick(value_of(peer), self.outgoing(peer)[coords]) for peer in peers]
            parts.append((box, taken[0] if len(taken) == 1 else reduce(taken, self.reduce_op)))
        shape = self.result_shape(coords)
        if self.inside is not None:
            out = self.new_result(some, coords)
            for box, part in parts:
                place(out, box, part)
            return out
        if len(parts) == 1 and box_shape(parts[0][0]) == shape:
            part = parts[0][1]
            if self.kind == "local":
                self.kept["own", coords] = self.outgoing(coords)[coords]
            return part.contiguous() if self.reduces else part.clone(memory_format=torch.contiguous_format)
        return build(shape, parts, some).contiguous()

    def but(self, **changes: Any) -> Exchange:
        """The same exchange in other rounds, or with zeros around its result."""
        return replace(self, kept={}, **changes)

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
        """The most bytes of packed parts, out and in, that are alive at once: those of the last and largest round."""
        if self.kind == "local":
            return 0
        found = self.kept.get(("buffers", coords))
        if found is None:
            last = round_of(self, coords, self.peers(coords), self.rounds - 1, self.apart)
            found = self.kept["buffers", coords] = last.buffers * self.dst.dtype.itemsize
        return found

    def peers(self, coords: Coords) -> list[Coords]:
        """Everyone along the axes that are crossed."""
        ranges = [range(k) if a in self.crossed else (coords[a],) for a, k in enumerate(self.src.mesh.shape)]
        return list(itertools.product(*ranges))

    @cached_property
    def apart(self) -> bool:
        """Whether everyone sends to each of the others by itself: what many need need not be packed for each of them.
        (Small parts are packed: one collective takes less time to start.)"""
        many = math.prod(self.src.mesh.shape[a] for a in self.crossed) > 2
        gathers = not self.reduces and all(self.dst.placements[a].is_replicate() for a in self.crossed)
        return gathers and many and largest_bytes(self.src) >= _APART

    def __str__(self) -> str:
        names = "+".join(self.src.mesh.axis_names[a] for a in self.axes)
        changes = ", ".join(f"{self.src.placements[a]} -> {self.dst.placements[a]}" for a in self.axes)
        rounds = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{'slice' if self.kind == 'local' else self.kind} on {names} ({changes}){rounds}"


def largest_bytes(layout: Layout) -> int:
    """Bytes of the largest local tensor; the same number on all ranks."""
    n = layout.dtype.itemsize
    for dim, size in enumerate(layout.shape):
        axes = layout.axes_of(dim)
        if axes and any(layout.placements[a].pieces is not None for a in axes):  # type: ignore[attr-defined]
            spots = math.prod(layout.mesh.shape[a] for a in axes)
            n *= max(_held_at(layout, dim, axes, i) for i in range(spots))
        else:
            for axis in axes:
                size = -(-size // layout.mesh.shape[axis])
            n *= size
    return n


def _held_at(layout: Layout, dim: int, axes: tuple[int, ...], i: int) -> int:
    coords = [0] * len(layout.mesh.shape)
    for axis in reversed(axes):
        i, coords[axis] = divmod(i, layout.mesh.shape[axis])
    return count(layout.held(dim, coords))


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
