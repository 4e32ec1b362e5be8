"""Steps in which every rank sends parts of its tensor to others, and how they run on the two kinds of backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm.base import Comm, Coords
from shardwise.comm.messages import Along
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.simulation import SimulatedComm
from shardwise.layout import Region
from shardwise.layout.region import region_shape, within
from shardwise.move.at_hand import Whole
from shardwise.move.pack import pick, place
from shardwise.move.routes import Routes, Shape
from shardwise.move.steps import Begun, MeshStep
from shardwise.move.transfer import Native, Transfer


@dataclass(frozen=True, eq=False)
class RoutedStep(MeshStep):
    """A step that says who holds and who needs what. On processes it is a transfer; where all ranks are in one
    process, everything is put into one tensor, and everyone takes its own."""

    kept: dict[Any, Any] = field(default_factory=dict, kw_only=True)  # what was worked out for a rank

    rounds = 1
    zeros = False
    fills_holes = False  # whether indices that nobody holds are zeros

    # -- what it is -----------------------------------------------------------------------------------------
    @abstractmethod
    def held(self, coords: Coords) -> Region:
        """The indices that a rank holds before."""

    @abstractmethod
    def needed(self, coords: Coords) -> Region:
        """The indices that it holds afterwards."""

    @abstractmethod
    def routes(self, member: Coords) -> Routes:
        """What a rank sends and takes."""

    def part_number(self, coords: Coords) -> int | None:
        """Which part of the sum of what ranks hold this rank has; None where another rank has the same part."""
        return 0

    def shared_by(self, coords: Coords) -> Any:
        """Ranks along the axes for which this is equal end up with the same value."""
        return coords

    def room_for(self, coords: Coords) -> tuple[Shape, Region] | None:
        """The shape of a tensor of zeros and the place in it where the result stands, if it stands in one."""
        return None

    def sends_separately(self, along: Along) -> bool:
        return False

    def native(self, along: Along) -> Native | None:
        return None

    # -- running --------------------------------------------------------------------------------------------
    def run(self, comm: Comm, local: Any) -> Any:
        if isinstance(comm, SimulatedComm):
            return comm.per_group(self._among, local, self.axes)
        assert isinstance(comm, ProcessGroupComm)
        if self.kind == "local":
            return self._among([local], [comm.coords])[0]
        with comm.naming(self.kind, self.axes):
            return Transfer(self, (local,), comm.coords, comm.along(self.crossed)).finish()[0]

    def start(self, comm: Comm, local: Any, owned: bool) -> Begun | None:
        assert isinstance(comm, ProcessGroupComm)
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
        regions = [self.held(at) for at in coords] + [self.needed(at) for at in coords if self.fills_holes]
        whole = Whole(regions, values[0], self.fills_holes)
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
