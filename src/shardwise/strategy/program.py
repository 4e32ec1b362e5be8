"""What the programs of ops are made of: local work on what the ranks hold, and windows of dims that are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

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
from shardwise.move.window import Needs, windows_of
from shardwise.torch_private import is_any_autocast_enabled
from shardwise.wrapper import Wrapper, wrap

# A distributed tensor as programs use it: torch's methods, `redistribute`, `_layout` and `_local`. DTensor is above.
Tensor: TypeAlias = Any


class Windowed:
    """A tensor of which every rank gets the indices `needs[dim](coords)` of some dims, cut or not: with halos."""

    def __init__(self, tensor: Tensor, needs: dict[int, Needs]) -> None:
        self.tensor, self.needs = tensor, needs


def run_local(
    func: Callable[..., Any],
    operands: Sequence[object],
    outputs: Layout | Sequence[Layout],
    value_at: Callable[[Coords], Any] | None = None,
) -> Any:
    """What `func` makes of the values that each rank holds, as distributed tensors of the layouts `outputs`, which are
    the caller's promise.

    Operands are tensors, `Windowed` ones, or anything else, which is passed on as it is; the last argument of `func` is
    `value_at` of a rank's coordinates, if given. Where an axis splits the work (an operand or a result is not Replicate
    there), the operands that are Replicate are spread: their gradients add up."""
    wanted = [outputs] if isinstance(outputs, Layout) else list(outputs)
    tensors = [op.tensor if isinstance(op, Windowed) else op for op in operands]
    layouts = [t._layout for t in tensors if isinstance(t, Wrapper)]
    mesh = wanted[0].mesh
    along = zip(*(layout.placements for layout in (*layouts, *wanted)))
    split = tuple(axis for axis, places in enumerate(along) if not all(p.is_replicate() for p in places))
    values = [_local(op, split) for op in operands]
    if value_at is not None:
        values.append(mesh.comm.per_rank(value_at))
    result = mesh.comm.bind(func, split)(*values)
    if isinstance(outputs, Layout):
        return _wrapped(result, outputs)
    return tuple(_wrapped(local, layout) for local, layout in zip(result, wanted, strict=True))


def _wrapped(local: torch.Tensor, layout: Layout) -> Tensor:
    """A result with its layout. Under autocast the local result knows the dtype."""
    if is_any_autocast_enabled():
        layout = layout.replace(dtype=layout.mesh.comm.first(local).dtype)
    return wrap(local, layout)


def _local(operand: Any, split: tuple[int, ...]) -> Any:
    """What `func` gets of an operand: spread along `split`, with the indices it asks for."""
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
    windows = windows_of(layout, tuple(operand.needs.items()))
    if windows.steps and is_strict():
        refuse_in_program(note.op, layout, f"windows along dims {sorted(operand.needs)}")
    for dim in windows.held_whole:
        local = comm.bind(take, split)(local, dim, comm.per_rank(operand.needs[dim]))
    return run_steps(comm, windows.steps, local, note)


def whole(x: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """`x` with these dims (None: all) gathered and nothing pending."""
    places = [
        REPLICATE if p.is_partial() or (p.is_shard() and (dims is None or p.dim in dims)) else p
        for p in x._layout.placements
    ]
    return x.redistribute(placements=places)


def reduced(x: Tensor) -> Tensor:
    """`x` with nothing pending, cut as it was."""
    return whole(x, ())


def unfinished(x: Tensor) -> Tensor:
    """`x` with what is pending taken for finished: for ops that look at its shape and not at its values."""
    layout = x._layout
    places = [REPLICATE if p.is_partial() else p for p in layout.placements]
    pending = [axis for axis, p in enumerate(layout.placements) if p.is_partial()]
    return wrap(share(layout.mesh.comm, x.detach()._local, pending), layout.replace(placements=places))


def needs_grad(*tensors: Tensor) -> bool:
    """Whether the program must be differentiable."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of values of `dtype` are taken in: float32 for halves."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
