"""Descriptions of hardware: data files in which every figure says where it comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.forecast.grids import Grid

FOLDER = Path(__file__).parent / "hardware_data"
BASES = ("exact", "measured", "published", "assumed")
_PAIRS = ("all_to_all", "send_recv")  # collectives in which ranks send to each other in pairs


class HardwareError(ShardwiseError, ValueError):
    """A description of hardware that cannot be read, or that is not known."""


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from.

    Attributes:
        value: The number.
        basis: "exact", "measured", "published" or "assumed".
        source: Where it was published, or how it was measured or chosen.
    """

    value: float
    basis: str
    source: str = ""

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise HardwareError(f"basis {self.basis!r} must be one of {', '.join(BASES)}")


@dataclass(frozen=True)
class Link:
    """What connects groups of ranks.

    Attributes:
        ranks: How many ranks are connected so; 0 for any number.
        bandwidth: Bytes per second that one rank receives.
        latency: Seconds to start one message.
    """

    ranks: int
    bandwidth: Figure
    latency: Figure


@dataclass(frozen=True)
class Hardware:
    """One device and what connects many of them.

    Attributes:
        name: Of the device.
        memory: Bytes of a device.
        beside: Bytes that it holds beside the tensors: "context" for kernels and the driver, "communicator" for each
            group of ranks that communicates, "pairs" for each where ranks send to each other in pairs, too.
        bandwidth: Bytes per second of its memory.
        flops: By dtype ("bfloat16", "float32", ...), floating-point operations per second of matrix products.
        efficiency: By kind of op ("matmul", "attention", "memory"), the share of the peak that kernels reach.
        launch: Seconds that the shortest kernel takes.
        host: Seconds that the host takes to start an op.
        hosts: The same where it is known better: by the phase of the op ("forward", "backward",
            "optimizer"). On top come "tensor" for each tensor of a list that an op takes, "view" and "module" for each
            view that is made and module that is called before it, "distributed" for ops on distributed tensors,
            "library" for the library's own, "checkpoint" for each part that is recomputed. "exchange" is the start of a
            communication.
        grids: Measured seconds of kernels by their sizes: by the name of an op, or by the kind and dtype of products.
        links: From the closest to the farthest; ranks follow each other along the last axis of a mesh.
        table: Measured seconds of ops, by "op dtype shape": used instead of the roofline.
    """

    name: str
    memory: Figure
    bandwidth: Figure
    flops: dict[str, Figure]
    efficiency: dict[str, Figure]
    launch: Figure
    host: Figure
    links: tuple[Link, ...]
    table: dict[str, float] = field(default_factory=dict)
    hosts: dict[str, Figure] = field(default_factory=dict)
    grids: dict[str, Grid] = field(default_factory=dict)
    beside: dict[str, Figure] = field(default_factory=dict)

    @staticmethod
    def load(name: str | Path | Hardware) -> Hardware:
        """The hardware of that name, or of a JSON file; itself if it is one already.

        Raises:
            HardwareError: There is none of that name, or the file describes none.
        """
        if isinstance(name, Hardware):
            return name
        path = Path(name) if str(name).endswith(".json") else FOLDER / f"{name}.json"
        if not path.exists():
            raise HardwareError(f"hardware {str(name)!r} is not known; use one of {', '.join(known())}, or a JSON file")
        try:
            return Hardware._from(json.loads(path.read_text()))
        except (KeyError, TypeError, ValueError) as error:
            raise HardwareError(f"{path} describes no hardware: {error!r}") from error

    @staticmethod
    def _from(said: Mapping[str, Any]) -> Hardware:
        one = lambda of: Figure(**of)
        some = lambda of: {key: Figure(**value) for key, value in of.items()}
        links = tuple(Link(x["ranks"], one(x["bandwidth"]), one(x["latency"])) for x in said["links"])
        return Hardware(
            str(said["name"]), one(said["memory"]), one(said["bandwidth"]), some(said["flops"]),
            some(said["efficiency"]),
            one(said["launch"]), one(said["host"]), links, dict(said.get("table", {})),
            some(said.get("hosts", {})), {name: Grid.from_json(grid) for name, grid in said.get("grids", {}).items()},
            some(said.get("beside", {})),
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the description to a file that `load` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    # -- bytes ------------------------------------------------------------------------------------------------------
    def bytes_beside(self, groups: Mapping[str, Iterable[str]]) -> Figure:
        """What the device holds beside the tensors.

        Args:
            groups: The kinds of collectives, by the group of ranks that communicates.
        """
        counts = {"context": 1, "communicator": len(groups)}
        counts["pairs"] = sum(any(kind in _PAIRS for kind in kinds) for kinds in groups.values())
        found = {name: (count, self.beside[name]) for name, count in counts.items() if count and name in self.beside}
        basis = max((figure.basis for _, figure in found.values()), key=BASES.index, default="exact")
        said = ", ".join(f"{count} x {name}" for name, (count, _) in found.items())
        return Figure(sum(count * figure.value for count, figure in found.values()), basis, said)

    # -- seconds ----------------------------------------------------------------------------------------------------
    def op_seconds(
        self,
        flops: float,
        nbytes: float,
        dtype: str,
        kind: str,
        key: str = "",
        grids: Sequence[str] = (),
        sizes: Sequence[int] = (),
    ) -> tuple[float, str]:
        """How long a kernel takes, and the basis: a measured entry of the table, else what a grid of measured ones
        says, else the roofline.

        Args:
            flops, nbytes, dtype: What it does, and in which numbers.
            kind: "matmul", "attention" or "memory".
            key: Its name in the table.
            grids: Names of grids, the best one first.
            sizes: Where it is in them.
        """
        if key in self.table:
            return self.table[key], "measured"
        for name in grids:
            grid = self.grids.get(name)
            if grid is not None and len(grid.axes) == len(sizes):
                return grid.at_sizes(sizes), grid.basis
        peak = self.flops.get(dtype) or self.flops.get("float32") or Figure(math.inf, "assumed")
        moved = nbytes / (self.bandwidth.value * self._share("memory").value)
        if not flops:
            return max(moved, self.launch.value), self._share("memory").basis
        share = self._share(kind)
        return max(flops / (peak.value * share.value), moved, self.launch.value), share.basis

    def host_seconds(self, phase: str, **counts: int) -> float:
        """How long the host takes to start an op.

        Args:
            phase: Of the op; "exchange" for a communication.
            counts: What comes with it, by the names of `hosts`: how many of each.
        """
        said = self.hosts.get(phase, self.host).value
        for name, count in counts.items():
            if count and name in self.hosts:
                said += count * self.hosts[name].value
        return said

    def _share(self, kind: str) -> Figure:
        return self.efficiency.get(kind, Figure(1.0, "assumed", "no efficiency is given"))

    def exchange_seconds(self, sizes: Sequence[int], strides: Sequence[int], received: int) -> tuple[float, str]:
        """How long a collective takes in which a rank receives so many bytes, along axes of these sizes. The stride of
        an axis is how far apart in number its ranks are."""
        ranks = math.prod(sizes)
        if ranks <= 1:
            return 0.0, "exact"
        span = max((size * stride for size, stride in zip(sizes, strides, strict=True) if size > 1), default=1)
        closest, link = self.links[0], self.links[-1]
        for candidate in self.links:
            if candidate.ranks == 0 or span <= candidate.ranks:
                link = candidate
                break
        bandwidth = link.bandwidth.value
        if link is not closest and closest.ranks:  # ranks of one group on one node send over its links at the same time
            nearest = min(stride for size, stride in zip(sizes, strides, strict=True) if size > 1)
            together = max(1, min(closest.ranks // nearest, ranks))
            bandwidth = min(bandwidth * together, closest.bandwidth.value)
        rounds = math.ceil(math.log2(ranks))
        worst = max((link.bandwidth.basis, link.latency.basis), key=BASES.index)
        return rounds * link.latency.value + received / bandwidth, worst


def known() -> list[str]:
    """The names of the hardware that is described."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))
