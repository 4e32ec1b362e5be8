"""`requires_grad`, `grad` and `data` of a distributed tensor: asked of, and set on, its local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from shardwise.autograd.gradients import as_gradient, distributed_gradient, grad_layout, refuse_pending_product
from shardwise.autograd.leaves import leaf_values
from shardwise.boundary import enter, lent
from shardwise.comm.record import Note
from shardwise.context import is_strict, refuse_in_program
from shardwise.engine.aliasing import COPIES, became, unseen_alias
from shardwise.engine.reduce_to_parts import before_watching
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout
from shardwise.layout.on_mesh import cached_on_mesh
from shardwise.move import plan_steps, run_move
from shardwise.protocols import LocalValue
from shardwise.sizes import layout_of_locals
from shardwise.torch_private.tensors import without_torch_function
from shardwise.wrapper import Wrapper, origin_of, wrap, wrapper_of


def set_requires_grad(tensor: Wrapper, flag: bool = True) -> None:
    """Have autograd record what is done with the tensor, or not.

    Raises:
        AutogradError: For a pending product: what backward finds are the gradients of its factors.
    """
    values = leaf_values(tensor)
    if flag and not values[0].requires_grad:
        refuse_pending_product(tensor._layout, "requires_grad_")
    for value in values:
        value.requires_grad_(flag)


def retain_grad(tensor: Wrapper) -> None:
    """Have backward keep the gradient of a tensor that is no leaf."""
    before_watching(tensor, "retain_grad")
    values = leaf_values(tensor)
    if not values[0].is_leaf:
        refuse_pending_product(tensor._layout, "retain_grad")
    for value in values:
        value.retain_grad()


def get_grad(tensor: Wrapper) -> Any:
    """The gradient as a distributed tensor; the same object as long as the local gradients are the same."""
    own = tensor.__dict__  # optimizers and clipping ask this of every parameter, several times per step
    local, shown, layout = tensor._local, own.get("_shown_grad"), own["_layout"]
    if type(local) is torch.Tensor:
        grad = local.grad
        if shown is not None and shown[0][0] is grad:
            return shown[1]
        if grad is not None and not grad.requires_grad and grad.dtype == layout.dtype:
            wrapped = _gradient_wrapper(layout)(grad)
            own["_shown_grad"] = ([grad], wrapped)
            return wrapped
    held = layout.mesh.comm.values(local)
    grads = [value.grad for value in held]
    if shown is not None and all(a is b for a, b in zip(grads, shown[0], strict=True)):
        return shown[1]
    if grads[0] is None:
        own.pop("_shown_grad", None)
        return None
    with torch.enable_grad():  # a gradient with a graph has it wherever it is read
        wrapped = as_gradient(layout, layout.mesh.comm.rebuild(local, grads))
    own["_shown_grad"] = (grads, wrapped)
    return wrapped


@functools.partial(cached_on_mesh, "grad wrappers", 4096)
def _gradient_wrapper(layout: Layout) -> Callable[[LocalValue], Any]:
    return wrapper_of(grad_layout(layout))


def drop_grad(tensor: Wrapper) -> None:
    """tensor.grad = None. A gradient that the program holds keeps its values."""
    local = tensor._local
    if type(local) is torch.Tensor:
        local.grad = None
    else:
        for value in leaf_values(tensor):
            value.grad = None
    tensor.__dict__.pop("_shown_grad", None)


def set_grad(tensor: Wrapper, grad: torch.Tensor | None) -> None:
    """tensor.grad = grad, moved to the layout that gradients of this tensor have."""
    if grad is None:
        drop_grad(tensor)
        return
    shown: Wrapper = _laid_out_as_gradient(tensor._layout, distributed_gradient(tensor._layout, grad, "grad"))
    comm = tensor._layout.mesh.comm
    parts = comm.pick(comm.structure(tensor._local), shown._local)
    is_shared = len(set(map(id, parts))) < len(parts)
    if is_shared:  # the parts of a sum share its gradient, but each accumulates its own
        parts = tuple(part.clone() for part in parts)
    for value, part in zip(leaf_values(tensor), parts, strict=True):
        value.grad = part
    tensor._shown_grad = None if is_shared else (list(parts), shown)


def _laid_out_as_gradient(layout: Layout, grad: Wrapper) -> Wrapper:
    """The gradient in the layout that gradients of a tensor with `layout` have: moved, where it has another."""
    here = grad._layout
    wanted = grad_layout(layout).replace(dtype=here.dtype, stride=here.stride, device=here.device)
    if here.placements == wanted.placements:
        return grad
    steps = plan_steps(here, wanted)
    if is_strict() and any(step.kind != "local" for step in steps):
        refuse_in_program("grad", here, f"[{', '.join(map(str, wanted.placements))}]")
    return wrap(run_move(grad._local, here.mesh.comm, steps, Note("grad")), wanted)


def get_data(tensor: Wrapper) -> Any:
    """tensor.data: the same memory without a graph."""
    tensor._loose_writes += 1
    return unseen_alias(tensor)


def set_data(tensor: Wrapper, value: torch.Tensor) -> None:
    """tensor.data = value: other values (of another dtype or layout, if need be) under the same autograd identity."""
    if not isinstance(value, Wrapper):
        raise LayoutError(f"data: expected a DTensor, got {type(value).__name__}; distribute_tensor it first")
    with without_torch_function():
        torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    tensor._loose_writes += 1
    if value._layout.mesh is not tensor._layout.mesh:
        raise MeshError(f"data: on {value._layout.mesh!r}, the tensor on {tensor._layout.mesh!r}")
    comm, local = tensor._layout.mesh.comm, tensor._local
    if COPIES:  # copied views of what it was go on with that
        before = wrap(comm.rebuild(local, [v.detach() for v in comm.values(local)]), tensor._layout, tensor._offset)
        became(tensor, before, None)
    if comm.structure(local) != comm.structure(value._local):
        flag = tensor.requires_grad
        tensor._local = comm.rebuild(value._local, [v.detach().requires_grad_(flag) for v in comm.values(value._local)])
    else:
        for mine, theirs in zip(comm.values(local), comm.values(value._local), strict=True):
            mine.data = theirs
        _follow(tensor, value)
    tensor._layout, tensor._offset, tensor._origin = value._layout, value._offset, origin_of(value)
    tensor._spreads = None


def get_local(tensor: Wrapper) -> LocalValue:
    """tensor._local_tensor, torch's private name: the memory of `to_local()` without its graph."""
    return lent(cast(Wrapper, tensor.detach()))


def set_local(tensor: Wrapper, local: torch.Tensor) -> None:
    """tensor._local_tensor = local: other memory for this rank, of the shape that the layout says."""
    layout = tensor._layout
    if not isinstance(local, torch.Tensor) or isinstance(local, Wrapper):
        raise LayoutError(f"_local_tensor: expected a plain tensor of this rank's, got {type(local).__name__}")
    held = layout_of_locals(local.detach(), layout.mesh, layout.placements, layout.shape, layout.stride)
    set_data(tensor, enter(*held))


def _follow(tensor: Wrapper, value: Wrapper) -> None:
    """Have what entered split calls as `tensor` hold `value` too: autograd looks at the values of a tensor when it
    computes gradients, and those it took are aliases of the tensor."""
    comm = tensor._layout.mesh.comm
    for _, _, taken in (tensor._spreads or {}).values():
        for mine, theirs in zip(comm.values(taken), comm.pick(comm.structure(taken), value._local), strict=True):
            mine.data = theirs
