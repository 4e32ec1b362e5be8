"""torch.autograd.backward and torch.autograd.grad on distributed tensors: one backward pass over all local graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from shardwise.autograd.gradients import as_gradient, check_is_told, finished_but_sums, from_gradient
from shardwise.autograd.leaves import first_leaf, leaf_local, leaf_values
from shardwise.context import relaxed
from shardwise.engine.reduce_to_parts import before_watching
from shardwise.errors import AutogradError
from shardwise.wrapper import Wrapper

Tensors = torch.Tensor | Sequence[torch.Tensor]
Gradients = torch.Tensor | Sequence[torch.Tensor | None] | None


def backward(
    tensors: Tensors,
    grad_tensors: Gradients = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensors | None = None,
    **_: Any,
) -> None:
    """torch.autograd.backward on distributed (and plain) tensors: all ranks start together."""
    tensors = _as_list(tensors)
    one = grad_tensors is None or isinstance(grad_tensors, torch.Tensor)
    grads = [grad_tensors] * len(tensors) if one else list(grad_tensors)  # type: ignore[arg-type]
    roots, seeds = _starts(tensors, grads, "backward")
    flat = None if inputs is None else [v for group in _watched(_as_list(inputs), "backward") for v in group]
    with relaxed():
        torch.autograd.backward(roots, seeds, retain_graph=retain_graph, create_graph=create_graph, inputs=flat)


def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Gradients = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad on distributed tensors."""
    if is_grads_batched:
        raise AutogradError("autograd.grad: is_grads_batched is not supported on distributed tensors; loop over them")
    outputs, inputs = _as_list(outputs), _as_list(inputs)
    one = isinstance(grad_outputs, torch.Tensor)
    grads = [grad_outputs] if one else list(grad_outputs or [None] * len(outputs))
    roots, seeds = _starts(outputs, grads, "autograd.grad")
    groups = _watched(inputs, "autograd.grad")
    flat = [value for group in groups for value in group]
    with relaxed():
        found = torch.autograd.grad(
            roots,
            flat,
            seeds,
            retain_graph,
            create_graph,
            allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        )
    parts = iter(found)
    return tuple(_gathered_up(t, [next(parts) for _ in group]) for t, group in zip(inputs, groups, strict=True))


def make_dual(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: a forward-mode tangent would live in the wrapper, where no op looks."""
    raise AutogradError(
        "forward-mode differentiation (make_dual, torch.func.jvp, linearize) of a distributed tensor is not supported: "
        "its tangent would be lost. Use reverse mode: torch.autograd.grad, torch.func.vjp or jacrev"
    )


def _as_list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _watched(inputs: Sequence[torch.Tensor], what: str) -> list[tuple[torch.Tensor, ...]]:
    """The plain tensors of each input, whose gradients somebody wants to see."""
    for tensor in inputs:
        before_watching(tensor, what)
        if isinstance(tensor, Wrapper) and not first_leaf(tensor).is_leaf:
            check_is_told(tensor._layout, what)
    return [leaf_values(tensor) if isinstance(tensor, Wrapper) else (tensor,) for tensor in inputs]


def _gathered_up(tensor: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor | None:
    """The gradient of an input, from those of its plain tensors."""
    if not isinstance(tensor, Wrapper) or grads[0] is None:
        return grads[0]
    return as_gradient(tensor._layout, tensor._layout.mesh.comm.rebuild(leaf_local(tensor), grads))


def _starts(
    tensors: Sequence[torch.Tensor], grads: Sequence[Any], what: str
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The plain tensors that a backward pass starts from, and their gradients."""
    pairs = zip(tensors, grads, strict=True)
    found = [_roots(t, seed, what) if isinstance(t, Wrapper) else ([t], [seed]) for t, seed in pairs]
    return [root for roots, _ in found for root in roots], [seed for _, seeds in found for seed in seeds]


def _roots(tensor: Wrapper, seed: Any, what: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    layout = tensor._layout
    if layout.mesh.comm.outside:  # nothing to start from, but the move that made it has a gradient to take part in
        return [tensor._local], [torch.empty_like(tensor._local)]
    with torch.enable_grad():  # off in the backward of a checkpoint, which starts a pass of its own
        tensor = finished_but_sums(tensor)
    layout, comm = tensor._layout, layout.mesh.comm
    outs = comm.values(tensor._local)
    if seed is None:
        if math.prod(layout.shape) != 1:
            raise RuntimeError(f"{what}: grad can be implicitly created only for scalar outputs")
        return list(outs), [torch.ones_like(v) for v in outs]
    local = from_gradient(layout, seed, what)
    return list(outs), list(comm.pick(comm.structure(tensor._local), local))
