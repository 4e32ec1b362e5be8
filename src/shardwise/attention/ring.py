"""Attention in which keys and values travel from rank to rank, and queries stay.

A rank attends to the keys it has while the next ones arrive. The backward pass sends keys and values round once more,
their gradients behind them; only the operands, the output and the log-sums are kept for it.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from shardwise.attention.blocks import (
    Block,
    How,
    attend,
    attend_backward,
    attend_by_definition,
    visible_blocks,
)
from shardwise.comm.base import Coords
from shardwise.comm.record import Note, for_backward, recorders, recording_to, user_line
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals
from shardwise.move import plan_steps, run_move, start_move
from shardwise.protocols import Ctx
from shardwise.sizes import coords_on, cut_as_held
from shardwise.strategy.program import sum_dtype
from shardwise.torch_private.autograd import is_transforming

Local = torch.Tensor  # a local value: of one rank on processes, of all ranks in simulation
Wait = Callable[[], object]


class RingAttention:
    """One planned call. `inputs` are the layouts of q, k, v and maybe a mask, as it needs them.

    Along the mesh axes `ring` keys and values travel; there are none where every rank has all it needs. After t steps
    a rank has the keys and values of the rank t places before it."""

    def __init__(self, how: How, causal: bool, inputs: Sequence[Layout], output: Layout, ring: tuple[int, ...]) -> None:
        self.how, self.causal, self.inputs, self.output, self.ring = how, causal, tuple(inputs), output, ring
        self.mesh, self.comm = output.mesh, output.mesh.comm
        by_axis = enumerate(zip(*(layout.placements for layout in (*inputs, output)), strict=True))
        self.split = tuple(axis for axis, places in by_axis if not all(p.is_replicate() for p in places))
        q, k, v = self.inputs[:3]
        ranks = math.prod(self.mesh.shape[a] for a in ring)
        are_alike = (
            k.placements == v.placements
            and k.shape[:-1] == v.shape[:-1]
            and not any(x.axes_of(x.ndim - 1) for x in (k, v))
        )
        # what travels: keys and values side by side, in one message, where they are cut alike
        self.travelling = [k.replace(shape=(*k.shape[:-1], k.shape[-1] + v.shape[-1]))] if are_alike else [k, v]
        self.layouts_by_step = [[_rotated(x, ring, t) for x in self.travelling] for t in range(ranks)]
        blocks = [functools.partial(self._blocks, layouts) for layouts in self.layouts_by_step]
        self.blocks_by_step = [self.comm.per_rank(of_rank) for of_rank in blocks]

    def _blocks(self, layouts: Sequence[Layout], coords: Coords) -> tuple[Block, ...]:
        keys = layouts[0].held(layouts[0].ndim - 2, coords)
        return visible_blocks(self._rows(coords), keys, self.causal, by_piece=len(self.inputs) > 3)

    def _rows(self, coords: Coords) -> Intervals:
        return self.inputs[0].held(self.inputs[0].ndim - 2, coords)

    def __call__(self, operands: Sequence[Local], note: Note) -> Local:
        """The local value of the output, recorded by autograd as one node."""
        if is_transforming():  # any derivative may be wanted
            return self.by_definition(operands, note)
        flat = [value for local in operands for value in self.comm.values(local)]
        if not (torch.is_grad_enabled() and any(value.requires_grad for value in flat)):
            return self.forward(operands, note)[0]
        box: list[Any] = [self, operands, note]
        outs = _Attention.apply(box, *flat)
        return self.comm.assemble(box[-1], outs)

    def _bound(self, func: Callable[..., Any]) -> Callable[..., Any]:
        return self.comm.bind(func, self.split)

    # -- keys and values on their way -----------------------------------------------------------------------
    def _packed(self, k: Local, v: Local) -> list[Local]:
        if len(self.layouts_by_step) == 1 or len(self.travelling) == 2:
            return [k, v]
        return [self._bound(lambda k, v: torch.cat([k, v], -1))(k, v)]

    def _unpacked(self, here: Sequence[Local]) -> Sequence[Local]:
        keys = self.inputs[1].shape[-1]
        return here if len(here) == 2 else self._bound(lambda both: (both[..., :keys], both[..., keys:]))(here[0])

    def _start_step(
        self, here: Sequence[Local], t: int, note: Note, dtype: torch.dtype | None = None
    ) -> tuple[list[Local], Wait]:
        """Begin to send what a rank has after t steps to the next one; after the last step it is where it began."""
        before, after = self.layouts_by_step[t], self.layouts_by_step[(t + 1) % len(self.layouts_by_step)]
        if dtype is not None:
            before, after = ([layout.replace(dtype=dtype) for layout in some] for some in (before, after))
        started = [start_move(local, a, b, note) for local, a, b in zip(here, before, after, strict=True)]
        return [local for local, _ in started], lambda: [wait() for _, wait in started]

    def _start_next(self, here: list[Local], t: int, note: Note) -> tuple[list[Local], Wait]:
        """The same for keys and values, which need not come back where they began."""
        return self._start_step(here, t, note) if t + 1 < len(self.blocks_by_step) else (here, _wait_for_nothing)

    # -- forward --------------------------------------------------------------------------------------------
    def forward(self, operands: Sequence[Local], note: Note) -> tuple[Local, Local]:
        """The output and its log-sums, outside of autograd."""
        (q, k, v), mask = operands[:3], operands[3] if len(operands) > 3 else None
        so_far = None
        with torch.no_grad():
            here = self._packed(k, v)
            for t, blocks in enumerate(self.blocks_by_step):
                following, wait = self._start_next(here, t, note)
                so_far = self._bound(attend)(q, *self._unpacked(here), mask, so_far, self.how, blocks)
                wait()
                here = following
            out, lse = so_far  # type: ignore[misc]
            return self._bound(torch.Tensor.to)(out, self.inputs[0].dtype), lse

    # -- backward -------------------------------------------------------------------------------------------
    def backward(
        self, grad: Local, operands: Sequence[Local], out: Local, lse: Local, note: Note
    ) -> list[Local | None]:
        """The gradients of the operands. Those of keys and values follow them round the ring, adding up."""
        (q, k, v), mask = operands[:3], operands[3] if len(operands) > 3 else None
        here: list[Local] = self._packed(k, v)
        behind: list[Local] | None = None
        so_far, wait_behind = None, cast(Wait, _wait_for_nothing)
        for t, blocks in enumerate(self.blocks_by_step):
            following, wait = self._start_next(here, t, note)
            kv = self._unpacked(here)
            dq, dmask, dk, dv = self._bound(attend_backward)(grad, q, *kv, mask, out, lse, so_far, self.how, blocks)
            so_far = (dq, dmask)
            more = self._packed(dk, dv)
            wait_behind()
            behind = more if behind is None else [self._bound(torch.add)(a, b) for a, b in zip(behind, more)]
            if len(self.blocks_by_step) > 1:
                behind, wait_behind = self._start_step(behind, t, note, sum_dtype(self.inputs[1].dtype))
            wait()
            here = following
        wait_behind()
        dk, dv = self._unpacked(behind)  # type: ignore[arg-type]
        like = zip((dq, dk, dv), self.inputs, strict=False)
        return [*(self._bound(torch.Tensor.to)(g, layout.dtype) for g, layout in like), dmask][: len(operands)]

    def by_definition(self, operands: Sequence[Local], note: Note) -> Local:
        """The same output in differentiable parts, for derivatives of the derivative: keys and values gathered."""
        (q, k, v), mask = operands[:3], operands[3] if len(operands) > 3 else None
        whole = []
        for local, cut in zip((k, v), self.inputs[1:3], strict=True):
            target = cut.replace(placements=[REPLICATE if a in self.ring else p for a, p in enumerate(cut.placements)])
            whole.append(run_move(local, self.comm, plan_steps(cut, target, self.ring), note))
        rows = self.comm.per_rank(self._rows)
        return self._bound(attend_by_definition)(q, *whole, mask, self.how, self.causal, rows)


def _rotated(layout: Layout, axes: tuple[int, ...], by: int) -> Layout:
    """The layout in which every rank holds the part of the sequence that the rank `by` places before it held."""
    if not by:
        return layout
    dim, sizes = layout.ndim - 2, [layout.mesh.shape[a] for a in axes]
    ranks = list(itertools.product(*map(range, sizes)))
    earlier = dict(zip(ranks, ranks[-by:] + ranks[:-by], strict=True))

    def held(coords: Coords) -> Intervals:
        return layout.held(dim, coords_on(axes, earlier[tuple(coords[a] for a in axes)], len(coords)))

    return layout.replace(placements=cut_as_held(layout, axes, dim, layout.shape[dim], held))


def _wait_for_nothing() -> None:
    return None


class _Attention(torch.autograd.Function):
    """Inputs and outputs are the distinct plain tensors of the local values of the operands and of the output."""

    @staticmethod
    def forward(ctx: Ctx, box: list[Any], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        work, operands, note = box
        comm = work.comm
        out, lse = work.forward(operands, note)
        ctx.work, ctx.recorders = work, recorders()
        ctx.note = for_backward(note, user_line() if ctx.recorders else None)
        ctx.structures = [comm.structure(local) for local in (*operands, out, lse)]
        ctx.counts = [len(comm.values(local)) for local in (*operands, out, lse)]
        outs = comm.values(out)
        # torch's fused kernels, which take 4 dims, keep the output too; else a program may write to it
        ctx.outs = () if out.dim() == 4 else tuple((weakref.ref(one), one._version) for one in outs)
        kept = [one.data for one in outs] if ctx.outs else outs  # the same memory, whose writes torch does not notice
        ctx.save_for_backward(*values, *kept, *comm.values(lse))
        box.append(ctx.structures[-2])
        return outs

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        work, comm, saved = ctx.work, ctx.work.comm, iter(ctx.saved_tensors)
        values = [[next(saved) for _ in range(count)] for count in ctx.counts]
        if torch.is_grad_enabled():
            return None, *_differentiable_gradients(ctx, values[:-2], grads)
        *operands, out, lse = map(comm.assemble, ctx.structures, values)
        with recording_to(ctx.recorders):
            if any((now := one()) is not None and now._version != version for one, version in ctx.outs):
                out, lse = work.forward(operands, ctx.note)
            back = work.backward(comm.assemble(ctx.structures[-2], grads), operands, out, lse, ctx.note)
        found: list[torch.Tensor | None] = []
        for structure, count, gradient in zip(ctx.structures, ctx.counts, back, strict=False):
            found += [None] * count if gradient is None else comm.pick(structure, gradient)
        return None, *found


def _differentiable_gradients(
    ctx: Ctx, values: Sequence[Sequence[torch.Tensor]], grads: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients as functions of operands and incoming gradients: the output is made again, in parts."""
    comm = ctx.work.comm
    # of each operand its own view: one tensor may be query, key and value, and each of them has its own gradient
    apart = [[value.view_as(value) for value in some] for some in values]
    with recording_to(ctx.recorders):
        operands = list(map(comm.assemble, ctx.structures, apart))
        outs = comm.pick(ctx.structures[-2], ctx.work.by_definition(operands, ctx.note))
        flat = [value for some in apart for value in some]
        wanted = [value for value in flat if value.requires_grad]
        found = iter(torch.autograd.grad(outs, wanted, grads, create_graph=True, materialize_grads=True))
    return [next(found) if value.requires_grad else None for value in flat]
