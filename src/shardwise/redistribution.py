"""Parts of `DTensor.redistribute`: the layout it leads to, other meshes, and dtypes for the way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardwise.argument_types import Placements
from shardwise.comm.bridge import convert_gradients
from shardwise.comm.record import Note
from shardwise.context import running_op
from shardwise.errors import MoveError
from shardwise.layout import Layout, Placement, as_placements
from shardwise.layout.on_mesh import cached_on_mesh
from shardwise.mesh import Mesh
from shardwise.move import move_across, plan_steps
from shardwise.move.steps import MeshStep
from shardwise.torch_private.autograd import is_recorded
from shardwise.wrapper import Wrapper, wrap

Dtype = torch.dtype | None


@functools.partial(cached_on_mesh, "targets", 4096)
def target_of(
    layout: Layout, placements: tuple[Placement, ...], cap: int | None
) -> tuple[Layout, tuple[MeshStep, ...]]:
    """The layout that a redistribute leads to, and its steps: none where only axes of a single rank change."""
    target = layout.replace(placements=placements)
    if target is layout or not plan_steps(layout, target):
        return target, ()
    target = target.replace(stride=None)
    return target, plan_steps(layout, target, memory=cap)


def redistribute_across(
    tensor: Wrapper, mesh: Mesh, placements: Placements | None, forward: Dtype, backward: Dtype
) -> Any:
    """The tensor on another mesh; values travel as `forward`, gradients as `backward`."""
    src = tensor._layout
    if tensor._guessed:
        raise MoveError(
            f"redistribute: how a tensor of shape {src.shape} that was computed on {src.mesh!r} is laid out is not "
            f"known on this rank, which is outside of it; say so on all ranks before: x.redistribute(placements=...)"
        )
    if placements is None and len(src.placements) != len(mesh.shape):
        raise MoveError(
            f"redistribute: from {src.mesh!r} to {mesh!r} without placements; give one for each of its axes"
        )
    places = as_placements(placements) if placements is not None else src.placements

    def across(tensor: Wrapper) -> Any:
        src = tensor._layout
        target = Layout.make(mesh, places, src.shape, src.dtype, device=mesh.device)
        return wrap(move_across(tensor._local, src, target, Note(running_op() or "redistribute")), target)

    return _travelling(across, tensor, forward, backward)


def redistribute_as(tensor: Any, placements: Placements | None, forward: Dtype, backward: Dtype, async_op: bool) -> Any:
    """A redistribute whose values travel as `forward` and whose gradients travel as `backward`."""
    waits = backward is not None and is_recorded(tensor)  # the node that casts the gradient needs the values
    given = tensor.placements if placements is None else placements
    moved = lambda tensor: tensor.redistribute(placements=given, async_op=async_op and not waits)
    return _travelling(moved, tensor, forward, backward)


def _travelling(move: Callable[[Any], Any], tensor: Wrapper, forward: Dtype, backward: Dtype) -> Any:
    if forward is not None and forward != tensor._layout.dtype:
        tensor = _cast(tensor, forward)
    if backward is None or not (tensor.requires_grad or is_recorded(tensor)):
        return move(tensor)
    return _with_grad_as(move(_with_grad_as(tensor, tensor._layout.dtype)), backward)


def _cast(tensor: Wrapper, dtype: torch.dtype) -> Any:
    if not tensor._layout.mesh.comm.outside:
        return tensor.to(dtype)
    return wrap(tensor._local.to(dtype), tensor._layout.replace(dtype=dtype))  # nothing here to cast but the type


def _with_grad_as(tensor: Wrapper, dtype: torch.dtype) -> Any:
    """The tensor, whose gradient is cast to `dtype` on its way back."""
    comm = tensor._layout.mesh.comm
    cast = torch.Tensor.to if comm.outside else comm.bind(torch.Tensor.to)
    return wrap(convert_gradients(comm, tensor._local, lambda grad: cast(grad, dtype)), tensor._layout)
