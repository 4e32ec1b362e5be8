"""One tensor with what all ranks of this process hold: how a step is done where they are in one memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm.reduction import REDUCTIONS
from shardwise.layout import Region
from shardwise.layout.region import region_shape, smallest_around, within
from shardwise.move.pack import pick, place


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
