"""Shard -> Partial(sum) without communication: everyone's tile with zeros around it is a part of the sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.comm.base import Coords
from shardwise.layout import Layout
from shardwise.layout.region import Region, within
from shardwise.move.pack import pick, place
from shardwise.move.steps import MeshStep


@dataclass(frozen=True, eq=False)
class Pad(MeshStep):
    """`tile` is cut where `layout` is a pending sum."""

    tile: Layout

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        out = local.new_zeros(self.layout.local_shape_at(coords))
        place(out, _within(self.layout, self.tile, coords), local)
        return out

    @property
    def partner(self) -> MeshStep:
        return Unpad(self.tile, self.axes, self.layout)


class Padded(Pad):
    """The same after an exchange that left room for the zeros: there is nothing left to do."""

    reuses_memory = True

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local


@dataclass(frozen=True, eq=False)
class Unpad(MeshStep):
    """The gradient of Pad: all parts of a sum have the gradient of the sum; mine is what stands at my tile."""

    padded: Layout

    def apply(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return pick(local, _within(self.padded, self.layout, coords)).clone(memory_format=torch.contiguous_format)

    @property
    def partner(self) -> MeshStep:
        return Pad(self.padded, self.axes, self.layout)


def _within(padded: Layout, tile: Layout, coords: Coords) -> Region:
    return within(padded.region(coords), tile.region(coords))
