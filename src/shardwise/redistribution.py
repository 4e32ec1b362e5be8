"""Parts of `DTensor.redistribute`: the layout it leads to, other meshes, and dtypes for the way."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardwise.argument_types import Placements
from shardwise.caches import register_cache
from shardwise.comm.base import Comm
from shardwise.comm.bridge import regrade
from shardwise.comm.record import Note
from shardwise.context import running_op
from shardwise.errors import MoveError
from shardwise.layout import Layout, Placement, as_placements
from shardwise.mesh import Mesh
from shardwise.move import move_across, plan_steps
from shardwise.move.steps import MeshStep
from shardwise.protocols import LocalValue
from shardwise.wrapper import Wrapper, wrap

Dtype = torch.dtype | None


@functools.lru_cache(maxsize=4096)
def target_of(
    layout: Layout, placements: tuple[Placement, ...], cap: int | None
) -> tuple[Layout, tuple[MeshStep, ...]]:
    """The layout that a redistribute leads to, and its steps: none where only axes of a single rank change."""
    target = layout.replace(placements=placements)
    if target is layout or not plan_steps(layout, target):
        return target, ()
    target = target.replace(stride=None)
    return target, plan_steps(layout, target, memory=cap)


register_cache("targets", target_of.cache_info, target_of.cache_clear)


def redistribute_across(
    tensor: Wrapper, mesh: Mesh, placements: Placements | None, forward: Dtype, backward: Dtype
) -> Any:
    """The tensor on another mesh; values travel as `forward`, gradients as `backward`."""
    src = tensor._layout
    if placements is None and len(src.placements) != len(mesh.shape):
        raise MoveError(
            f"redistribute: from {src.mesh!r} to {mesh!r} without placements; give one for each of its axes"
        )
    places = as_placements(placements) if placements is not None else src.placements
    if forward is not None and forward != src.dtype:
        tensor = _cast(tensor, forward)
        src = tensor._layout
    target = Layout.make(mesh, places, src.shape, src.dtype, device=mesh.device)
    local = tensor._local
    needs_grad = backward is not None and tensor.requires_grad
    if needs_grad:
        local = _with_grad_as(src.mesh.comm, local, src.dtype)
    out = move_across(local, src, target, Note(running_op() or "redistribute"))
    if needs_grad:
        out = _with_grad_as(mesh.comm, out, backward)
    return wrap(out, target)


def _cast(tensor: Wrapper, dtype: torch.dtype) -> Any:
    if not tensor._layout.mesh.comm.outside:
        return tensor.to(dtype)
    return wrap(tensor._local.to(dtype), tensor._layout.replace(dtype=dtype))  # nothing here to cast but the type


def _with_grad_as(comm: Comm, local: LocalValue, dtype: Dtype) -> LocalValue:
    """The local value, whose gradient is cast to `dtype` on its way back."""
    cast = torch.Tensor.to if comm.outside else comm.bind(torch.Tensor.to)
    return regrade(comm, local, lambda grad: cast(grad, dtype))


def redistribute_as(tensor: Any, placements: Placements | None, forward: Dtype, backward: Dtype, async_op: bool) -> Any:
    """A redistribute whose values travel as `forward` and whose gradients travel as `backward`."""
    if forward is not None and forward != tensor.dtype:
        tensor = tensor.to(forward)
    if backward is None or not tensor.requires_grad:
        return tensor.redistribute(placements=placements, async_op=async_op)
    layout = tensor._layout
    tensor = wrap(_with_grad_as(layout.mesh.comm, tensor._local, layout.dtype), layout)
    out = tensor.redistribute(placements=placements)  # waits: the node that casts the gradient needs the values
    return wrap(_with_grad_as(layout.mesh.comm, out._local, backward), out._layout)
