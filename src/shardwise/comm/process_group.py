"""The ranks are processes (or threads): every exchange is a collective of torch.distributed on the axis's group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.base import Comm, Coords, Step
from shardwise.comm.bridge import replaced
from shardwise.comm.record import Note, record
from shardwise.comm.simulation import reduce_parts
from shardwise.errors import CommError, MeshError

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# torch 2.13 has new names for these two
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_WIRE = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8, torch.float16, torch.bfloat16}

_MOST_DIMS = 16
_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


class ProcessGroupComm(Comm):
    """One rank of a torch DeviceMesh."""

    simulated = False

    def __init__(self, device_mesh: Any) -> None:
        coords = device_mesh.get_coordinate()
        if coords is None:
            raise MeshError(
                f"rank {dist.get_rank()} is not in the mesh {device_mesh}; call this only on the ranks of the mesh"
            )
        self.shape = tuple(device_mesh.shape)
        self.coords: Coords = tuple(coords)
        names = device_mesh.mesh_dim_names or tuple(str(i) for i in range(len(self.shape)))
        self.axis_names = tuple(names)
        self._device_mesh = device_mesh

    def played(self) -> Sequence[Coords]:
        return (self.coords,)

    def per_rank(self, of: Callable[[Coords], Any]) -> Any:
        return of(self.coords)

    def bind(self, func: Callable[..., Any], axes: Sequence[int] = ()) -> Callable[..., Any]:
        return func

    def values(self, local: Any) -> tuple[torch.Tensor, ...]:
        return (local,)

    def structure(self, local: Any) -> None:
        return None

    def assemble(self, structure: Any, values: Sequence[torch.Tensor | None]) -> Any:
        return values[0]

    def pick(self, structure: Any, local: Any) -> tuple[torch.Tensor, ...]:
        return (local,)

    def first(self, local: Any) -> torch.Tensor:
        return local

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def at(self, local: Any, coords: Coords) -> torch.Tensor:
        return local

    def adopt(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return local

    def all_kinds(self, local: torch.Tensor) -> dict[Coords, tuple[str, tuple[int, ...]]]:
        row = [_DTYPES.index(str(local.dtype)), local.ndim, *local.shape]
        table = torch.tensor(row + [0] * (_MOST_DIMS + 2 - len(row)), device=local.device)
        for axis in reversed(range(len(self.shape))):
            if self.shape[axis] > 1:
                record(self, "all_gather", axis, (self.shape[axis] - 1) * table.nbytes, Note("from_local", "sizes"))
                with self._naming("all_gather", axis):
                    table = torch.stack(self._gather(axis, table, [tuple(table.shape)] * self.shape[axis]))
            else:
                table = table.unsqueeze(0)
        rows = table.view(-1, _MOST_DIMS + 2).tolist()
        grid = itertools.product(*(range(k) for k in self.shape))
        return {c: (_DTYPES[row[0]], tuple(row[2 : 2 + row[1]])) for c, row in zip(grid, rows, strict=True)}

    def first_of_replicas(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        for axis in axes:
            if self.shape[axis] > 1:
                local = replaced(local, self.broadcast(local, axis, 0))
        return local

    def broadcast(self, local: torch.Tensor, axis: int, source: int) -> torch.Tensor:
        """What the coordinate `source` holds."""
        wire = _as_wire(local.detach()).clone()
        record(self, "broadcast", axis, 0 if self.coords[axis] == source else wire.nbytes, Note("broadcast"))
        with self._naming("broadcast", axis):
            dist.broadcast(wire, group=self.group(axis), group_src=source)
        return _from_wire(wire, local.dtype, local.shape)

    def scatter(self, parts: Sequence[torch.Tensor], axis: int, source: int) -> torch.Tensor:
        """My part of what the coordinate `source` cut; all parts are given everywhere, for their shapes."""
        me = self.coords[axis]
        longest = max(part.numel() for part in parts) * _width(parts[0].dtype)
        wires = [torch.nn.functional.pad(w, (0, longest - w.numel())) for w in map(_as_wire, parts)]
        out = torch.empty_like(wires[me])
        record(self, "scatter", axis, 0 if me == source else parts[me].nbytes, Note("distribute_tensor"))
        with self._naming("scatter", axis):
            dist.scatter(out, wires if me == source else None, group=self.group(axis), group_src=source)
        mine = parts[me]
        return _from_wire(out[: mine.numel() * _width(mine.dtype)], mine.dtype, mine.shape)

    def group(self, axis: int) -> Any:
        return self._device_mesh.get_group(axis)

    @contextmanager
    def _naming(self, kind: str, axis: int) -> Iterator[None]:
        """A failure inside says which collective on which axis it was."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"{kind} on mesh axis {self.axis_names[axis]!r} ({self.shape[axis]} ranks) failed at coordinates "
                f"{self.coords}: {error}"
            ) from error

    def run(self, step: Step, local: torch.Tensor) -> torch.Tensor:
        packed = step.pack(local, self.coords)
        if step.kind != "local":
            with self._naming(step.kind, step.axis):
                packed = getattr(self, "_" + step.kind)(step, packed)
        return step.unpack(packed, self.coords)

    # -- the four exchanges ---------------------------------------------------------------------------------
    def _all_gather(self, step: Step, mine: torch.Tensor) -> list[torch.Tensor]:
        return self._gather(step.axis, mine, step.part_shapes(mine, self.coords))

    def _gather(self, axis: int, mine: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Everyone's tensor; uneven ones travel padded to the longest."""
        width = _width(mine.dtype)
        counts = [_numel(shape) * width for shape in shapes]
        longest = max(counts)
        wire = _as_wire(mine)
        if wire.numel() < longest:
            wire = torch.nn.functional.pad(wire, (0, longest - wire.numel()))
        out = wire.new_empty(longest * len(shapes))
        if longest:
            getattr(dist, ALL_GATHER)(out, wire, group=self.group(axis))
        rows = out.view(len(shapes), longest)
        return [_from_wire(rows[i, :n], mine.dtype, s) for i, (n, s) in enumerate(zip(counts, shapes, strict=True))]

    def _all_reduce(self, step: Step, mine: torch.Tensor) -> torch.Tensor:
        wire = _reducible(mine, step.reduce_op)
        if wire is None:  # no backend reduces this: gather the parts and reduce here
            everyone = self._gather(step.axis, mine, [tuple(mine.shape)] * self.shape[step.axis])
            return reduce_parts(everyone, step.reduce_op)
        ordered = mine.is_floating_point() and step.reduce_op in ("max", "min")
        wire = _ordered(wire, step.reduce_op) if ordered else wire.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(wire, op=_REDUCE[step.reduce_op], group=self.group(step.axis))
        if ordered:
            return _unordered(wire, step.reduce_op).to(mine.dtype)
        return torch.view_as_complex(wire) if mine.is_complex() else wire

    def _reduce_scatter(self, step: Step, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        mine = parts[self.coords[step.axis]]
        group = self.group(step.axis)
        even = all(part.shape == mine.shape for part in parts)
        if even and mine.dtype in _WIRE and step.reduce_op in _REDUCE and dist.get_backend(group) == "nccl":
            out = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
            send = torch.cat([_as_wire(part) for part in parts])
            getattr(dist, REDUCE_SCATTER)(out.view(-1), send, op=_REDUCE[step.reduce_op], group=group)
            return out
        return reduce_parts(self._all_to_all(step, parts), step.reduce_op)

    def _all_to_all(self, step: Step, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shapes = step.part_shapes(parts, self.coords)
        dtype = parts[0].dtype
        wires = [_as_wire(part) for part in parts]
        counts = [_numel(shape) * _width(dtype) for shape in shapes]
        send = torch.cat(wires)
        out = send.new_empty(sum(counts))
        dist.all_to_all_single(out, send, counts, [w.numel() for w in wires], group=self.group(step.axis))
        return [_from_wire(w, dtype, s) for w, s in zip(out.split(counts), shapes, strict=True)]


def _numel(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _width(dtype: torch.dtype) -> int:
    """How many wire elements one element takes (bytes for a dtype that no backend carries)."""
    return 1 if dtype in _WIRE else dtype.itemsize


def _as_wire(x: torch.Tensor) -> torch.Tensor:
    """A flat tensor of a dtype every backend carries."""
    flat = x.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() <= 1:  # contiguous whatever its stride says, but a view of another dtype asks for 1
        flat = flat.as_strided(flat.shape, (1,))
    return flat if x.dtype in _WIRE else flat.view(torch.uint8)


def _from_wire(wire: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if not wire.numel():  # nothing, at an offset that a view of another dtype may refuse
        return wire.new_empty(shape, dtype=dtype)
    return (wire if wire.dtype == dtype else wire.contiguous().view(dtype)).view(shape)


def _reducible(x: torch.Tensor, op: str) -> torch.Tensor | None:
    """`x` as something the backend reduces natively, or None."""
    if op not in _REDUCE:
        return None
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj()) if op == "sum" else None
    return x if x.dtype in _WIRE else None


def _ordered(x: torch.Tensor, op: str) -> torch.Tensor:
    """Floats as integers of the same order, with NaN the winner of the reduction: backends lose NaNs in max and min."""
    x = x if x.dtype == torch.float64 else x.float()
    bits = x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    limits = torch.iinfo(bits.dtype)
    ints = torch.where(bits < 0, bits ^ limits.max, bits)
    return ints.masked_fill(x.isnan(), limits.max if op == "max" else limits.min)


def _unordered(ints: torch.Tensor, op: str) -> torch.Tensor:
    """The floats behind `_ordered`."""
    limits = torch.iinfo(ints.dtype)
    lost = ints == (limits.max if op == "max" else limits.min)
    bits = torch.where(ints < 0, ints ^ limits.max, ints)
    return bits.view(torch.float64 if ints.dtype == torch.int64 else torch.float32).masked_fill(lost, float("nan"))
