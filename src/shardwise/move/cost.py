"""What a move costs: one model, used to choose moves and to choose how an op is split.

The numbers are rough until `calibrate` (calibrate.py) has measured them; every rank must use the same ones, or ranks
would choose different collectives.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.protocols import MeshLike


@dataclass(frozen=True)
class AxisCost:
    """A collective along one axis: seconds to start it, and bytes a second a rank can receive."""

    latency: float = 10e-6
    bandwidth: float = 10e9


@dataclass(frozen=True)
class CostModel:
    """Seconds for a step: a latency, and the bytes a rank receives over the bandwidth of the axes they come along."""

    axes: tuple[AxisCost, ...]

    def along(self, axis: int, bytes_in: float) -> float:
        """One exchange along one axis."""
        return self.axes[axis].latency + bytes_in / self.axes[axis].bandwidth

    def over(self, axes: Sequence[int], sizes: Sequence[int], bytes_in: float) -> float:
        """One exchange among all ranks along some axes. Its latency grows with the logarithm of their number. Between
        ranks that differ on several axes, bytes go at the speed of the slowest of these axes: if all send equal shares,
        (k - 1) / k of the bytes cross a slowest axis of k ranks."""
        doublings = math.log2(max(math.prod(sizes[a] for a in axes), 2))
        seconds, rest = doublings * max(self.axes[a].latency for a in axes), bytes_in
        slowest_first = sorted(axes, key=lambda a: self.axes[a].bandwidth)
        whole = math.prod(sizes[a] for a in axes) - 1
        for axis in slowest_first:
            ranks = math.prod(sizes[a] for a in axes if slowest_first.index(a) >= slowest_first.index(axis))
            across = bytes_in * (ranks - ranks // sizes[axis]) / whole if whole else 0
            seconds += min(across, rest) / self.axes[axis].bandwidth
            rest -= across
        return seconds

    @property
    def uniform(self) -> bool:
        """Whether it does not matter along which axis bytes go."""
        return len(set(self.axes)) <= 1


_measured: weakref.WeakKeyDictionary[Any, CostModel] = weakref.WeakKeyDictionary()
_defaults: dict[int, CostModel] = {}


def cost_of(mesh: MeshLike) -> CostModel:
    """The cost model of a mesh: the measured one, else the default."""
    found = _measured.get(mesh) if _measured else None
    if found is not None:
        return found
    n = len(mesh.shape)
    if n not in _defaults:
        _defaults[n] = CostModel((AxisCost(),) * n)
    return _defaults[n]


def set_cost(mesh: MeshLike, model: CostModel) -> None:
    """Price moves and strategies on this mesh by `model` from now on. The caller must drop cached plans."""
    _measured[mesh] = model
