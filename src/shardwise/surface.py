"""The autograd surface of a distributed tensor: what `requires_grad`, `grad`, `backward` and hooks mean when the graph
lives in the local tensors. The layout of a gradient follows from the layout of its value.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.comm.bridge import joined, regrade, share
from shardwise.comm.record import Note
from shardwise.context import is_strict, refuse_in_program, relaxed
from shardwise.engine.gathered import before_watching
from shardwise.engine.plain_tensors import plain_wrapped
from shardwise.errors import AutogradError, LayoutError, MeshError
from shardwise.layout import Layout, Partial, Placement
from shardwise.layout.placement import REPLICATE
from shardwise.move import move, plan_steps, run_move
from shardwise.wrapper import Wrapper, wrap, wrapper_of


def grad_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Shard and Replicate keep; the parts of a sum all have the gradient of the sum; those of another reduction have
    parts of it."""
    return tuple(
        (REPLICATE if p.reduce_op == "sum" else Partial()) if isinstance(p, Partial) else p for p in placements
    )


@functools.lru_cache(maxsize=4096)
def grad_layout(layout: Layout) -> Layout:
    return layout.replace(placements=grad_placements(layout.placements))


def as_gradient(layout: Layout, local: Any) -> Any:
    """What autograd computed for the local value of a tensor laid out so, as a distributed tensor.

    Every part of a sum gets the gradient of the sum. As a Replicate tensor it has gradients of its own (second
    derivatives), of which one part takes all, since autograd adds up what the parts have."""
    result, sums, comm = grad_layout(layout), summed_axes(layout), layout.mesh.comm
    if sums and torch.is_grad_enabled() and comm.first(local).requires_grad:
        parts = result.replace(placements=[Partial() if a in sums else p for a, p in enumerate(result.placements)])
        local = share(comm, regrade(comm, local, lambda g: move(g, result, parts, Note("backward"))), sums)
    dtype = comm.first(local).dtype
    return wrap(local, result if dtype == result.dtype else result.replace(dtype=dtype))


def from_gradient(layout: Layout, grad: Any, what: str) -> Any:
    """The other way: a gradient someone gives, as autograd takes it for the local value of a tensor laid out so."""
    grad = _distributed(layout, grad, what)
    wanted = grad_layout(layout).replace(dtype=grad._layout.dtype, stride=grad._layout.stride)
    return move(grad._local, grad._layout, wanted, Note(what, backward=what == "hook"), summed_axes(layout))


def _distributed(layout: Layout, grad: Any, what: str) -> Any:
    """A gradient someone gives to a tensor laid out so; a plain tensor counts as replicated, as everywhere."""
    if not isinstance(grad, torch.Tensor):
        raise TypeError(f"{what}: the gradient must be a tensor, got {type(grad).__name__}; a plain one is replicated")
    if not isinstance(grad, Wrapper):
        grad = plain_wrapped(what, grad, layout.mesh)
    if grad._layout.mesh is not layout.mesh:
        raise MeshError(f"{what}: the gradient is on {grad._layout.mesh!r}, the tensor on {layout.mesh!r}")
    if grad._layout.shape != layout.shape:
        raise LayoutError(f"{what}: gradient of shape {grad._layout.shape} for a tensor of shape {layout.shape}")
    return grad


@functools.lru_cache(maxsize=4096)
def summed_axes(layout: Layout) -> tuple[int, ...]:
    return tuple(axis for axis, p in enumerate(layout.placements) if p.is_partial("sum"))


def values(tensor: Any) -> tuple[torch.Tensor, ...]:
    """The plain tensors whose graphs stand for the tensor's."""
    return tensor._layout.mesh.comm.values(leaf_local(tensor))


def leaf_local(tensor: Any) -> Any:
    """The local value that accumulates the gradient (hooks may stand between it and the ops)."""
    return tensor.__dict__.get("_leaf", tensor._local)


