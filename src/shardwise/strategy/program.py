"""What the programs of ops are made of: local work on what the ranks hold, and windows of dims that are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.comm.bridge import share
from shardwise.comm.record import Note
from shardwise.context import is_strict, refuse_in_program, running_op
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.move import plan_steps
from shardwise.move.node import run_steps
from shardwise.move.pack import take
from shardwise.move.window import Needs, Windows
from shardwise.torch_private import is_any_autocast_enabled
from shardwise.wrapper import Wrapper, wrap


class Windowed:
    """A tensor of which every rank gets the indices `needs[dim](coords)` of some dims, cut or not: with halos."""

    def __init__(self, tensor: Any, needs: dict[int, Needs]) -> None:
        self.tensor, self.needs = tensor, needs


def run_local(
    func: Callable[..., Any],
    operands: Sequence[Any],
    outputs: Layout | Sequence[Layout],
    of: Callable[[Coords], Any] | None = None,
) -> Any:
    """func(*local values[, of(coords)]) on every rank, its results wrapped as `outputs` (one layout, or one a result).

    Operands are distributed tensors, `Windowed` ones, or anything else, which goes in as it is. Where an axis splits
    the work (an operand or a result is not Replicate there), the operands that are Replicate are spread: their
    gradients add up. The layouts of the results are the caller's promise.
    """
    wanted = [outputs] if isinstance(outputs, Layout) else list(outputs)
    tensors = [op.tensor if isinstance(op, Windowed) else op for op in operands]
    layouts = [t._layout for t in tensors if isinstance(t, Wrapper)]
    mesh = wanted[0].mesh
    split = tuple(
        axis
        for axis in range(len(mesh.shape))
        if any(not layout.placements[axis].is_replicate() for layout in (*layouts, *wanted))
    )
    locals = [_local(op, split) for op in operands]
    call = mesh.comm.bind(func, split)
    result = call(*locals, mesh.comm.per_rank(of)) if of is not None else call(*locals)
    if isinstance(outputs, Layout):
        return _wrapped(result, outputs)
    return tuple(_wrapped(local, layout) for local, layout in zip(result, wanted, strict=True))


def _wrapped(local: Any, layout: Layout) -> Any:
    """Under autocast the local result knows the dtype."""
    if is_any_autocast_enabled():
        layout = layout.replace(dtype=layout.mesh.comm.first(local).dtype)
    return wrap(local, layout)


def _local(operand: Any, split: tuple[int, ...]) -> Any:
    windowed = isinstance(operand, Windowed)
    tensor = operand.tensor if windowed else operand
    if not isinstance(tensor, Wrapper):
        return tensor
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    note = Note(running_op() or "window")
    spread = tuple(axis for axis in split if layout.placements[axis].is_replicate())
    local = run_steps(comm, plan_steps(layout, layout, spread), tensor._local, note)
    if not windowed:
        return local
    windows = Windows(layout, operand.needs)
    if windows.steps and is_strict():
        refuse_in_program(note.op, layout, f"windows along dims {sorted(operand.needs)}")
    for dim in windows.held_whole:
        local = comm.bind(take, split)(local, dim, comm.per_rank(operand.needs[dim]))
    return run_steps(comm, windows.steps, local, note)


def whole(x: Any, dims: Sequence[int] | None = None) -> Any:
    """`x` with these dims (None: all) gathered and nothing pending."""
    places = [
        REPLICATE if p.is_partial() or (p.is_shard() and (dims is None or p.dim in dims)) else p
        for p in x._layout.placements
    ]
    return x.redistribute(placements=places)


def reduced(x: Any) -> Any:
    """`x` with nothing pending, cut as it was."""
    return whole(x, ())


def unfinished(x: Any) -> Any:
    """`x` with what is pending taken for finished: for ops that look at its shape and not at its values."""
    layout = x._layout
    places = [REPLICATE if p.is_partial() else p for p in layout.placements]
    pending = [axis for axis, p in enumerate(layout.placements) if p.is_partial()]
    return wrap(share(layout.mesh.comm, x.detach()._local, pending), layout.replace(placements=places))


def needs_grad(*tensors: Any) -> bool:
    """Whether the program must be differentiable."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def wide(dtype: Any) -> Any:
    """The dtype to add up in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
