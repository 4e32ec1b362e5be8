"""What a move costs: one model, used to choose moves and to choose how an op is split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.comm.base import Coords, Step


@dataclass(frozen=True)
class CostModel:
    """Seconds for a step: a latency, and the bytes a rank receives over the bandwidth of the axis."""

    latency: float = 10e-6
    bandwidth: float = 10e9

    def exchange(self, bytes_in: float) -> float:
        return self.latency + bytes_in / self.bandwidth

    def steps(self, steps: Iterable[Step], coords: Coords) -> float:
        return sum(self.exchange(step.bytes_in(coords)) for step in steps if step.kind != "local")


DEFAULT_COST = CostModel()