def first(tensor: Any) -> torch.Tensor:
    return tensor._layout.mesh.comm.first(leaf_local(tensor))


def note_loose_write(tensor: Any) -> None:
    """`.data` was handed out or replaced: what is written so has no version, and who keeps a copy must know."""
    tensor.__dict__["_loose_writes"] = loose_writes(tensor) + 1


def loose_writes(tensor: Any) -> int:
    return tensor.__dict__.get("_loose_writes", 0)


# -- flags -------------------------------------------------------------------------------------------------
def set_requires_grad(tensor: Any, flag: bool = True) -> Any:
    for value in values(tensor):
        value.requires_grad_(flag)
    return tensor


def retain_grad(tensor: Any) -> None:
    before_watching(tensor, "retain_grad")
    for value in values(tensor):
        value.retain_grad()


# -- grad --------------------------------------------------------------------------------------------------
def get_grad(tensor: Any) -> Any:
    """The gradient as a distributed tensor; the same object as long as the local gradients are the same."""
    own = tensor.__dict__  # optimizers and clipping ask this of every parameter, several times a step
    local, kept, layout = leaf_local(tensor), own.get("_grad"), own["_layout"]
    if type(local) is torch.Tensor:
        grad = local.grad
        if kept is not None and kept[0][0] is grad:
            return kept[1]
        if grad is not None and not grad.requires_grad and grad.dtype == layout.dtype:
            wrapped = own.pop("_spare_grad", None)
            if wrapped is None or wrapped._layout is not grad_layout(layout):
                wrapped = _gradient_of(layout)(grad)
            else:
                wrapped._local = grad
            own["_grad"] = ([grad], wrapped)
            return wrapped
    held = layout.mesh.comm.values(local)
    if kept is not None and held[0].grad is kept[0][0] and (len(held) == 1 or _same(kept[0], held)):
        return kept[1]
    grads = [value.grad for value in held]
    if grads[0] is None:
        own.pop("_grad", None)
        return None
    wrapped = as_gradient(layout, layout.mesh.comm.rebuild(local, grads))
    own["_grad"] = (grads, wrapped)
    return wrapped


def _keep_for_the_next(own: dict[str, Any]) -> None:
    """Forget the gradient. The tensor that showed it is kept for the next one, if nobody else has it: zero_grad() asks
    every parameter of every step for one, only to see that it is there."""
    kept = own.pop("_grad")
    wrapped = kept[1]
    if sys.getrefcount(wrapped) == 3 and len(wrapped.__dict__) == 2:  # here, in `kept`, in the call; nothing noted
        wrapped._local = None
        own["_spare_grad"] = wrapped


@functools.lru_cache(maxsize=4096)
def _gradient_of(layout: Layout) -> Callable[[Any], Any]:
    return wrapper_of(grad_layout(layout))


def _same(grads: Sequence[Any], held: Sequence[torch.Tensor]) -> bool:
    return all(value.grad is grad for value, grad in zip(held, grads, strict=True))


def drop_grad(tensor: Any) -> None:
    own = tensor.__dict__
    local = leaf_local(tensor)
    if type(local) is torch.Tensor:
        local.grad = None
    else:
        for value in values(tensor):
            value.grad = None
    if "_grad" in own:
        _keep_for_the_next(own)


def set_grad(tensor: Any, grad: Any) -> None:
    if grad is None:
        drop_grad(tensor)
        return
    grad = _laid_out_as_gradient(tensor._layout, _distributed(tensor._layout, grad, "grad"))
    comm = tensor._layout.mesh.comm
    parts = comm.pick(comm.structure(leaf_local(tensor)), grad._local)
    if len(set(map(id, parts))) < len(parts):  # the parts of a sum share its gradient, but each accumulates its own
        parts = tuple(part.clone() for part in parts)
        grad = None
    for value, part in zip(values(tensor), parts, strict=True):
        value.grad = part
    tensor.__dict__.pop("_grad", None)
    if grad is not None:
        tensor.__dict__["_grad"] = (list(parts), grad)


