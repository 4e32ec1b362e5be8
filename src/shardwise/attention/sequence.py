"""Attention over sequences that are cut: queries stay where they are, keys and values come by.

Small keys and values are gathered; large ones travel round the ring of ranks, a rank attending to its neighbours' while
the next ones arrive, so that no rank ever holds more than a few shards. Either way the causal mask follows the global
indices, whatever set of them a rank holds. The backward pass sends keys and values round once more, their gradients
behind them; only the operands, the output and the log-sums are kept for it.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.attention.blocks import (
    Block,
    How,
    attend,
    attend_backward,
    attend_by_definition,
    finished,
    visible_blocks,
)
from shardwise.comm.base import Coords
from shardwise.comm.record import Note, for_backward, hearing, listeners, user_line
from shardwise.context import is_strict, refuse_in_program
from shardwise.errors import RuleError
from shardwise.layout import Layout, Placement
from shardwise.layout.layout import dense_stride, shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals
from shardwise.move import plan_steps, run_move, start_move
from shardwise.move.limit import current_cap, largest_bytes
from shardwise.strategy.program import wide
from shardwise.strategy.spec import Factors, Operand, fitting
from shardwise.wrapper import wrap

GATHER_UP_TO = 8 << 20  # bytes of whole keys and values on a rank: up to here one gather beats many messages
_state = threading.local()


class sequence_exchange:
    """Inside, cut keys and values are brought to the queries by "gather", by "ring", or, with "auto", by their size."""

    def __init__(self, way: str) -> None:
        if way not in ("auto", "gather", "ring"):
            raise RuleError(f"sequence_exchange: way must be 'auto', 'gather' or 'ring', got {way!r}")
        self.way = way

    def __enter__(self) -> sequence_exchange:
        self.outer, _state.way = current_way(), self.way
        return self

    def __exit__(self, *exc: Any) -> None:
        _state.way = self.outer


def current_way() -> str:
    return getattr(_state, "way", "auto")


def set_sequence_exchange(way: str) -> None:
    """The same from here on, in this thread."""
    _state.way = sequence_exchange(way).way


class CutAttention:
    """Attention of distributed q, k, v and maybe a mask; `factors` says how dims beside the sequences may be cut.

    Made once for a kind of call: it keeps what it planned."""

    def __init__(self, factors: Factors, how: How, causal: bool) -> None:
        self.factors, self.how, self.causal = factors, how, causal
        self._planned: dict[Any, AttentionWork] = {}

    def __call__(self, operands: Sequence[Any]) -> Any:
        """Under autocast it is one op of the lower precision."""
        device = operands[0].device.type
        if not torch.is_autocast_enabled(device):
            return self._attend(operands)
        dtype = torch.get_autocast_dtype(device)
        lowered = [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in operands]
        with torch.autocast(device, enabled=False):
            return self._attend(lowered)

    def _attend(self, operands: Sequence[Any]) -> Any:
        work = self.planned(tuple(x._layout for x in operands))
        note = Note("scaled_dot_product_attention")
        locals = [_brought(x, need, work.split, note) for x, need in zip(operands, work.inputs, strict=True)]
        if len(work.stations) > 1 and is_strict():
            refuse_in_program(note.op, work.inputs[1], "the other ranks, round the ring")
        return wrap(work(locals, note), work.output)

    def planned(self, layouts: tuple[Layout, ...]) -> AttentionWork:
        key = (layouts, current_way(), current_cap())
        if key not in self._planned:
            self._planned[key] = _plan(self.factors, self.how, self.causal, *key)
        return self._planned[key]


def along_cuts(q: Operand, k: Operand, v: Operand, mask: Any, is_causal: bool) -> bool:
    """Whether keys or values are cut along the sequence, or queries that a causal mask counts."""
    counted = [q, mask] if isinstance(mask, Operand) and mask.ndim > 1 else [q]
    return any(op.layout.is_cut(op.ndim - 2) for op in ((k, v, *counted) if is_causal else (k, v)))


def keys_alone_are_cut(q: Layout, k: Layout, v: Layout) -> bool:
    """Whether a few queries, whole where keys and values are cut, had better ask every rank for its part of the answer:
    less travels than keys and values would, and the scores take no more memory than those."""
    axes = [axis for axis in k.axes_of(k.ndim - 2) if k.mesh.shape[axis] > 1]
    if not axes or not all(q.placements[a].is_replicate() and v.placements[a].is_shard(v.ndim - 2) for a in axes):
        return False
    queries, keys, width = q.shape[-2], k.shape[-2], k.shape[-1] + v.shape[-1]
    ranks = math.prod(k.mesh.shape[a] for a in axes)
    return 2 * queries * (2 + v.shape[-1]) <= keys * width and queries <= ranks * width


def _brought(x: Any, need: Layout, split: tuple[int, ...], note: Note) -> Any:
    """The local value of an operand as the work needs it, spread where the ranks do different work with it."""
    steps = plan_steps(x._layout, need, tuple(a for a in split if need.placements[a].is_replicate()))
    if is_strict() and any(step.kind != "local" for step in steps):
        refuse_in_program(note.op, x._layout, f"[{', '.join(map(str, need.placements))}]")
    return run_move(x._local, x._layout.mesh.comm, steps, note)


def _plan(
    factors: Factors, how: How, causal: bool, layouts: tuple[Layout, ...], way: str, cap: int | None
) -> AttentionWork:
    """Where the operands must be, and whether keys travel. The dims beside the sequences are planned as for any op."""
    operands = [Operand(layout, i) for i, layout in enumerate(layouts)]
    chosen = factors.assign(operands, (), False)
    assert chosen is not None  # there is always the way of computing it all on each rank
    q, k, v = layouts[:3]
    rows, keys = q.ndim - 2, k.ndim - 2
    whole = [layout.replace(placements=p) for layout, p in zip(layouts, chosen.inputs, strict=True)]
    ring = tuple(
        axis
        for axis, place in enumerate(chosen.inputs[0])
        if place.is_shard(rows) and k.placements[axis].is_shard(keys) and q.mesh.shape[axis] > 1
    )
    shape = _output_shape(q, k, v, how)
    output = q.replace(
        placements=chosen.outputs[0], shape=shape,
        stride=dense_stride(shape, q.stride) if q.ndim == len(shape) else None,
    )  # fmt: skip
    if ring and not _gathers(way, cap, whole[1:3]):
        k_cut = _cut_on(whole[1], k, ring)
        whole[1] = k_cut
        whole[2] = _cut_on(whole[2], k_cut, ring)
    else:
        ring = ()
    return AttentionWork(how, causal, whole, output, ring)


def _output_shape(q: Layout, k: Layout, v: Layout, how: How) -> tuple[int, ...]:
    kept = 3 if how.grouped else 2
    batch = torch.broadcast_shapes(*(x.shape[: x.ndim - kept] for x in (q, k, v)))
    return (*batch, *q.shape[q.ndim - kept : -1], v.shape[-1])


def _gathers(way: str, cap: int | None, whole: Sequence[Layout]) -> bool:
    needed = sum(map(largest_bytes, whole))
    if way == "auto":
        return needed <= (GATHER_UP_TO if cap is None else min(cap, GATHER_UP_TO))
    return way == "gather"


def _cut_on(whole: Layout, like: Layout, axes: Sequence[int]) -> Layout:
    """`whole` with its sequence cut on these axes the way that of `like` is."""
    places: list[Placement] = []
    for axis, place in enumerate(whole.placements):
        if axis in axes:
            before = [p.at(like.ndim - 2) if p.is_shard(whole.ndim - 2) else p for p in places]  # type: ignore[attr-defined]
            place = fitting(like, axis, like.placements[axis], before).at(whole.ndim - 2)  # type: ignore[arg-type]
        places.append(place)
    return whole.replace(placements=places)


class AttentionWork:
    """One planned call: layouts of q, k, v and maybe a mask as the work needs them, and the stations of the ring.

    At station t a rank has the keys and values of the one t places before it on the `ring` axes."""

    def __init__(self, how: How, causal: bool, inputs: Sequence[Layout], output: Layout, ring: tuple[int, ...]) -> None:
        self.how, self.causal, self.inputs, self.output, self.ring = how, causal, tuple(inputs), output, ring
        self.mesh, self.comm = output.mesh, output.mesh.comm
        self.split = tuple(
            axis
            for axis in range(len(self.mesh.shape))
            if any(not layout.placements[axis].is_replicate() for layout in (*inputs, output))
        )
        q, k, v = self.inputs[:3]
        ranks = math.prod(self.mesh.shape[a] for a in ring)
        together = (
            k.placements == v.placements
            and k.shape[:-1] == v.shape[:-1]
            and not any(x.axes_of(x.ndim - 1) for x in (k, v))
        )
        # what travels: keys and values side by side, in one message, where they are cut alike
        self.travelling = [k.replace(shape=(*k.shape[:-1], k.shape[-1] + v.shape[-1]))] if together else [k, v]
        self.stations = [[_rotated(x, ring, t) for x in self.travelling] for t in range(ranks)]
        self.blocks = [self.comm.per_rank(functools.partial(self._blocks, station)) for station in self.stations]

    def _blocks(self, station: Sequence[Layout], coords: Coords) -> tuple[Block, ...]:
        q = self.inputs[0]
        rows, keys = q.held(q.ndim - 2, coords), station[0].held(station[0].ndim - 2, coords)
        return visible_blocks(rows, keys, self.causal, by_piece=len(self.inputs) > 3)

    def _rows(self, coords: Coords) -> Intervals:
        return self.inputs[0].held(self.inputs[0].ndim - 2, coords)

    def __call__(self, locals: Sequence[Any], note: Note) -> Any:
        """The local value of the output, recorded by autograd as one node."""
        values = [self.comm.values(local) for local in locals]
        flat = [value for some in values for value in some]
        if not (torch.is_grad_enabled() and any(value.requires_grad for value in flat)):
            return self.forward(locals, note)[0]
        if self.comm.simulated:
            for local in locals:
                local.used = True
        box: list[Any] = [self, locals, note]
        outs = _Attention.apply(box, *flat)
        return self.comm.assemble(box[-1], outs)

    # -- there ----------------------------------------------------------------------------------------------
    def forward(self, locals: Sequence[Any], note: Note) -> tuple[Any, Any]:
        """The output and its log-sums, outside of autograd."""
        q, k, v, mask = (*locals, None)[:4]
        so_far = None
        with torch.no_grad():
            came = self._packed(k, v)
            for t, blocks in enumerate(self.blocks):
                coming, wait = self._sent_on(came, t, note) if t + 1 < len(self.blocks) else (came, _nothing)
                so_far = self._bound(attend)(q, *self._taken(came), mask, so_far, self.how, blocks)
                wait()
                came = coming
            out, lse = so_far  # type: ignore[misc]
            return self._bound(finished)(out, lse, self.inputs[0].dtype), lse

    def _bound(self, func: Any) -> Any:
        return self.comm.bind(func, self.split)

    def _packed(self, k: Any, v: Any) -> list[Any]:
        if len(self.stations) == 1 or len(self.travelling) == 2:
            return [k, v]
        return [self._bound(_side_by_side)(k, v)]

    def _taken(self, came: Sequence[Any]) -> Sequence[Any]:
        if len(came) == 2:
            return came
        return self._bound(_apart)(came[0], self.inputs[1].shape[-1])

    def _sent_on(self, locals: Sequence[Any], t: int, note: Note, dtype: Any = None) -> tuple[list[Any], Any]:
        """What is at station t, on its way to the next; after the last one it is home."""
        here, there = self.stations[t], self.stations[(t + 1) % len(self.stations)]
        started = [
            start_move(local, _as(a, dtype), _as(b, dtype), note)
            for local, a, b in zip(locals, here, there, strict=True)
        ]
        return [local for local, _ in started], lambda: [wait() for _, wait in started]

    # -- and back -------------------------------------------------------------------------------------------
    def backward(self, grad: Any, locals: Sequence[Any], out: Any, lse: Any, note: Note) -> list[Any]:
        """The gradients of the operands. Those of keys and values follow them round the ring, adding up."""
        q, k, v, mask = (*locals, None)[:4]
        came, behind = self._packed(k, v), None
        so_far, wait_behind = None, _nothing
        for t, blocks in enumerate(self.blocks):
            coming, wait = self._sent_on(came, t, note) if t + 1 < len(self.blocks) else (came, _nothing)
            here = self._taken(came)
            dq, dmask, dk, dv = self._bound(attend_backward)(grad, q, *here, mask, out, lse, so_far, self.how, blocks)
            so_far = (dq, dmask)
            more = self._packed(dk, dv)
            wait_behind()
            behind = more if behind is None else [self._bound(torch.add)(a, b) for a, b in zip(behind, more)]
            if len(self.blocks) > 1:
                behind, wait_behind = self._sent_on(behind, t, note, wide(self.inputs[1].dtype))
            wait()
            came = coming
        wait_behind()
        dk, dv = self._taken(behind)  # type: ignore[arg-type]
        like = zip((dq, dk, dv), self.inputs, strict=False)
        return [*(self._bound(torch.Tensor.to)(g, layout.dtype) for g, layout in like), dmask][: len(locals)]

    def again(self, locals: Sequence[Any], note: Note) -> Any:
        """The same output in differentiable parts, for derivatives of the derivative: keys and values gathered."""
        q, k, v, mask = (*locals, None)[:4]
        for i, local in ((1, k), (2, v)):
            cut = self.inputs[i]
            whole = cut.replace(placements=[REPLICATE if a in self.ring else p for a, p in enumerate(cut.placements)])
            gathered = run_move(local, self.comm, plan_steps(cut, whole, self.ring), note)
            k, v = (gathered, v) if i == 1 else (k, gathered)
        rows = self.comm.per_rank(self._rows)
        return self._bound(attend_by_definition)(q, k, v, mask, self.how, self.causal, rows)


def _as(layout: Layout, dtype: Any) -> Layout:
    return layout if dtype is None else layout.replace(dtype=dtype)


def _rotated(layout: Layout, axes: tuple[int, ...], by: int) -> Layout:
    """The layout in which every rank holds of the sequence what the one `by` places before it on the axes holds."""
    if not by:
        return layout
    dim, sizes = layout.ndim - 2, [layout.mesh.shape[a] for a in axes]
    total = math.prod(sizes)

    def held(spot: tuple[int, ...]) -> Intervals:
        number = 0
        for c, size in zip(spot, sizes, strict=True):
            number = number * size + c
        number, coords = (number - by) % total, [0] * len(layout.placements)
        for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
            number, coords[axis] = divmod(number, size)
        return layout.held(dim, coords)

    places = list(layout.placements)
    for axis, shard in zip(axes, shards_from_table(sizes, layout.shape[dim], held, dim), strict=True):
        places[axis] = shard
    return layout.replace(placements=places)


def _side_by_side(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k, v], -1)


def _apart(both: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return both[..., :keys], both[..., keys:]


def _nothing() -> None:
    return None


class _Attention(torch.autograd.Function):
    """Inputs and outputs are the distinct plain tensors of the local values of the operands and of the output."""

    @staticmethod
    def forward(ctx: Any, box: list[Any], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        work, locals, note = box
        comm = work.comm
        out, lse = work.forward(locals, note)
        ctx.work, ctx.heard = work, listeners()
        ctx.note = for_backward(note, user_line() if ctx.heard else None)
        ctx.structures = [comm.structure(local) for local in (*locals, out, lse)]
        ctx.counts = [len(comm.values(local)) for local in (*locals, out, lse)]
        outs = comm.values(out)
        ctx.save_for_backward(*values, *outs, *comm.values(lse))
        box.append(ctx.structures[-2])
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        work, comm, saved = ctx.work, ctx.work.comm, iter(ctx.saved_tensors)
        values = [[next(saved) for _ in range(count)] for count in ctx.counts]
        *locals, out, lse = map(comm.assemble, ctx.structures, values)
        if torch.is_grad_enabled():
            return None, *_differentiably(ctx, work, locals, values, grads)
        with hearing(ctx.heard):
            back = work.backward(comm.assemble(ctx.structures[-2], grads), locals, out, lse, ctx.note)
        found: list[Any] = []
        for structure, count, gradient in zip(ctx.structures, ctx.counts, back, strict=False):
            found += [None] * count if gradient is None else comm.pick(structure, gradient)
        return None, *found


def _differentiably(ctx: Any, work: AttentionWork, locals: Any, values: Any, grads: Any) -> list[Any]:
    """The gradients as functions of operands and incoming gradients: the output is made again, in parts."""
    with hearing(ctx.heard):
        out = work.again(locals, ctx.note)
        outs = work.comm.pick(ctx.structures[-2], out)
        flat = [value for some in values[:-2] for value in some]
        wanted = [value for value in flat if value.requires_grad]
        found = iter(torch.autograd.grad(outs, wanted, grads, create_graph=True, materialize_grads=True))
    return [next(found) if value.requires_grad else None for value in flat]
