"""Shard -> Partial(sum) without communication: everyone's tile with zeros around it is a part of the sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.comm.base import Coords
from shardwise.comm.boxes import Box, pick, place
from shardwise.layout import Layout
from shardwise.layout.split import positions
from shardwise.move.steps import MoveStep


@dataclass(frozen=True, eq=False)
class Pad(MoveStep):
    """`tile` is cut where `layout` is a pending sum."""

    tile: Layout

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        out = local.new_zeros(self.layout.local_shape_at(coords))
        place(out, _within(self.layout, self.tile, coords), local)
        return out

    @property
    def partner(self) -> MoveStep:
        return Unpad(self.tile, self.axes, self.layout)


class Padded(Pad):
    """The same after an exchange that left room for the zeros: there is nothing left to do."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local


@dataclass(frozen=True, eq=False)
class Unpad(MoveStep):
    """The gradient of Pad: all parts of a sum have the gradient of the sum; mine is what stands at my tile."""

    padded: Layout

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return pick(local, _within(self.padded, self.layout, coords)).clone(memory_format=torch.contiguous_format)

    @property
    def partner(self) -> MoveStep:
        return Pad(self.padded, self.axes, self.layout)


def _within(padded: Layout, tile: Layout, coords: Coords) -> Box:
    return tuple(positions(padded.held(d, coords), tile.held(d, coords)) for d in range(tile.ndim))