def _laid_out_as_gradient(layout: Layout, grad: Any) -> Any:
    """The gradient as one of a tensor laid out so: moved, if it is laid out in another way."""
    here = grad._layout
    wanted = grad_layout(layout).replace(dtype=here.dtype, stride=here.stride, device=here.device)
    if here.placements == wanted.placements:
        return grad
    steps = plan_steps(here, wanted)
    if is_strict() and any(step.kind != "local" for step in steps):
        refuse_in_program("grad", here, f"[{', '.join(map(str, wanted.placements))}]")
    return wrap(run_move(grad._local, here.mesh.comm, steps, Note("grad")), wanted)


# -- backward ----------------------------------------------------------------------------------------------
def _roots(tensor: Any, grad: Any, what: str) -> tuple[list[torch.Tensor], list[Any]]:
    """The local tensors to start from and their gradients."""
    layout = tensor._layout
    if layout.mesh.comm.outside:  # nothing to start from, but the move that made it has a gradient to take part in
        return [tensor._local], [torch.empty_like(tensor._local)]
    if any(p.is_partial() and not p.is_partial("sum") for p in layout.placements):
        tensor = _replicated_partials(tensor)
        layout = tensor._layout
    comm = layout.mesh.comm
    outs = comm.values(tensor._local)
    if grad is None:
        if _numel(layout) != 1:
            raise RuntimeError(f"{what}: grad can be implicitly created only for scalar outputs")
        return list(outs), [torch.ones_like(v) for v in outs]
    local = from_gradient(layout, grad, what)
    return list(outs), list(comm.pick(comm.structure(tensor._local), local))


def _numel(layout: Layout) -> int:
    n = 1
    for size in layout.shape:
        n *= size
    return n


