"""The layout of a gradient follows from the layout of its value. Both directions between a distributed gradient and
what autograd computes for the local tensors."""

from __future__ import annotations

import torch

from shardwise.comm.bridge import convert_gradients, share
from shardwise.comm.record import Note
from shardwise.engine.plain_tensors import plain_wrapped
from shardwise.engine.transforms import turn_in
from shardwise.errors import AutogradError, LayoutError, MeshError
from shardwise.layout import Layout, Partial
from shardwise.layout.gradient import grad_layout, summed_axes, unsummed_axes
from shardwise.layout.placement import REPLICATE
from shardwise.move import move
from shardwise.protocols import LocalValue
from shardwise.torch_private.autograd import is_recorded
from shardwise.torch_private.tensors import is_transformed
from shardwise.wrapper import Wrapper, wrap


def as_gradient(layout: Layout, local: LocalValue) -> Wrapper:
    """What autograd computed for the local value of a tensor with this layout, as a distributed tensor.

    Every part of a sum gets its gradient. In a second derivative autograd adds up what the parts have of that one's
    gradient, so one part takes all of it."""
    result, sums, comm = grad_layout(layout), summed_axes(layout), layout.mesh.comm
    if sums:
        if any(map(is_recorded, comm.values(local))):
            parts = result.replace(placements=[Partial() if a in sums else p for a, p in enumerate(result.placements)])
            local = convert_gradients(comm, local, lambda g: move(g, result, parts, Note("backward")))
        local = share(comm, local, sums)
    dtype = comm.first(local).dtype
    return wrap(local, result if dtype == result.dtype else result.replace(dtype=dtype))


def refuse_pending_product(layout: Layout, what: str) -> None:
    """Raise where a pending product is asked for its gradient, which does not follow from those of its factors."""
    if any(p.is_partial("product") for p in layout.placements):
        raise AutogradError(
            f"{what}: the gradient of a tensor laid out [{', '.join(map(str, layout.placements))}] cannot be told from "
            f"those of its factors; redistribute it first, and call {what} on the result"
        )


def finished_but_sums(tensor: Wrapper) -> Wrapper:
    """The tensor with every Partial that is not a sum reduced, differentiably: the gradients of such parts do not
    follow from that of the value."""
    layout = tensor._layout
    pending = unsummed_axes(layout)
    if not pending:
        return tensor
    target = layout.placed(dict.fromkeys(pending, REPLICATE))
    return wrap(move(tensor._local, layout, target, Note("backward")), target)


def gradient_of_parts(layout: Layout, parts: LocalValue, grad: torch.Tensor, what: str) -> LocalValue:
    """`from_gradient` for a tensor whose parts are known. The parts of an average get equal shares. Of a maximum, the
    parts that equal it share the gradient. The factors of a product get what torch computes for them."""
    if not unsummed_axes(layout):
        return from_gradient(layout, grad, what)
    comm = layout.mesh.comm
    leaves = comm.rebuild(parts, [value.detach().requires_grad_() for value in comm.values(parts)])
    with torch.enable_grad():
        result = finished_but_sums(wrap(leaves, layout))
    seeds = comm.pick(comm.structure(result._local), from_gradient(result._layout, grad, what))
    found = torch.autograd.grad(
        comm.values(result._local), comm.values(leaves), seeds, create_graph=torch.is_grad_enabled()
    )
    return comm.rebuild(leaves, found)


def from_gradient(layout: Layout, grad: torch.Tensor, what: str) -> LocalValue:
    """The other direction: a gradient that the user gave to `what`, as autograd takes it for such a local value, in
    which nothing but sums is pending."""
    given = distributed_gradient(layout, grad, what)
    wanted = grad_layout(layout).replace(dtype=given._layout.dtype, stride=given._layout.stride)
    return move(given._local, given._layout, wanted, Note(what, backward=what == "hook"), summed_axes(layout))


def distributed_gradient(layout: Layout, grad: object, what: str) -> Wrapper:
    """A gradient from the user, checked, for a tensor with this layout; a plain tensor counts as replicated."""
    if not isinstance(grad, torch.Tensor):
        raise TypeError(f"{what}: the gradient must be a tensor, got {type(grad).__name__}; a plain one is replicated")
    if not isinstance(grad, Wrapper):
        grad = turn_in(grad, layout.mesh) if is_transformed(grad) else plain_wrapped(what, grad, layout.mesh)
    if grad._layout.mesh is not layout.mesh:
        raise MeshError(f"{what}: the gradient is on {grad._layout.mesh!r}, the tensor on {layout.mesh!r}")
    if grad._layout.shape != layout.shape:
        raise LayoutError(f"{what}: gradient of shape {grad._layout.shape} for a tensor of shape {layout.shape}")
    return grad
