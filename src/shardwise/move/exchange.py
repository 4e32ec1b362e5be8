"""One exchange among the ranks along some axes: every rank gets what it needs from ranks that hold it.

A rank needs its tiles of the target layout. What it holds itself never travels; of several holders the one with the
needer's own coordinates (on the axes where the source is Replicate) sends. Where the source is a sum of parts, every
part is sent and they are added up where they arrive. All-gather, reduce-scatter, all-to-all and slice are cases of it.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.comm.messages import WIRE, Along, begun, waited_for
from shardwise.comm.outline import OutlineComm
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.errors import MoveError
from shardwise.layout import Layout, Partial, Placement, Region, Shard
from shardwise.layout.holders import holders_of
from shardwise.layout.local_sizes import is_even, largest_bytes
from shardwise.layout.placement import REPLICATE
from shardwise.layout.region import region_shape, smallest_around, within
from shardwise.layout.split import count, intersect
from shardwise.move.pack import pick
from shardwise.move.schedule import Pieces, Route, Routes, Shape, round_of
from shardwise.move.steps import Begun, MeshStep
from shardwise.move.transfer import Exchanged, Native, Transfer, gather_in_order, reduce_and_scatter
from shardwise.move.whole import Put, Taken, Together, tensor_of_its_own
from shardwise.protocols import LocalValue

_SEPARATE_BYTES = 1 << 16  # bytes of a rank's tensor
_SENDING_BACKENDS = ("gloo", "nccl")  # backends that are known to send from rank to rank


@dataclass(frozen=True, eq=False)
class RoutedStep(Exchanged, MeshStep):
    """A step that knows which rank holds and which needs what. On processes it is a transfer. Where all ranks are in
    one process, they write into one common tensor, and each takes its result out of it."""

    kept: dict[Any, Any] = field(default_factory=dict, kw_only=True)  # what was computed for a rank before

    # -- what it is -----------------------------------------------------------------------------------------
    @abstractmethod
    def held(self, coords: Coords) -> Region:
        """The indices that a rank holds before."""

    @abstractmethod
    def needed(self, coords: Coords) -> Region:
        """The indices that it holds afterwards."""

    def part_number(self, coords: Coords) -> int | None:
        """Which part of the sum of what ranks hold this rank has; None where another rank has the same part."""
        return 0

    def shared_by(self, coords: Coords) -> Coords:
        """Ranks along the axes for which this is equal end up with the same value."""
        return coords

    def room_for(self, coords: Coords) -> tuple[Shape, Region] | None:
        """Where the result is to stand at a place in a tensor of zeros: the shape of that tensor, and the place. Else
        None."""
        return None

    # -- running --------------------------------------------------------------------------------------------
    def run(self, comm: Any, local: LocalValue) -> LocalValue:
        if comm.simulated:
            return comm.per_group(self._among, local, self.axes)
        if comm.outlined:
            return self._outlined(comm, local)[1]()
        if self.kind == "local":
            return self._made_here(local, comm.coords)
        with comm.guard(self.kind, self.crossed):
            return Transfer(self, (local,), comm.coords, comm.along(self.crossed)).finish()[0]

    def start(self, comm: ProcessGroupComm | OutlineComm, local: LocalValue, owned: bool) -> Begun | None:
        if isinstance(comm, OutlineComm):
            return self._outlined(comm, local)
        guard = comm.guard(self.kind, self.crossed)
        with guard:
            transfer = Transfer(self, (local,), comm.coords, comm.along(self.crossed))
        work = transfer.work
        begun(work)

        def finish() -> torch.Tensor:
            waited_for(work)
            with guard, torch.no_grad():
                return transfer.finish()[0]

        return transfer.out[0], finish

    def _outlined(self, comm: OutlineComm, local: torch.Tensor) -> Begun:
        """What the rank that is played allocates and receives, where there are no values."""
        me = comm.coords
        if self.kind == "local":
            with comm.making():
                made = self._made_here(comm.shared(local), me)
            return made, lambda: made
        room = self.room_for(me)
        shape = region_shape(self.needed(me)) if room is None else room[0]
        return comm.exchange(
            local, self.kind, self.crossed, self.bytes_in(me), shape, self.outlined_buffers(me), self.zeros
        )

    def outlined_buffers(self, coords: Coords) -> int:
        """Bytes of the buffers for sending and receiving, computed without looking at every peer."""
        return 2 * self.bytes_in(coords)

    def _among(self, values: Sequence[torch.Tensor], coords: Sequence[Coords]) -> list[torch.Tensor]:
        """What ranks along the axes hold afterwards, from what they hold before."""
        key = "together", *coords
        together = self.kept.get(key)
        if together is None:
            together = self.kept[key] = self._together(coords)
        return together.run(values)

    def _made_here(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        """What a rank holds afterwards where nothing travels."""
        return tensor_of_its_own(pick(local, self._own(coords)), self.room_for(coords))  # type: ignore[arg-type]

    def _own(self, coords: Coords) -> Region | None:
        """If a rank has all that it needs, the place of that in its own tensor; else None."""
        found = self.kept.get(("own", coords), self)
        if found is self:
            held, needed = self.held(coords), self.needed(coords)
            mine = within(held, needed)
            alone = self.kind == "local" or (not self.reduces and region_shape(mine) == region_shape(needed))
            found = self.kept["own", coords] = mine if alone else None
        return found

    @property
    def reduces(self) -> Sequence[int]:
        """The axes whose parts are added up."""
        return ()

    def _together(self, coords: Sequence[Coords]) -> Together:
        """What the ranks of a group do where all are in one process."""
        takes: dict[Coords, Taken] = {}
        around = smallest_around([self.held(at) for at in coords] + [self.needed(at) for at in coords if self.zeros])
        for rank, at in enumerate(coords):
            key = self.shared_by(at)
            if key not in takes:
                own = self._own(at)
                region = within(around, self.needed(at)) if own is None else own
                takes[key] = Taken(None if own is None else rank, region, self.room_for(at))
        numbers = {key: number for number, key in enumerate(takes)}
        alone = all(taken.rank is not None for taken in takes.values())
        puts = () if alone else tuple(self._puts(coords, around))
        results = tuple(numbers[self.shared_by(at)] for at in coords)
        return Together(region_shape(around), self.zeros, puts, tuple(takes.values()), results)

    def _puts(self, coords: Sequence[Coords], around: Region) -> Iterator[Put]:
        for rank, at in enumerate(coords):
            number = self.part_number(at)
            if number is not None:
                yield Put(rank, within(around, self.held(at)), self.reduce_op if number else None)


@dataclass(frozen=True, eq=False)
class Exchange(RoutedStep):
    """The exchange from `layout` to `dst`. They differ on `axes` only; `axes` includes those whose splits are nested in
    one that differs.

    On the axes in `spread` the result is Replicate and enters a split call, so its gradients add up. The bytes go in
    `rounds` parts, so that buffers stay small. Where a `Padded` step follows, the result is made at its place in a
    tensor of zeros of the layout `inside`.
    """

    dst: Layout
    spread: tuple[int, ...] = ()
    rounds: int = 1
    inside: Layout | None = None

    @property
    def src(self) -> Layout:
        return self.layout

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

    @cached_property
    def partner(self) -> Exchange:
        """The exchange of the gradient: all parts of a sum get the gradient of the sum, and the gradients of a spread
        value add up."""
        if self.reduces and self.reduce_op != "sum":
            raise MoveError(f"{self} has no gradient")
        others: dict[int, Placement] = {
            a: REPLICATE for a, p in enumerate(self.src.placements) if p.is_partial() and a not in self.axes
        }
        added = self.dst.placed(others | dict.fromkeys(self.spread, Partial("sum")))
        spread = self.src.placed(others | dict.fromkeys(self.reduces, REPLICATE))
        return Exchange(added, self.axes, spread, self.reduces, self.rounds)

    # -- who sends what to whom -----------------------------------------------------------------------------
    def incoming(self, coords: Coords) -> tuple[tuple[tuple[Coords, ...], Region], ...]:
        """The parts of what `coords` will hold: for each the rank that has it (possibly `coords` itself), and its place
        in the result."""
        found = self.kept.get(("in", coords))
        if found is None:
            found = self.kept["in", coords] = tuple(self._incoming(coords))
        return found

    def outgoing(self, coords: Coords) -> dict[Coords, Region]:
        """For each rank that gets something from `coords`: the positions it gets (itself included)."""
        found = self.kept.get(("out", coords))
        if found is None:
            found = self.kept["out", coords] = dict(self._outgoing(coords))
        return found

    def _incoming(self, coords: Coords) -> Iterator[tuple[tuple[Coords, ...], Region]]:
        pinned = {a: c for a, c in enumerate(coords) if a not in self.axes}
        sides = [holders_of(self.src, dim, need, pinned) for dim, need in enumerate(self.dst.region(coords))]
        there = self.result.region(coords)
        for choice in itertools.product(*sides):
            holder = dict(pair for spot, _ in choice for pair in spot)
            ranges = [
                range(self.src.mesh.shape[a]) if a in self.reduces else (holder.get(a, c),)
                for a, c in enumerate(coords)
            ]
            yield tuple(itertools.product(*ranges)), within(there, tuple(part for _, part in choice))

    def _outgoing(self, coords: Coords) -> Iterator[tuple[Coords, Region]]:
        """The same pairs, seen from the sender."""
        pinned, held = self._shared_with_needers(coords), self.src.region(coords)
        sides = [holders_of(self.dst, dim, have, pinned) for dim, have in enumerate(held)]
        for choice in itertools.product(*sides):
            needer = dict(pair for spot, _ in choice for pair in spot)
            ranges = [
                (pinned[a],) if a in pinned else (needer[a],) if a in needer else range(self.dst.mesh.shape[a])
                for a in range(len(coords))
            ]
            region = within(held, tuple(part for _, part in choice))
            for peer in itertools.product(*ranges):
                yield peer, region

    def _shared_with_needers(self, coords: Coords) -> dict[int, int]:
        """The coordinates that `coords` shares with every rank that needs something from it."""
        return {a: c for a, c in enumerate(coords) if a not in self.axes or self.src.placements[a].is_replicate()}

    def routes(self, member: Coords) -> Routes:
        held, needed = (self.src.local_shape_at(member),), (self.result.local_shape_at(member),)
        sends = {peer: Pieces.of(((0, region),), held) for peer, region in self.outgoing(member).items()}
        takes = [Route(sources, Pieces.of(((0, region),), needed)) for sources, region in self.incoming(member)]
        return Routes(sends, takes, held, needed)

    # -- what ranks hold before and after, where all of them are at hand ------------------------------------
    def held(self, coords: Coords) -> Region:
        return self.src.region(coords)

    def needed(self, coords: Coords) -> Region:
        return self.dst.region(coords)

    def room_for(self, coords: Coords) -> tuple[Shape, Region] | None:
        if self.inside is None:
            return None
        return self.inside.local_shape_at(coords), within(self.inside.region(coords), self.dst.region(coords))

    def part_number(self, coords: Coords) -> int | None:
        """The number of the part of a sum that this rank has. Of several ranks that hold the same part, only the first
        one counts."""
        number = 0
        for axis in self.axes:
            if axis in self.reduces:
                number = number * self.src.mesh.shape[axis] + coords[axis]
            elif coords[axis] and self.src.placements[axis].is_replicate():
                return None
        return number

    @cached_property
    def crossed(self) -> tuple[int, ...]:
        """The axes along which anything is sent. Nothing is sent along an axis on which the source is Replicate: a rank
        gets all it needs from ranks with its own coordinate there."""
        return tuple(a for a in self.axes if not self.src.placements[a].is_replicate())

    def shared_by(self, coords: Coords) -> Coords:
        """Ranks along the axes for which this is equal end up with the same value."""
        return tuple(
            c if a not in self.axes or a in self.spread or self._way(self.dst, a) != "R" else 0
            for a, c in enumerate(coords)
        )

    @property
    def digest(self) -> int:
        found = self.kept.get("digest")
        if found is None:
            found = self.kept["digest"] = hash((self.src.digest, self.dst.digest, self.axes, self.rounds))
        return found

    def describe(self) -> str:
        return f"{self.src!r} -> [{', '.join(map(str, self.dst.placements))}]"

    # -- how it travels -------------------------------------------------------------------------------------
    @property
    def result(self) -> Layout:
        return self.inside or self.dst

    @property
    def zeros(self) -> bool:
        return self.inside is not None

    def with_(self, **changes: Any) -> Exchange:
        """The same exchange in other rounds, or with zeros around its result."""
        return replace(self, kept={}, **changes)

    def sends_separately(self, along: Along) -> bool:
        return self.separate and along.backend in _SENDING_BACKENDS

    def native(self, along: Along) -> Native | None:
        """The backend's own collective that does this exchange faster than messages to each peer; None where there is
        none, as with gloo."""
        if along.group is None or along.backend == "gloo":
            return None
        if self.stacks and along.in_order:
            return gather_in_order
        even = self.kind == "reduce_scatter" and self.even and self.rounds == 1 and self.reduce_op == "sum"
        return reduce_and_scatter if even and self.dst.dtype in WIRE and along.backend == "nccl" else None

    @cached_property
    def stacks(self) -> bool:
        """Whether this is an all-gather whose parts, stored rank after rank, are the result."""
        if self.kind != "all_gather":
            return False
        dims = {self.src.placements[a].dim for a in self.axes}  # type: ignore[attr-defined]
        if len(dims) != 1 or not self.even:
            return False
        dim, origin = dims.pop(), (0,) * len(self.src.mesh.shape)
        first = [region[dim] for _, region in self.incoming(origin)]
        starts = [side[0][0] for side in first if side]
        outer = math.prod(self.dst.local_shape_at(origin)[:dim])
        return outer == 1 and starts == sorted(starts) and all(len(side) == 1 for side in first)

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
        """Counted dim by dim, without a list of the peers, of which there may be thousands."""
        if self.kind == "local":
            return 0
        shape, there, sent, stays = self.dst.mesh.shape, self.dst.region(coords), 1, 1
        pinned = self._shared_with_needers(coords)
        for dim, have in enumerate(self.src.region(coords)):
            if pinned.keys().isdisjoint(self.dst.axes_of(dim)):
                sent *= count(have)  # every index is held once along the axes that cut the dim
            else:
                sent *= sum(count(part) for _, part in holders_of(self.dst, dim, have, pinned))
            stays *= count(intersect(have, there[dim]))
        alike = [shape[a] for a, p in enumerate(self.dst.placements) if a not in pinned and not p.is_shard()]
        return (sent * math.prod(alike) - stays) * self.dst.dtype.itemsize

    def outlined_buffers(self, coords: Coords) -> int:
        """The buffers of a backend that, as NCCL, gathers and reduces parts natively if they follow each other in
        memory."""
        received = self.bytes_in(coords)
        if self.kind == "reduce_scatter" and self.even and self.rounds == 1 and self.reduce_op == "sum":
            return 0 if self._one_after_another(self.dst, self.src, coords) else self.bytes_at(coords)
        if self.reduces:
            return (received + self.bytes_at(coords)) // self.rounds
        if self.kind == "all_gather":
            return 0 if self._one_after_another(self.src, self.dst, coords) else received // self.rounds
        return 2 * received // self.rounds

    def _one_after_another(self, cut: Layout, whole: Layout, coords: Coords) -> bool:
        """Whether the memory of a rank's tensor in the layout `whole` is that of all ranks' tensors in the layout
        `cut`, one rank after another."""
        dims = {cut.placements[a].dim for a in self.axes}  # type: ignore[attr-defined]
        return self.even and len(dims) == 1 and math.prod(whole.local_shape_at(coords)[: min(dims)]) == 1

    def buffer_bytes(self, coords: Coords) -> int:
        """The buffers of the last round, which is the largest."""
        if self.kind == "local":
            return 0
        found = self.kept.get(("buffers", coords))
        if found is None:
            peers, number = self.peers(coords), self.rounds - 1
            last = round_of(self.routes(coords), coords, peers, number, self.rounds, self.separate)
            found = self.kept["buffers", coords] = last.buffers * self.dst.dtype.itemsize
        return found

    def peers(self, coords: Coords) -> list[Coords]:
        """All ranks along the axes that are crossed."""
        ranges = [range(k) if a in self.crossed else (coords[a],) for a, k in enumerate(self.src.mesh.shape)]
        return list(itertools.product(*ranges))

    @cached_property
    def separate(self) -> bool:
        """Whether every rank sends a separate message to each of the others. What many ranks need is then packed once,
        not once for each. (Small parts go in one collective, which starts faster.)"""
        many = math.prod(self.src.mesh.shape[a] for a in self.crossed) > 2
        gathers = not self.reduces and all(self.dst.placements[a].is_replicate() for a in self.crossed)
        return gathers and many and largest_bytes(self.src) >= _SEPARATE_BYTES

    def __str__(self) -> str:
        changes = ", ".join(f"{self.src.placements[a]} -> {self.dst.placements[a]}" for a in self.axes)
        rounds = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{'slice' if self.kind == 'local' else self.kind} on {self.where} ({changes}){rounds}"