def _replicated_partials(tensor: Any) -> Any:
    """The tensor with every Partial that is not a sum reduced, differentiably."""
    layout = tensor._layout
    places = [REPLICATE if p.is_partial() and not p.is_partial("sum") else p for p in layout.placements]
    target = layout.replace(placements=places)
    return wrap(move(tensor._local, layout, target, Note("backward")), target)


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
    **_: Any,
) -> None:
    """torch.autograd.backward on distributed (and plain) tensors: all ranks start together."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    grads = (
        [grad_tensors] * len(tensors)
        if grad_tensors is None or isinstance(grad_tensors, torch.Tensor)
        else list(grad_tensors)
    )
    roots: list[Any] = []
    seeds: list[Any] = []
    for tensor, grad in zip(tensors, grads, strict=True):
        if isinstance(tensor, Wrapper):
            outs, start = _roots(tensor, grad, "backward")
        else:
            outs, start = [tensor], [grad]
        roots += outs
        seeds += start
    flat = None
    if inputs is not None:
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        for tensor in inputs:
            before_watching(tensor, "backward")
        flat = [v for t in inputs for v in (values(t) if isinstance(t, Wrapper) else (t,))]
    with relaxed():
        torch.autograd.backward(roots, seeds, retain_graph=retain_graph, create_graph=create_graph, inputs=flat)


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: Any = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """torch.autograd.grad on distributed tensors."""
    if is_grads_batched:
        raise AutogradError("autograd.grad: is_grads_batched is not supported on distributed tensors; loop over them")
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    seeds_in = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs or [None] * len(outputs))
    roots: list[Any] = []
    seeds: list[Any] = []
    for out, seed in zip(outputs, seeds_in, strict=True):
        outs, start = _roots(out, seed, "autograd.grad") if isinstance(out, Wrapper) else ([out], [seed])
        roots += outs
        seeds += start
    for tensor in inputs:
        before_watching(tensor, "autograd.grad")
    groups = [values(t) if isinstance(t, Wrapper) else (t,) for t in inputs]
    with relaxed():
        found = iter(
            torch.autograd.grad(
                roots,
                [v for group in groups for v in group],
                seeds,
                retain_graph=retain_graph,
                create_graph=create_graph,
                allow_unused=allow_unused,
                materialize_grads=materialize_grads,
            )
        )
    results = []
    for tensor, group in zip(inputs, groups, strict=True):
        parts = [next(found) for _ in group]
        if not isinstance(tensor, Wrapper) or parts[0] is None:
            results.append(parts[0])
        else:
            layout = tensor._layout
            results.append(as_gradient(layout, layout.mesh.comm.rebuild(leaf_local(tensor), parts)))
    return tuple(results)


def make_dual(*args: Any, **kwargs: Any) -> None:
    """Forward-mode tangents would live in the wrapper, where no op looks."""
    raise AutogradError(
        "forward-mode differentiation (make_dual, torch.func.jvp, linearize) of a distributed tensor is not supported: "
        "its tangent would be lost. Use reverse mode: torch.autograd.grad, torch.func.vjp or jacrev"
    )


# -- hooks -------------------------------------------------------------------------------------------------
def register_hook(tensor: Any, hook: Callable[[Any], Any]) -> Any:
    """The hook sees the gradient as a distributed tensor, whole, and may replace it."""
    if not first(tensor).requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    before_watching(tensor, "register_hook")
    layout, comm = tensor._layout, tensor._layout.mesh.comm

    def on_local(local: Any) -> Any:
        result = hook(as_gradient(layout, local))
        return local if result is None else from_gradient(layout, result, "hook")

    parts, structure = values(tensor), comm.structure(leaf_local(tensor))
    if len(parts) == 1:  # one graph: a rank of a process group, or simulated ranks that share their value
        return parts[0].register_hook(lambda g: comm.pick(structure, on_local(comm.assemble(structure, [g])))[0])
    hooks = tensor.__dict__.get("_hooks")
    if hooks is None:
        if tensor._local.used:
            return _register_late(parts, lambda grads: hook(as_gradient(layout, comm.assemble(structure, grads))))
        hooks = OrderedDict()
        if first(tensor).is_leaf:
            tensor._leaf = tensor._local
        tensor._local, tensor._hooks = joined(comm, tensor._local, hooks), hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = on_local
    return handle


def _register_late(parts: Sequence[torch.Tensor], hook: Callable[[list[torch.Tensor]], Any]) -> _Handles:
    """A hook on simulated ranks whose values are in use: it can watch the gradients once the last one is there, but
    the others are on their way by then."""
    arrived: dict[int, torch.Tensor] = {}

    def on_part(i: int, grad: torch.Tensor) -> None:
        arrived[i] = grad
        if len(arrived) == len(parts) and hook([arrived.pop(j) for j in range(len(parts))]) is not None:
            raise AutogradError(
                "register_hook: a hook that replaces the gradient must be registered before the first use of the "
                "tensor on a simulated mesh, where the ranks' gradients meet in a node that only later uses go through"
            )

    return _Handles([part.register_hook(functools.partial(on_part, i)) for i, part in enumerate(parts)])


def register_post_accumulate_grad_hook(tensor: Any, hook: Callable[[Any], None]) -> _Handles:
    """The hook runs once the gradient of the whole tensor has been accumulated."""
    parts = values(tensor)
    if not parts[0].is_leaf:
        raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    arrived: set[int] = set()

    def on_part(value: torch.Tensor) -> None:
        arrived.add(id(value))
        if len(arrived) == len(parts):
            arrived.clear()
            hook(tensor)

    handles = [value.register_post_accumulate_grad_hook(on_part) for value in parts]
    return _Handles(handles)


class _Handles:
    """Several handles removed as one."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._all = handles

    def remove(self) -> None:
        for handle in self._all:
            handle.remove()

    def __enter__(self) -> _Handles:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.remove()
