"""Steps in which every rank sends parts of its tensor to others, and how they run on the two kinds of backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.reduction import REDUCTIONS
from shardwise.layout import Region
from shardwise.layout.region import region_shape, smallest_around, within
from shardwise.move.pack import pick, place
from shardwise.move.schedule import Shape
from shardwise.move.steps import Begun, MeshStep
from shardwise.move.transfer import Exchanged, Transfer


class Whole:
    """What all ranks of this process hold of a tensor, in one: everyone takes its own out of it, so that the work grows
    with the number of ranks and not with its square."""

    def __init__(self, regions: Sequence[Region], like: torch.Tensor, zeros: bool) -> None:
        self.region = smallest_around(regions)
        self.tensor = (like.new_zeros if zeros else like.new_empty)(region_shape(self.region))

    def put(self, region: Region, value: torch.Tensor, reduce_op: str | None = None) -> None:
        """Write what a rank holds to its place, or reduce it with what is there."""
        at = within(self.region, region)
        place(self.tensor, at, value if reduce_op is None else REDUCTIONS[reduce_op](pick(self.tensor, at), value))

    def view(self, region: Region) -> torch.Tensor:
        """What stands at a region; it may share the memory of the whole."""
        return pick(self.tensor, within(self.region, region))

    def take(self, region: Region) -> torch.Tensor:
        """A tensor of its own with what stands at a region."""
        return self.view(region).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class RoutedStep(Exchanged, MeshStep):
    """A step that says who holds and who needs what. On processes it is a transfer; where all ranks are in one
    process, everything is put into one tensor, and everyone takes its own."""

    kept: dict[Any, Any] = field(default_factory=dict, kw_only=True)  # what was worked out for a rank

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

    def shared_by(self, coords: Coords) -> Any:
        """Ranks along the axes for which this is equal end up with the same value."""
        return coords

    def room_for(self, coords: Coords) -> tuple[Shape, Region] | None:
        """The shape of a tensor of zeros and the place in it where the result stands, if it stands in one."""
        return None

    # -- running --------------------------------------------------------------------------------------------
    def run(self, comm: Any, local: Any) -> Any:
        if comm.simulated:
            return comm.per_group(self._among, local, self.axes)
        if self.kind == "local":
            return self._made(pick(local, self._own(comm.coords)), comm.coords)  # type: ignore[arg-type]
        with comm.naming(self.kind, self.axes):
            return Transfer(self, (local,), comm.coords, comm.along(self.crossed)).finish()[0]

    def start(self, comm: ProcessGroupComm, local: Any, owned: bool) -> Begun | None:
        naming = comm.naming(self.kind, self.axes)
        with naming:
            transfer = Transfer(self, (local,), comm.coords, comm.along(self.crossed))

        def finish() -> torch.Tensor:
            with naming, torch.no_grad():
                return transfer.finish()[0]

        return transfer.out[0], finish

    def _among(self, values: Sequence[torch.Tensor], coords: Sequence[Coords]) -> list[torch.Tensor]:
        """What ranks along the axes hold afterwards, from what they hold before."""
        made: dict[Any, torch.Tensor] = {}
        whole: Whole | None = None
        for value, at in zip(values, coords, strict=True):
            key = self.shared_by(at)
            if key in made:
                continue
            mine = self._own(at)
            if mine is not None:
                made[key] = self._made(pick(value, mine), at)
            else:
                whole = whole or self._together(values, coords)
                made[key] = self._made(whole.view(self.needed(at)), at)
        return [made[self.shared_by(at)] for at in coords]

    def _own(self, coords: Coords) -> Region | None:
        """Where what a rank needs is in its own tensor, if it has all of it."""
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

    def _together(self, values: Sequence[torch.Tensor], coords: Sequence[Coords]) -> Whole:
        regions = [self.held(at) for at in coords] + [self.needed(at) for at in coords if self.zeros]
        whole = Whole(regions, values[0], self.zeros)
        for value, at in zip(values, coords, strict=True):
            number = self.part_number(at)
            if number is not None:
                whole.put(self.held(at), value, self.reduce_op if number else None)
        return whole

    def _made(self, part: torch.Tensor, coords: Coords) -> torch.Tensor:
        """A tensor of its own: the part, or zeros in which it stands."""
        room = self.room_for(coords)
        if room is None:
            return part.clone(memory_format=torch.contiguous_format)
        out = part.new_zeros(room[0])
        place(out, room[1], part)
        return out
