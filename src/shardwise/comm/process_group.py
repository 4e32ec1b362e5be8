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
from shardwise.comm.peers import sign_in, who_is_lost
from shardwise.comm.record import Note, record
from shardwise.comm.simulation import reduce_parts
from shardwise.comm.swap import start_swap, world_of
from shardwise.comm.transfer import ALL_GATHER, Transfer
from shardwise.comm.wire import WIRE, as_wire, from_wire, numel, width
from shardwise.errors import CommError

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_MOST_DIMS = 16
_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


class ProcessGroupComm(Comm):
    """One rank of a torch DeviceMesh."""

    simulated = False

    def __init__(self, device_mesh: Any) -> None:
        coords = device_mesh.get_coordinate()
        self.shape = tuple(device_mesh.shape)
        self.coords: Coords = tuple(coords)
        names = device_mesh.mesh_dim_names or tuple(str(i) for i in range(len(self.shape)))
        self.axis_names = tuple(names)
        self._device_mesh = device_mesh
        self._groups: dict[tuple[int, ...], Any] = {}
        self._order: dict[tuple[int, ...], list[Coords]] = {}
        self._ranks: dict[Coords, int] = {}
        sign_in()

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
                    table = torch.stack(self._gather((axis,), table, [tuple(table.shape)] * self.shape[axis]))
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
        wire = as_wire(local.detach()).clone()
        record(self, "broadcast", axis, 0 if self.coords[axis] == source else wire.nbytes, Note("broadcast"))
        with self._naming("broadcast", axis):
            dist.broadcast(wire, group=self.group(axis), group_src=self._place(axis, source))
        return from_wire(wire, local.dtype, local.shape)

    def scatter(self, parts: Sequence[torch.Tensor], axis: int, source: int) -> torch.Tensor:
        """My part of what the coordinate `source` cut; all parts are given everywhere, for their shapes."""
        me = self.coords[axis]
        longest = max(part.numel() for part in parts) * width(parts[0].dtype)
        wires = [torch.nn.functional.pad(w, (0, longest - w.numel())) for w in map(as_wire, parts)]
        out = torch.empty_like(wires[me])
        record(self, "scatter", axis, 0 if me == source else parts[me].nbytes, Note("distribute_tensor"))
        with self._naming("scatter", axis):
            in_order = [wires[c[axis]] for c in self._peers((axis,))] if me == source else None
            dist.scatter(out, in_order, group=self.group(axis), group_src=self._place(axis, source))
        mine = parts[me]
        return from_wire(out[: mine.numel() * width(mine.dtype)], mine.dtype, mine.shape)

    def group(self, axes: int | Sequence[int]) -> Any:
        """The process group of the ranks along one axis, or along several if they are the world; else None."""
        key = (axes,) if isinstance(axes, int) else tuple(axes)
        if key not in self._groups:
            one = self._device_mesh.get_group(key[0])
            self._groups[key] = one if len(key) == 1 else world_of([*map(self._rank, self._everyone(key))], like=one)
        return self._groups[key]

    def _peers(self, axes: Sequence[int]) -> list[Coords]:
        """The coordinates of everyone along the axes, in the order of their ranks in the group."""
        key = tuple(axes)
        if key not in self._order:
            spots = {self._rank(c): c for c in self._everyone(key)}
            group = self.group(key)
            self._order[key] = [spots[r] for r in (dist.get_process_group_ranks(group) if group else sorted(spots))]
        return self._order[key]

    def _rank(self, coords: Coords) -> int:
        found = self._ranks.get(coords)
        if found is None:  # a DeviceMesh works its ranks out anew each time
            found = self._ranks[coords] = int(self._device_mesh.mesh[coords])
        return found

    def _place(self, axis: int, coord: int) -> int:
        """The rank in the axis's group of the one at a coordinate."""
        return [c[axis] for c in self._peers((axis,))].index(coord)

    def _everyone(self, axes: Sequence[int]) -> list[Coords]:
        ranges = [range(k) if a in axes else (self.coords[a],) for a, k in enumerate(self.shape)]
        return list(itertools.product(*ranges))

    @contextmanager
    def _naming(self, kind: str, axes: int | Sequence[int]) -> Iterator[None]:
        """A failure inside says which collective on which axes it was."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            key = (axes,) if isinstance(axes, int) else tuple(axes)
            names = "+".join(self.axis_names[a] for a in key)
            ranks = [self._rank(c) for c in self._everyone(key)]
            lost = who_is_lost(error, ranks)
            raise CommError(
                f"{kind} on mesh axis {names!r} ({len(ranks)} ranks) failed at coordinates {self.coords}{lost}: {error}"
            ) from error

    def run(self, step: Step, local: torch.Tensor) -> torch.Tensor:
        if step.kind == "local":
            if step.routed:
                return step.from_holders(self.coords, lambda coords: local, reduce_parts)  # type: ignore[attr-defined]
            return step.unpack(step.pack(local, self.coords), self.coords)
        if step.routed:
            return self.start(step, local)[1]()
        with self._naming(step.kind, step.axes):
            packed = getattr(self, "_" + step.kind)(step, step.pack(local, self.coords))
        return step.unpack(packed, self.coords)

    def can_start(self, step: Step, local: torch.Tensor) -> bool:
        """Whether a step can be begun without waiting for it."""
        native = step.kind == "all_reduce" and not self._is_ordered(step, local) and self.group(step.axes) is not None
        return step.routed or (native and _reducible(local, step.reduce_op) is not None)

    def start(
        self, step: Any, local: torch.Tensor, giving: bool = False
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """Begin a step: the tensor that will hold the result (`local` itself, if it is given away and can), and what
        waits until it does."""
        with self._naming(step.kind, step.axes):
            if step.routed:
                peers = self._peers(step.axes)
                transfer = Transfer(step, local, self.coords, peers, [*map(self._rank, peers)], self.group(step.axes))
                out, wait = transfer.out, transfer.finish
            else:
                out = step.pack(local, self.coords)
                if not (giving and out.is_contiguous()):
                    out = out.clone(memory_format=torch.contiguous_format)
                wire = torch.view_as_real(out) if out.is_complex() else out
                work = dist.all_reduce(wire, _REDUCE[step.reduce_op], group=self.group(step.axes), async_op=True)
                wait = work.wait

        def finish() -> torch.Tensor:
            with self._naming(step.kind, step.axes), torch.no_grad():
                wait()
            return out

        return out, finish

    def filled_later(self, step: Any, like: torch.Tensor) -> torch.Tensor:
        """Room for what the last step of a move will give."""
        layout = step.dst if hasattr(step, "dst") else step.layout
        return like.new_empty(layout.local_shape_at(self.coords))

    @staticmethod
    def _is_ordered(step: Step, local: torch.Tensor) -> bool:
        return local.is_floating_point() and step.reduce_op in ("max", "min")

    # -- packed steps ---------------------------------------------------------------------------------------
    def _all_gather(self, step: Step, mine: torch.Tensor) -> list[torch.Tensor]:
        return self._gather(step.axes, mine, step.part_shapes(mine, self.coords))

    def _gather(self, axes: Sequence[int], mine: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Everyone's tensor, in the order of coordinates; uneven ones travel padded to the longest."""
        counts = [numel(shape) * width(mine.dtype) for shape in shapes]
        longest = max(counts)
        wire = as_wire(mine)
        if wire.numel() < longest:
            wire = torch.nn.functional.pad(wire, (0, longest - wire.numel()))
        out = wire.new_empty(longest * len(shapes))
        if longest and self.group(axes) is None:
            return self._swap(axes, [mine] * len(shapes), shapes)
        if longest:
            getattr(dist, ALL_GATHER)(out, wire, group=self.group(axes))
        rows = out.view(len(shapes), longest)
        came = dict(zip(self._by_group(axes), rows, strict=True))
        return [from_wire(came[i][:n], mine.dtype, s) for i, (n, s) in enumerate(zip(counts, shapes, strict=True))]

    def _all_reduce(self, step: Step, mine: torch.Tensor) -> torch.Tensor:
        wire = _reducible(mine, step.reduce_op)
        if wire is None or self.group(step.axes) is None:
            return self._reduced_here(step, mine)
        ordered = self._is_ordered(step, mine)
        wire = _ordered(wire, step.reduce_op) if ordered else wire.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(wire, op=_REDUCE[step.reduce_op], group=self.group(step.axes))
        if ordered:
            return _unordered(wire, step.reduce_op).to(mine.dtype)
        return torch.view_as_complex(wire) if mine.is_complex() else wire

    def _reduced_here(self, step: Step, mine: torch.Tensor) -> torch.Tensor:
        """For what no backend reduces, and ranks without a group: everyone gets a share of all parts, reduces it and
        hands it to the others."""
        everyone = self._everyone(step.axes)
        shares = list(mine.reshape(-1).tensor_split(len(everyone)))
        own = tuple(shares[everyone.index(self.coords)].shape)
        share = reduce_parts(self._swap(step.axes, shares, [own] * len(everyone)), step.reduce_op)
        whole = self._swap(step.axes, [share] * len(everyone), [tuple(s.shape) for s in shares])
        return torch.cat(whole).view(mine.shape)

    def _all_to_all(self, step: Step, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._swap(step.axes, parts, step.part_shapes(parts, self.coords))

    def _swap(
        self, axes: Sequence[int], parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """A part for each rank along the axes, and what each of them has for this one; in the order of coordinates."""
        dtype = parts[0].dtype
        order = self._by_group(axes)
        wires = [as_wire(parts[i]) for i in order]
        counts = [numel(shapes[i]) * width(dtype) for i in order]
        send = torch.cat(wires)
        out = send.new_empty(sum(counts))
        ranks = [*map(self._rank, self._peers(axes))]
        start_swap(out, counts, send, [w.numel() for w in wires], ranks, self.group(axes)).wait()
        came = dict(zip(order, out.split(counts), strict=True))
        return [from_wire(came[i], dtype, shape) for i, shape in enumerate(shapes)]

    def _by_group(self, axes: Sequence[int]) -> list[int]:
        """For each rank of the group, in its order, its number in the order of coordinates."""
        number = {c: i for i, c in enumerate(self._everyone(axes))}
        return [number[c] for c in self._peers(axes)]


def _reducible(x: torch.Tensor, op: str) -> torch.Tensor | None:
    """`x` as something the backend reduces natively, or None."""
    if op not in _REDUCE:
        return None
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj()) if op == "sum" else None
    return x if x.dtype in WIRE else None


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
