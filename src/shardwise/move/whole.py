"""How a step runs where all ranks are in one process: through one tensor with what all of them hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwise.comm.reduction import REDUCTIONS
from shardwise.layout import Region
from shardwise.layout.region import region_shape, smallest_around, whole_region, within
from shardwise.move.pack import pick, place

Room = tuple[tuple[int, ...], Region]  # the shape of a tensor of zeros, and the place in it where something stands


class Whole:
    """One tensor with what all ranks of this process hold. Each rank takes its result out of it, so the work grows with
    the number of ranks and not with its square."""

    def __init__(self, regions: Sequence[Region], like: torch.Tensor, zeros: bool) -> None:
        self.region = smallest_around(regions)
        self.tensor = _new(like, region_shape(self.region), zeros)

    def put(self, region: Region, value: torch.Tensor, reduce_op: str | None = None) -> None:
        """Write what a rank holds to its place, or reduce it with the value that is there."""
        at = within(self.region, region)
        place(self.tensor, at, value if reduce_op is None else REDUCTIONS[reduce_op](pick(self.tensor, at), value))

    def view(self, region: Region) -> torch.Tensor:
        """The values of a region; they may share the memory of the whole."""
        return pick(self.tensor, within(self.region, region))

    def take(self, region: Region) -> torch.Tensor:
        """The values of a region, in a new tensor."""
        return self.view(region).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Put:
    """Write what one rank holds into the common tensor, or add it to the value there."""

    rank: int
    at: Region
    reduce_op: str | None

    def run(self, whole: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        value = values[self.rank]
        if self.reduce_op is not None:
            value = REDUCTIONS[self.reduce_op](pick(whole, self.at), value)
        place(whole, self.at, value)


@dataclass(frozen=True)
class Taken:
    """Where a result is: in what `rank` holds, or, if `rank` is None, in the common tensor."""

    rank: int | None
    region: Region
    room: Room | None

    def run(self, whole: torch.Tensor | None, values: Sequence[torch.Tensor]) -> torch.Tensor:
        source = values[self.rank] if self.rank is not None else whole
        return tensor_of_its_own(pick(source, self.region), self.room)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Together:
    """What a step does among the ranks of one group that are all in this process. It is computed once per group."""

    shape: tuple[int, ...]  # of the common tensor
    zeros: bool
    puts: tuple[Put, ...]  # none where every rank has what it needs
    takes: tuple[Taken, ...]  # the different results
    results: tuple[int, ...]  # which of them each rank has afterwards

    def run(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        whole = _new(values[0], self.shape, self.zeros) if self.puts else None
        for put in self.puts:
            put.run(whole, values)  # type: ignore[arg-type]
        made = [whole] if self.is_whole else [taken.run(whole, values) for taken in self.takes]
        return [made[number] for number in self.results]  # type: ignore[misc]

    @cached_property
    def is_whole(self) -> bool:
        """Whether there is one result, the common tensor itself."""
        taken = self.takes[0]
        return len(self.takes) == 1 and taken == Taken(None, whole_region(self.shape), None)


def tensor_of_its_own(part: torch.Tensor, room: Room | None) -> torch.Tensor:
    """The part, or zeros in which it stands."""
    if room is None:
        return part.clone(memory_format=torch.contiguous_format)
    out = part.new_zeros(room[0])
    place(out, room[1], part)
    return out


def _new(like: torch.Tensor, shape: Sequence[int], zeros: bool) -> torch.Tensor:
    return (like.new_zeros if zeros else like.new_empty)(shape)
