"""`calibrate`: measure what a collective costs along each axis of a mesh, so that plans are priced by what is true."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.caches import clear_caches
from shardwise.comm.group_calls import group_call
from shardwise.errors import MeshError
from shardwise.mesh import Mesh, UserMesh, as_mesh
from shardwise.move.cost import AxisCost, CostModel, cost_of, set_cost

_SMALL, _LARGE = 1 << 10, 1 << 22  # bytes that each rank sends
_REPEATS = 8


class Costs:
    """What `calibrate` found. Prints as a table.

    Attributes:
        axis_names, sizes: Name of each axis of the mesh, and its number of ranks.
        axes: For each axis, `.latency` in seconds and `.bandwidth` in bytes per second.
        measured: Whether these were measured; False of a simulated mesh, which has the defaults.
    """

    def __init__(self, mesh: Mesh, model: CostModel, measured: bool) -> None:
        self.axis_names, self.sizes, self.axes, self.measured = mesh.axis_names, mesh.shape, model.axes, measured

    def __repr__(self) -> str:
        rows = [("axis", "ranks", "latency", "bandwidth")]
        for name, size, cost in zip(self.axis_names, self.sizes, self.axes, strict=True):
            rows.append((name, str(size), f"{cost.latency * 1e6:,.1f} us", f"{cost.bandwidth / 1e9:,.2f} GB/s"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, "measured" if self.measured else "defaults: simulated ranks have no network"])


def calibrate(device_mesh: UserMesh | None = None, file: str | Path | None = None) -> Costs:
    """Measure latency and bandwidth along each axis (a second or so); from then on plans are priced by them.

    All ranks of the mesh call it together, and get the same numbers.

    Args:
        device_mesh: The mesh; by default that of the enclosing ``with mesh:``.
        file: Where to save the numbers. If it has them for a mesh of this shape, axis names and device already, they
            are read instead of measured.

    Returns:
        The costs, which print as a table.

    Raises:
        MeshError: The file holds something else, or there is no mesh.
    """
    mesh = as_mesh(device_mesh)
    if mesh.comm.simulated or mesh.comm.outlined:
        return Costs(mesh, cost_of(mesh), measured=False)
    found = _read(mesh, file)
    model = found if found is not None else CostModel(tuple(_measure(mesh, axis) for axis in range(len(mesh.shape))))
    model = _agreed(mesh, model)
    if file is not None and found is None and (0,) * len(mesh.shape) in mesh.comm.coords_here():
        Path(file).write_text(json.dumps(_described(mesh) | {"axes": [vars(a) for a in model.axes]}, indent=1) + "\n")
    set_cost(mesh, model)
    clear_caches()  # plans were chosen by other numbers
    return Costs(mesh, model, measured=True)


def _measure(mesh: Mesh, axis: int) -> AxisCost:
    if mesh.shape[axis] == 1:
        return AxisCost()
    group, k = mesh.comm.group(axis), mesh.shape[axis]  # type: ignore[attr-defined]

    def seconds(nbytes: int) -> float:
        mine = torch.zeros(nbytes, dtype=torch.uint8, device=mesh.device)
        everyone = [torch.empty_like(mine) for _ in range(k)]
        with group_call(group, "calibrate", "all_gather", mine.device.type):
            return _best(lambda: dist.all_gather(everyone, mine, group=group), mesh.device)

    latency, loaded = seconds(_SMALL), seconds(_LARGE)
    return AxisCost(latency, (k - 1) * (_LARGE - _SMALL) / max(loaded - latency, 1e-9))


def _best(run: Callable[[], object], device: torch.device) -> float:
    """The shortest time of several runs, in seconds."""
    best = float("inf")
    for i in range(_REPEATS + 1):
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize()
        if i:  # the first one warms up
            best = min(best, time.perf_counter() - started)
    return best


def _agreed(mesh: Mesh, model: CostModel) -> CostModel:
    """The slowest of what the ranks found: every rank must choose alike."""
    table = _largest(mesh, [[a.latency, 1 / a.bandwidth] for a in model.axes])
    return CostModel(tuple(AxisCost(latency, 1 / slowness) for latency, slowness in table))


def _largest(mesh: Mesh, numbers: list[list[float]]) -> list[list[float]]:
    """The largest of each number that a rank of the mesh has."""
    table = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
    for axis, k in enumerate(mesh.shape):
        if k > 1:
            group = mesh.comm.group(axis)  # type: ignore[attr-defined]
            with group_call(group, "calibrate", "all_reduce", table.device.type):
                dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    return table.tolist()


def _described(mesh: Mesh) -> dict[str, Any]:
    """How the file names a kind of mesh."""
    return {"axis_names": list(mesh.axis_names), "sizes": list(mesh.shape), "device": mesh.device.type}


def _read(mesh: Mesh, file: str | Path | None) -> CostModel | None:
    """The costs that the file holds for such a mesh. Every rank must find them, or all ranks measure."""
    known: CostModel | None = None
    if file is not None and Path(file).exists():
        try:
            said = json.loads(Path(file).read_text())
            if {k: said[k] for k in _described(mesh)} == _described(mesh):
                known = CostModel(tuple(AxisCost(float(a["latency"]), float(a["bandwidth"])) for a in said["axes"]))
        except (ValueError, KeyError, TypeError) as error:
            message = f"calibrate: file {str(file)!r} holds no costs ({error!r}); remove it to measure"
            raise MeshError(message) from error
    return None if _largest(mesh, [[float(known is None)]])[0][0] else known
