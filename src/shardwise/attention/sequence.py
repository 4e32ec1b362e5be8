"""Attention over sequences that are cut: where the operands must be, and whether keys and values travel.

Queries stay where they are. Small keys and values are gathered; large ones travel from rank to rank round a ring
(`ring`), so that no rank ever holds more than a few shards. Either way the causal mask follows the global indices,
whatever set of them a rank holds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.attention.blocks import How, output_shape
from shardwise.attention.ring import RingAttention
from shardwise.comm.record import Note
from shardwise.context import is_strict, refuse_in_program
from shardwise.errors import RuleError
from shardwise.layout import Layout, Placement, contiguous_stride
from shardwise.layout.local_sizes import largest_bytes
from shardwise.move import plan_steps, run_move
from shardwise.move.limit import current_cap
from shardwise.strategy.memory import copied_stride
from shardwise.strategy.spec import Factors, Operand, fitting
from shardwise.wrapper import Wrapper, wrap

GATHER_UP_TO = 8 << 20  # bytes of whole keys and values on a rank: up to here one gather beats many messages
_Key = tuple[tuple[Layout, ...], str, int | None]  # layouts of the operands, way of the exchange, memory cap
_state = threading.local()


class sequence_exchange:
    """A context manager: inside, cut keys and values are brought to the queries in this way.

    Args:
        way: "gather" (all at once), "ring" (from rank to rank, round a ring) or "auto" (by their size).

    Raises:
        RuleError: `way` is none of these.
    """

    def __init__(self, way: str) -> None:
        if way not in ("auto", "gather", "ring"):
            raise RuleError(f"sequence_exchange: way must be 'auto', 'gather' or 'ring', got {way!r}")
        self.way = way

    def __enter__(self) -> sequence_exchange:
        self.outer, _state.way = current_way(), self.way
        return self

    def __exit__(self, *exc: object) -> None:
        _state.way = self.outer


def current_way() -> str:
    return getattr(_state, "way", "auto")


def set_sequence_exchange(way: str) -> None:
    _state.way = sequence_exchange(way).way


class CutAttention:
    """Attention of distributed q, k, v and maybe a mask. Made once for a kind of call: it keeps what it planned.

    `factors` says how dims beside the sequences may be cut; where `causal`, a query sees the keys up to its own."""

    def __init__(self, factors: Factors, how: How, causal: bool) -> None:
        self.factors, self.how, self.causal = factors, how, causal
        self._planned: dict[_Key, RingAttention] = {}

    def __call__(self, operands: Sequence[Wrapper]) -> Wrapper:
        """The result, laid out as the queries are. Under autocast it is one op of the lower precision."""
        device = operands[0].device.type
        if not torch.is_autocast_enabled(device):
            return self._attend(operands)
        dtype = torch.get_autocast_dtype(device)
        is_lowered = lambda x: x.is_floating_point() and x.dtype != torch.float64
        lowered: list[Any] = [x.to(dtype) if is_lowered(x) else x for x in operands]
        with torch.autocast(device, enabled=False):
            return self._attend(lowered)

    def _attend(self, operands: Sequence[Wrapper]) -> Wrapper:
        key = (tuple(x._layout for x in operands), current_way(), current_cap())
        if key not in self._planned:
            self._planned[key] = _plan(self.factors, self.how, self.causal, *key)
        work = self._planned[key]
        note = Note("scaled_dot_product_attention")
        local_values = [_moved(x, need, work.split, note) for x, need in zip(operands, work.inputs, strict=True)]
        if len(work.layouts_by_step) > 1 and is_strict():
            refuse_in_program(note.op, work.inputs[1], "the other ranks, round the ring")
        return wrap(work(local_values, note), work.output)


def along_cuts(q: Operand, k: Operand, v: Operand, mask: object, is_causal: bool) -> bool:
    """Whether the sequence of keys or values is cut, or, under a causal mask, that of queries or mask."""
    counted = [q, mask] if isinstance(mask, Operand) and mask.ndim > 1 else [q]
    return any(op.layout.is_cut(op.ndim - 2) for op in ((k, v, *counted) if is_causal else (k, v)))


def keys_alone_are_cut(q: Layout, k: Layout, v: Layout) -> bool:
    """Whether no keys and values should move, because few queries are whole where these are cut: less travels if every
    rank answers for its own, and the scores take no more memory than the keys and values would."""
    axes = [axis for axis in k.axes_of(k.ndim - 2) if k.mesh.shape[axis] > 1]
    if not axes or not all(q.placements[a].is_replicate() and v.placements[a].is_shard(v.ndim - 2) for a in axes):
        return False
    queries, keys, width = q.shape[-2], k.shape[-2], k.shape[-1] + v.shape[-1]
    ranks = math.prod(k.mesh.shape[a] for a in axes)
    return 2 * queries * (2 + v.shape[-1]) <= keys * width and queries <= ranks * width


def _moved(x: Wrapper, need: Layout, split: tuple[int, ...], note: Note) -> torch.Tensor:
    """The local value of an operand as the call needs it, spread where the ranks do different things with it."""
    steps = plan_steps(x._layout, need, tuple(a for a in split if need.placements[a].is_replicate()))
    if is_strict() and any(step.kind != "local" for step in steps):
        refuse_in_program(note.op, x._layout, f"[{', '.join(map(str, need.placements))}]")
    return run_move(x._local, x._layout.mesh.comm, steps, note)


def _plan(
    factors: Factors, how: How, causal: bool, layouts: tuple[Layout, ...], way: str, cap: int | None
) -> RingAttention:
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
    shape = output_shape(q.shape, k.shape, v.shape, how)
    output = q.replace(placements=chosen.outputs[0], shape=shape, stride=output_stride(shape, q, k, v))
    if way == "auto":
        most = GATHER_UP_TO if cap is None else min(cap, GATHER_UP_TO)
        way = "gather" if sum(map(largest_bytes, whole[1:3])) <= most else "ring"
    if not ring or way == "gather":
        return RingAttention(how, causal, whole, output, ())
    whole[1] = _cut_on(whole[1], k, ring)
    whole[2] = _cut_on(whole[2], whole[1], ring)
    return RingAttention(how, causal, whole, output, ring)


def output_stride(shape: tuple[int, ...], q: Layout, k: Layout, v: Layout) -> tuple[int, ...]:
    """The strides that torch gives the result: those of a tensor like the queries where a fused kernel computes it."""
    is_fused = len(shape) == q.ndim == k.ndim == v.ndim == 4 and all(t.stride[-1] == 1 for t in (q, k, v))
    if not is_fused or shape != q.shape or 0 in k.shape:
        return contiguous_stride(shape)
    return copied_stride(shape, q.stride)


def _cut_on(whole: Layout, like: Layout, axes: Sequence[int]) -> Layout:
    """`whole` with its sequence cut on these axes the way that of `like` is."""
    places: list[Placement] = []
    for axis, place in enumerate(whole.placements):
        if axis in axes:
            before = [p.at(like.ndim - 2) if p.is_shard(whole.ndim - 2) else p for p in places]  # type: ignore[attr-defined]
            place = fitting(like, axis, like.placements[axis], before).at(whole.ndim - 2)  # type: ignore[arg-type]
        places.append(place)
    return whole.replace(placements=places)
