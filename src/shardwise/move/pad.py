"""Shard -> Partial(sum) without communication: everyone's tile with zeros around it is a part of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.comm.boxes import Box, pick, place
from shardwise.layout import Layout
from shardwise.layout.split import positions


@dataclass(frozen=True, eq=False)
class Pad:
    """`src` is cut where `dst` is a pending sum."""

    src: Layout
    dst: Layout
    axes: tuple[int, ...]

    kind = "local"
    routed = False
    reduce_op = "sum"
    uniform = False
    fresh = False

    def bytes_in(self, coords: Coords) -> int:
        return 0

    bytes_out = bytes_in

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        out = local.new_zeros(self.dst.local_shape_at(coords))
        place(out, self._mine(coords), local)
        return out

    def unpack(self, received: Any, coords: Coords) -> torch.Tensor:
        return received

    def part_shapes(self, packed: Any, coords: Coords) -> Sequence[tuple[int, ...]]:
        raise NotImplementedError("nothing is exchanged")

    def _mine(self, coords: Coords) -> Box:
        dims = range(self.src.ndim)
        return tuple(positions(self.dst.held(d, coords), self.src.held(d, coords)) for d in dims)

    @property
    def partner(self) -> Pad:
        return Unpad(self.src, self.dst, self.axes)

    def __str__(self) -> str:
        return f"pad on {'+'.join(self.src.mesh.axis_names[a] for a in self.axes)}"


class Padded(Pad):
    """The same after an exchange that left room for the zeros: there is nothing left to do."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local


class Unpad(Pad):
    """The gradient of Pad: all parts of a sum have the gradient of the sum; mine is what stands at my tile."""

    def pack(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return pick(local, self._mine(coords)).clone(memory_format=torch.contiguous_format)

    @property
    def partner(self) -> Pad:
        return Pad(self.src, self.dst, self.axes)
