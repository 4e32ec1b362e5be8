"""The ranks are processes (or threads): every exchange is a collective of torch.distributed on the axis's group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.base import Comm, Coords
from shardwise.comm.bridge import replaced
from shardwise.comm.calls import Group
from shardwise.comm.capturing import unwritten
from shardwise.comm.guard import Guard, Sent, crc, refuse_tracing
from shardwise.comm.messages import (
    ALL_GATHER,
    WIRE,
    Along,
    Work,
    as_wire,
    begun,
    clock_of,
    from_wire,
    numel,
    start_sends,
    start_swap,
    waited_for,
    width,
    world_of,
)
from shardwise.comm.record import Note, record
from shardwise.comm.reduction import REDUCTIONS, reduce_parts
from shardwise.comm.watch import sign_in
from shardwise.protocols import Structure
from shardwise.torch_private.tensors import tracing_mode, without_fake_mode

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_MOST_DIMS = 16
_PAIR_PIECE = 1 << 22  # bytes
_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


class PlainComm(Comm):
    """Base of the backends that have one rank, or none, in this process: a local value is a plain tensor."""

    simulated = False

    def values(self, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (local,)

    def structure(self, local: torch.Tensor) -> None:
        return None

    def assemble(self, structure: Structure, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return values[0]  # type: ignore[return-value]

    def pick(self, structure: Structure, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (local,)

    def first(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def adopt(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return local


class ProcessGroupComm(PlainComm):
    """One rank of a torch DeviceMesh."""

    def __init__(self, device_mesh: Any) -> None:
        coords = device_mesh.get_coordinate()
        self.shape = tuple(device_mesh.shape)
        self.coords: Coords = tuple(coords)
        names = device_mesh.mesh_dim_names or tuple(str(i) for i in range(len(self.shape)))
        self.axis_names = tuple(names)
        self._device_mesh = device_mesh
        self.device_type: str = device_mesh.device_type
        self._groups: dict[tuple[int, ...], Group] = {}
        self._alongs: dict[tuple[int, ...], Along] = {}
        self._ranks: dict[Coords, int] = {}
        self._places: dict[tuple[int, ...], tuple[Along, str, str]] = {}  # for guards
        sign_in()

    def coords_here(self) -> Sequence[Coords]:
        return (self.coords,)

    def per_rank(self, of: Callable[[Coords], Any]) -> Any:
        return of(self.coords)

    def bind(self, func: Callable[..., Any], axes: Sequence[int] = ()) -> Callable[..., Any]:
        return func

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def at(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local

    def all_kinds(self, local: torch.Tensor) -> dict[Coords, tuple[str, tuple[int, ...]]]:
        row = [_DTYPES.index(str(local.dtype)), local.ndim, *local.shape]
        with without_fake_mode(), unwritten():  # sizes are real where values are not
            rows = self._all_rows(row + [0] * (_MOST_DIMS + 2 - len(row)), local.device)
        grid = itertools.product(*(range(k) for k in self.shape))
        return {c: (_DTYPES[row[0]], tuple(row[2 : 2 + row[1]])) for c, row in zip(grid, rows, strict=True)}

    def _all_rows(self, row: list[int], device: torch.device) -> list[list[int]]:
        """The rows of integers of all ranks. With a fake group, all others have this rank's row."""
        if dist.get_backend(self.group(0)) == "fake":
            return [row] * math.prod(self.shape)
        table = torch.tensor(row, device=self._device_mesh.device_type if device.type == "meta" else device)
        for axis in reversed(range(len(self.shape))):
            if self.shape[axis] > 1:
                note = Note("from_local", "sizes")
                record(self, "all_gather", axis, (self.shape[axis] - 1) * table.nbytes, note)
                with self.guard("all_gather", (axis,), note) as guard:
                    guard.meet()
                    table = torch.stack(self._gather((axis,), table))
            else:
                table = table.unsqueeze(0)
        return table.view(-1, len(row)).tolist()

    def first_of_replicas(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        for axis in axes:
            if self.shape[axis] > 1:
                local = replaced(local, self.broadcast(local, axis, 0))
        return local

    def broadcast(self, local: torch.Tensor, axis: int, source: int) -> torch.Tensor:
        """What the coordinate `source` holds."""
        wire = as_wire(local.detach()).clone()
        note = Note("broadcast")
        record(self, "broadcast", axis, 0 if self.coords[axis] == source else wire.nbytes, note)
        what = Sent(f"{local.dtype} {tuple(local.shape)} from coordinate {source}")
        with self.guard("broadcast", (axis,), note, what) as guard:
            guard.meet()
            dist.broadcast(wire, group=self.group(axis), group_src=self._place(axis, source))
        return from_wire(wire, local.dtype, local.shape)

    def scatter(
        self,
        cut: Callable[[int], torch.Tensor],
        shapes: Sequence[tuple[int, ...]],
        axis: int,
        source: int,
        like: torch.Tensor,
    ) -> torch.Tensor:
        """Return this rank's part of what the coordinate `source` holds: a tensor of `shapes[i]` on coordinate i.

        Only the source calls `cut(i)` for the parts; every other rank allocates its own part only. `like` has the
        dtype and the device of all.
        """
        me, itemwidth = self.coords[axis], width(like.dtype)
        wire = as_wire(like.new_empty(max(map(math.prod, shapes))))
        parts = None
        if me == source:
            flat = (as_wire(cut(c[axis])) for c in self._peers((axis,)))
            parts = [x if len(x) == len(wire) else torch.nn.functional.pad(x, (0, len(wire) - len(x))) for x in flat]
        mine = math.prod(shapes[me])
        note = Note("distribute_tensor")
        record(self, "scatter", axis, 0 if me == source else mine * like.itemsize, note)
        what = Sent(f"{like.dtype} parts of {sorted(set(shapes))[:4]} from coordinate {source}")
        with self.guard("scatter", (axis,), note, what) as guard:
            guard.meet()
            dist.scatter(wire, parts, group=self.group(axis), group_src=self._place(axis, source))
        return from_wire(wire[: mine * itemwidth], like.dtype, shapes[me])

    def group(self, axes: int | Sequence[int]) -> Group:
        """The process group of the ranks along one axis, or along several if they are the world; else None."""
        key = (axes,) if isinstance(axes, int) else tuple(axes)
        if key not in self._groups:
            one = self._device_mesh.get_group(key[0])
            self._groups[key] = one if len(key) == 1 else world_of([*map(self._rank, self._everyone(key))], like=one)
        return self._groups[key]

    def along(self, axes: Sequence[int]) -> Along:
        """All ranks along the axes, in the order of the group."""
        key = tuple(axes)
        found = self._alongs.get(key)
        if found is None:
            spots = {self._rank(c): c for c in self._everyone(key)}
            group = self.group(key)
            ranks = tuple(dist.get_process_group_ranks(group) if group else sorted(spots))
            peers = tuple(spots[r] for r in ranks)
            backend = dist.get_backend(group or self.group(key[0]))
            in_order, digest = list(peers) == sorted(peers), crc(repr((peers, ranks)))
            found = self._alongs[key] = Along(
                peers, ranks, group, backend, in_order, clock_of(group, ranks), digest
            )
        return found

    def _peers(self, axes: Sequence[int]) -> tuple[Coords, ...]:
        return self.along(axes).peers

    def _rank(self, coords: Coords) -> int:
        found = self._ranks.get(coords)
        if found is None:  # a DeviceMesh computes its ranks anew each time
            with without_fake_mode(), unwritten():
                row = self._device_mesh.mesh.tolist()  # an index would be an op, which torch.fx would trace
            for c in coords:
                row = row[c]
            found = self._ranks[coords] = row
        return found

    def _place(self, axis: int, coord: int) -> int:
        """The rank in the axis's group of the one at a coordinate."""
        return [c[axis] for c in self._peers((axis,))].index(coord)

    def _everyone(self, axes: Sequence[int]) -> list[Coords]:
        ranges = [range(k) if a in axes else (self.coords[a],) for a, k in enumerate(self.shape)]
        return list(itertools.product(*ranges))

    def guard(self, kind: str, axes: Sequence[int], note: Note | None = None, what: Sent | None = None) -> Guard:
        """The guard that a collective on these axes runs inside of. Without a note, it is on behalf of the step that
        runs now."""
        key = tuple(axes)
        found = self._places.get(key)
        if found is None:
            names = "+".join(self.axis_names[a] for a in axes)
            if tracing_mode() is not None:  # while tracing, the participants are unknown
                refuse_tracing(kind, f"mesh axis {names!r}")
            along = self.along(axes)
            where = f"mesh axis {names!r} ({len(along.ranks)} ranks)"
            found = self._places[key] = along, where, f" at coordinates {self.coords}"
        along, where, at = found
        return Guard(along, kind, where, at, note, what)

    # -- collectives ----------------------------------------------------------------------------------------
    def each(
        self, func: Callable[[torch.Tensor, Coords], torch.Tensor], local: torch.Tensor, axes: Sequence[int]
    ) -> torch.Tensor:
        return func(local, self.coords)

    def stack(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        with self.guard("all_gather", axes) as guard:
            guard.meet()
            return torch.stack(self._gather(axes, local.contiguous()))

    def _gather(self, axes: Sequence[int], mine: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, all of one shape, in the order of coordinates."""
        everyone, shape = len(self._everyone(axes)), tuple(mine.shape)
        if self.group(axes) is None:
            return self._swap(axes, [mine] * everyone, [shape] * everyone)
        wire = as_wire(mine)
        out = wire.new_empty(everyone * wire.numel())
        if out.numel():
            getattr(dist, ALL_GATHER)(out, wire, group=self.group(axes))
        came = dict(zip(self._by_group(axes), out.view(everyone, wire.numel()), strict=True))
        return [from_wire(came[i], mine.dtype, shape) for i in range(everyone)]

    def all_reduce(self, local: torch.Tensor, axes: Sequence[int], reduce_op: str) -> torch.Tensor:
        with self.guard("all_reduce", axes) as guard:
            mine = local.contiguous()
            if self._is_pair(axes):
                out, wait, _ = self._start_pair(mine, axes, reduce_op)
                wait()
                return out
            wire = _reducible(mine, reduce_op)
            if wire is None or self.group(axes) is None:
                return self._reduced_here(mine, axes, reduce_op)
            ordered = _is_ordered(mine, reduce_op)
            wire = _ordered(wire, reduce_op) if ordered else wire.clone(memory_format=torch.contiguous_format)
            guard.meet()
            dist.all_reduce(wire, op=_REDUCE[reduce_op], group=self.group(axes))
            if ordered:
                return _unordered(wire, reduce_op).to(mine.dtype)
            return torch.view_as_complex(wire) if mine.is_complex() else wire

    def start_all_reduce(
        self, local: torch.Tensor, axes: Sequence[int], reduce_op: str, owned: bool
    ) -> tuple[torch.Tensor, Callable[[], Any]] | None:
        pair = self._is_pair(axes)
        native = not _is_ordered(local, reduce_op) and _reducible(local, reduce_op) is not None
        if not pair and (not native or self.group(axes) is None):
            return None
        guard, mine = self.guard("all_reduce", axes), local.contiguous()
        with guard:
            if pair:
                out, wait, works = self._start_pair(mine, axes, reduce_op)
            else:
                guard.meet()
                out = mine if owned else mine.clone(memory_format=torch.contiguous_format)
                wire = torch.view_as_real(out) if out.is_complex() else out
                work = dist.all_reduce(wire, _REDUCE[reduce_op], group=self.group(axes), async_op=True)
                wait, works = work.wait, [work]
        for work in works:
            begun(work)

        def finish() -> torch.Tensor:
            for work in works:
                waited_for(work)
            with guard, torch.no_grad():
                wait()
            return out

        return out, finish

    def _is_pair(self, axes: Sequence[int]) -> bool:
        """Whether the reduction is between two ranks on gloo. Then each sends the other all it has: as many bytes as in
        gloo's own all-reduce, but faster."""
        along = self.along(axes)
        return len(along.ranks) == 2 and along.group is not None and along.backend == "gloo"

    def _start_pair(
        self, mine: torch.Tensor, axes: Sequence[int], reduce_op: str
    ) -> tuple[torch.Tensor, Callable[[], Any], list[Work]]:
        """An all-reduce in pieces, so that one piece is reduced while the next one travels."""
        along, reduce = self.along(axes), REDUCTIONS[reduce_op]
        other = 1 - dist.get_rank(along.group)
        mine = mine.resolve_conj().resolve_neg().contiguous()
        out = torch.empty_like(mine)
        length = max(_PAIR_PIECE // out.element_size(), 1)
        pairs = list(zip(mine.view(-1).split(length), out.view(-1).split(length), strict=True))
        works: list[Work] = []
        for sent, came in pairs:
            works.append(start_sends([(other, as_wire(sent))], [(other, as_wire(came))], along))

        def wait() -> None:
            for work, (sent, came) in zip(works, pairs, strict=True):
                work.wait()
                reduce(came, sent, out=came)  # type: ignore[call-arg]

        return out, wait, works

    def _reduced_here(self, mine: torch.Tensor, axes: Sequence[int], reduce_op: str) -> torch.Tensor:
        """An all-reduce for dtypes and reductions that no backend has, and for ranks without a group: each rank gets
        its share of all parts, reduces it and sends it to the others."""
        everyone = self._everyone(axes)
        shares = list(mine.reshape(-1).tensor_split(len(everyone)))
        own = tuple(shares[everyone.index(self.coords)].shape)
        share = reduce_parts(self._swap(axes, shares, [own] * len(everyone)), reduce_op)
        whole = self._swap(axes, [share] * len(everyone), [tuple(s.shape) for s in shares])
        return torch.cat(whole).view(mine.shape)

    def _swap(
        self, axes: Sequence[int], parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """Send a part to each rank along the axes, and return what each of them sent to this one, in the order of
        coordinates."""
        dtype = parts[0].dtype
        order, along = self._by_group(axes), self.along(axes)
        wires = [as_wire(parts[i]) for i in order]
        counts = [numel(shapes[i]) * width(dtype) for i in order]
        send = torch.cat(wires)
        out = send.new_empty(sum(counts))
        start_swap(out, counts, send, [w.numel() for w in wires], along).wait()
        came = dict(zip(order, out.split(counts), strict=True))
        return [from_wire(came[i], dtype, shape) for i, shape in enumerate(shapes)]

    def _by_group(self, axes: Sequence[int]) -> list[int]:
        """For each rank of the group, in its order, its number in the order of coordinates."""
        number = {c: i for i, c in enumerate(self._everyone(axes))}
        return [number[c] for c in self._peers(axes)]


def _is_ordered(x: torch.Tensor, op: str) -> bool:
    """Whether the reduction runs on integers that have the same order as the values."""
    return x.is_floating_point() and op in ("max", "min")


def _reducible(x: torch.Tensor, op: str) -> torch.Tensor | None:
    """`x` in a form that the backend can reduce, or None."""
    if op not in _REDUCE:
        return None
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj()) if op == "sum" else None
    return x if x.dtype in WIRE else None


def _ordered(x: torch.Tensor, op: str) -> torch.Tensor:
    """Floats as integers of the same order, in which NaN wins the reduction: backends lose NaNs in max and min."""
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
