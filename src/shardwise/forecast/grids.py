"""Measured seconds of kernels at the points of a grid of sizes, and what they say of the sizes between them."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Grid:
    """Seconds of one kind of kernel, by sizes.

    Attributes:
        axes: What each size is, as ("m", "n", "k").
        at: The sizes that were measured along each axis, ascending.
        seconds: One for each point, the last axis running fastest.
        basis, source: As of a `Figure`.
    """

    axes: tuple[str, ...]
    at: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    basis: str = "measured"
    source: str = ""

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.at) or math.prod(map(len, self.at)) != len(self.seconds) or not self.seconds:
            raise ValueError(
                f"a grid over {self.axes} of {[len(a) for a in self.at]} sizes has {len(self.seconds)} times"
            )
        if any(list(sizes) != sorted(set(sizes)) or sizes[0] <= 0 for sizes in self.at) or min(self.seconds) <= 0:
            raise ValueError("a grid's sizes must be above 0 and ascending, and its times above 0")

    @staticmethod
    def of(axes: Sequence[str], points: Mapping[tuple[int, ...], float], source: str) -> Grid:
        """The grid of these measured points; every combination of their sizes must be among them."""
        at = tuple(tuple(sorted({point[i] for point in points})) for i in range(len(axes)))
        return Grid(tuple(axes), at, tuple(points[point] for point in itertools.product(*at)), "measured", source)

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> Grid:
        """A grid as a description of hardware has it."""
        at = tuple(tuple(int(n) for n in sizes) for sizes in said["at"])
        return Grid(tuple(said["axes"]), at, tuple(said["seconds"]), str(said["basis"]), str(said["source"]))

    def points(self) -> Iterable[tuple[tuple[int, ...], float]]:
        """Sizes and seconds of every point."""
        return zip(itertools.product(*self.at), self.seconds, strict=True)

    def at_sizes(self, sizes: Iterable[float]) -> float:
        """Seconds at these sizes. Between measured ones time is taken to be a power of each size; past the largest it
        grows in proportion; below the smallest it stays."""
        beyond, corners = 1.0, [(0, 1.0)]  # of the grid's cell around it: number of the point, weight
        for measured, size in zip(self.at, sizes, strict=True):
            beyond *= max(1.0, size / measured[-1])
            inside = min(max(size, measured[0]), measured[-1])
            i = min(bisect_right(measured, inside) - 1, len(measured) - 1)
            j = min(i + 1, len(measured) - 1)
            share = 0.0 if i == j else math.log(inside / measured[i]) / math.log(measured[j] / measured[i])
            corners = [
                (number * len(measured) + place, weight * part)
                for number, weight in corners
                for place, part in ((i, 1 - share), (j, share))
                if part
            ]
        return beyond * math.exp(sum(weight * math.log(self.seconds[number]) for number, weight in corners))
