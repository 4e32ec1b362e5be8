"""The layout of a gradient follows from the layout of its value. Both directions between a distributed gradient and
what autograd computes for the local tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from shardwise.comm.bridge import convert_gradients, share
from shardwise.comm.record import Note
from shardwise.engine.plain_tensors import plain_wrapped
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, Partial, Placement
from shardwise.layout.on_mesh import cached_on_mesh
from shardwise.layout.placement import REPLICATE
from shardwise.move import move
from shardwise.protocols import LocalValue
from shardwise.wrapper import Wrapper, wrap


def grad_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements of a gradient, from those of its value. Shard and Replicate stay. The parts of a sum all have the
    gradient of the sum (Replicate). The parts of another reduction each have a part of the gradient (Partial)."""
    of_parts = lambda p: REPLICATE if p.reduce_op == "sum" else Partial()
    return tuple(of_parts(p) if isinstance(p, Partial) else p for p in placements)


@functools.partial(cached_on_mesh, "grad layouts", 4096)
def grad_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor with this layout."""
    return layout.replace(placements=grad_placements(layout.placements))


@functools.partial(cached_on_mesh, "summed axes", 4096)
def summed_axes(layout: Layout) -> tuple[int, ...]:
    """The axes along which ranks hold the parts of a sum."""
    return tuple(axis for axis, p in enumerate(layout.placements) if p.is_partial("sum"))


def as_gradient(layout: Layout, local: LocalValue) -> Wrapper:
    """What autograd computed for the local value of a tensor with this layout, as a distributed tensor.

    Every part of a sum gets its gradient. In a second derivative autograd adds up what the parts have of that one's
    gradient, so one part takes all of it."""
    result, sums, comm = grad_layout(layout), summed_axes(layout), layout.mesh.comm
    if sums and torch.is_grad_enabled() and comm.first(local).requires_grad:
        parts = result.replace(placements=[Partial() if a in sums else p for a, p in enumerate(result.placements)])
        local = share(comm, convert_gradients(comm, local, lambda g: move(g, result, parts, Note("backward"))), sums)
    dtype = comm.first(local).dtype
    return wrap(local, result if dtype == result.dtype else result.replace(dtype=dtype))


def from_gradient(layout: Layout, grad: torch.Tensor, what: str) -> LocalValue:
    """The other direction: a gradient that the user gave to `what`, as autograd takes it for such a local value."""
    given = distributed_gradient(layout, grad, what)
    wanted = grad_layout(layout).replace(dtype=given._layout.dtype, stride=given._layout.stride)
    return move(given._local, given._layout, wanted, Note(what, backward=what == "hook"), summed_axes(layout))


def distributed_gradient(layout: Layout, grad: object, what: str) -> Wrapper:
    """A gradient from the user, checked, for a tensor with this layout; a plain tensor counts as replicated."""
    if not isinstance(grad, torch.Tensor):
        raise TypeError(f"{what}: the gradient must be a tensor, got {type(grad).__name__}; a plain one is replicated")
    if not isinstance(grad, Wrapper):
        grad = plain_wrapped(what, grad, layout.mesh)
    if grad._layout.mesh is not layout.mesh:
        raise MeshError(f"{what}: the gradient is on {grad._layout.mesh!r}, the tensor on {layout.mesh!r}")
    if grad._layout.shape != layout.shape:
        raise LayoutError(f"{what}: gradient of shape {grad._layout.shape} for a tensor of shape {layout.shape}")
    return grad
