"""torch.autograd.backward and torch.autograd.grad on distributed tensors: one backward pass over all local graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from shardwise.autograd.gradients import (
    as_gradient,
    distributed_gradient,
    finished_but_sums,
    from_gradient,
    refuse_pending_product,
)
from shardwise.autograd.leaves import first_leaf, leaf_values
from shardwise.comm.rank_tensor import RankTensor, unique
from shardwise.context import relaxed
from shardwise.engine.reduce_to_parts import before_watching
from shardwise.engine.transforms import vmap_with_nones, with_batch_dim
from shardwise.errors import AutogradError
from shardwise.layout.gradient import unsummed_axes
from shardwise.wrapper import Wrapper, wrap

Tensors = torch.Tensor | Sequence[torch.Tensor]
Gradients = torch.Tensor | Sequence[torch.Tensor | None] | None


def backward(
    tensors: Tensors,
    grad_tensors: Gradients = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensors | None = None,
    **_: object,
) -> None:
    """torch.autograd.backward on distributed (and plain) tensors: all ranks start together."""
    tensors = _as_list(tensors)
    one = grad_tensors is None or isinstance(grad_tensors, torch.Tensor)
    grads = [grad_tensors] * len(tensors) if one else list(grad_tensors)  # type: ignore[arg-type]
    roots, seeds = _starts(tensors, grads, "backward")
    flat = None if inputs is None else [v for group in _watched(_as_list(inputs), "backward", roots) for v in group]
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
    outputs, inputs = _as_list(outputs), _as_list(inputs)
    one = isinstance(grad_outputs, torch.Tensor)
    grads: list[Any] = [grad_outputs] if one else list(grad_outputs or [None] * len(outputs))
    size = _batch_size(grads) if is_grads_batched else None
    roots, seeds = _starts(outputs, grads, "autograd.grad", size)
    groups = _watched(inputs, "autograd.grad", roots)
    flat = [value for group in groups for value in group]
    keep = (retain_graph is None and create_graph) or bool(retain_graph)
    options: dict[str, Any] = {"allow_unused": allow_unused, "materialize_grads": materialize_grads}
    once = lambda *seeds: torch.autograd.grad(roots, flat, seeds, keep, create_graph, **options)  # noqa: E731
    with relaxed():
        found = once(*seeds) if size is None else vmap_with_nones(once)(*seeds)
    parts = iter(found)
    taken = [[next(parts) for _ in group] for group in groups]
    if create_graph:
        taken = list(map(_recorded_alike, groups, taken))
    elif not any(seed is not None and seed.requires_grad for seed in seeds):
        taken = list(map(_without_graphs, taken))
    return tuple(_gathered_up(*one, size) for one in zip(inputs, groups, taken, strict=True))


def _without_graphs(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients, none of which is recorded: the gradient of cummax of nothing is the operand itself, also on a rank
    without elements, which would then be the only rank to record what is done with it."""
    return [grad if grad is None or not grad.requires_grad else grad.detach() for grad in grads]


def _recorded_alike(values: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients of simulated ranks, all recorded if one of them is: torch drops the graph of some empty gradients.
    A process knows its own gradient only; there, local calls see to it (`strategy/empty_ranks.py`)."""
    if len(values) == 1 or not any(grad is not None and grad.requires_grad for grad in grads):
        return list(grads)
    return [
        grad + 0 * value if grad is not None and not grad.numel() and grad.shape == value.shape else grad
        for value, grad in zip(values, grads, strict=True)
    ]


def _batch_size(grads: Sequence[torch.Tensor | None]) -> int:
    """How many gradients each of the outputs is given: they are stacked on the first dim."""
    sizes = {None if grad is None or not grad.dim() else grad.shape[0] for grad in grads}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            f"autograd.grad: is_grads_batched wants a stack of equally many gradients for each output in grad_outputs, "
            f"got {[None if grad is None else tuple(grad.shape) for grad in grads]}"
        )
    if 0 in sizes:
        raise IndexError(
            f"autograd.grad: index 0 is out of bounds for dimension 0 with size 0: is_grads_batched with grad_outputs "
            f"{[None if grad is None else tuple(grad.shape) for grad in grads]}; give a stack of at least one gradient"
        )
    return sizes.pop()  # type: ignore[return-value]


def _as_list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _watched(
    inputs: Sequence[torch.Tensor], what: str, roots: Sequence[torch.Tensor | GradientEdge]
) -> list[tuple[torch.Tensor, ...]]:
    """The plain tensors of each input, whose gradients somebody wants to see."""
    _check_nothing_stands_in(inputs, what, roots)
    for tensor in inputs:
        before_watching(tensor, what)
        if isinstance(tensor, Wrapper) and not first_leaf(tensor).is_leaf:
            refuse_pending_product(tensor._layout, what)
    values = lambda x: tuple(unique(x.ranks)) if isinstance(x, RankTensor) else (x,)  # noqa: E731
    return [leaf_values(tensor) if isinstance(tensor, Wrapper) else values(tensor) for tensor in inputs]


def _check_nothing_stands_in(
    inputs: Sequence[torch.Tensor], what: str, roots: Sequence[torch.Tensor | GradientEdge]
) -> None:
    """Raise for a parameter of a data-parallel unit whose forward is in the graph: it computes with other tensors, so
    the parameter itself would look unused, and its gradient be None or zero."""
    stood_in: dict[int, torch.Tensor] = {}
    for tensor in inputs:
        method = tensor.__dict__["_stand_ins"]() if "_stand_ins" in tensor.__dict__ else None
        stood_in |= {id(leaf): tensor for leaf in method()} if method is not None else {}
    found = next((stood_in[id(leaf)] for leaf in _leaves_of(roots) if id(leaf) in stood_in), None) if stood_in else None
    if found is not None:
        raise AutogradError(
            f"{what}: the parameter of shape {tuple(found.shape)} belongs to a unit of fully_shard or data_parallel, "
            f"whose gradients come together in a whole backward pass; call backward() without inputs and read its grad"
        )


def _leaves_of(roots: Sequence[torch.Tensor | GradientEdge]) -> Iterator[torch.Tensor]:
    """The leaves that a backward pass from these roots comes to."""
    waiting: list[Any] = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if node.name() == "torch::autograd::AccumulateGrad":
                yield node.variable


def _gathered_up(
    tensor: torch.Tensor, group: tuple[torch.Tensor, ...], grads: list[torch.Tensor | None], batch: int | None
) -> torch.Tensor | None:
    """The gradient of an input, from those of its plain tensors, the `group`. A simulated rank without a gradient
    counts as zeros."""
    if not isinstance(tensor, (RankTensor, Wrapper)) or all(grad is None for grad in grads):
        return grads[0]
    zeros = lambda value: value.new_zeros(value.shape if batch is None else (batch, *value.shape))  # noqa: E731
    full = [zeros(value) if grad is None else grad for value, grad in zip(group, grads, strict=True)]
    if isinstance(tensor, RankTensor):
        found = dict(zip(map(id, unique(tensor.ranks)), full, strict=True))
        return RankTensor([found[id(value)] for value in tensor.ranks])
    layout = tensor._layout if batch is None else with_batch_dim(tensor._layout, batch)
    return as_gradient(layout, tensor._layout.mesh.comm.rebuild(tensor._local, full))


def _starts(
    tensors: Sequence[torch.Tensor], grads: Sequence[Any], what: str, batch: int | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The plain tensors that a backward pass starts from, and their gradients: `batch` of them, stacked, if it is
    given."""
    roots: list[torch.Tensor] = []
    seeds: list[torch.Tensor | None] = []
    for tensor, grad in zip(tensors, grads, strict=True):
        found = _roots(tensor, grad, what, batch) if isinstance(tensor, Wrapper) else _plain_roots(tensor, grad)
        roots += found[0]
        seeds += found[1]
    return roots, seeds


def _plain_roots(
    tensor: torch.Tensor, seed: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """A tensor that is not distributed; of what simulated ranks hold, the tensor of each of them."""
    if not isinstance(tensor, RankTensor):
        return [tensor], [seed]
    first = {id(value): rank for rank, value in reversed(list(enumerate(tensor.ranks)))}
    at = lambda rank: seed.ranks[rank] if isinstance(seed, RankTensor) else seed  # noqa: E731
    roots = unique(tensor.ranks)
    return roots, [at(first[id(value)]) for value in roots]


def _roots(tensor: Wrapper, seed: Any, what: str, batch: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    layout = tensor._layout
    if layout.mesh.comm.outside:  # nothing to start from, but the move that made it has a gradient to take part in
        return [tensor._local], [torch.zeros_like(tensor._local)]
    if seed is None and math.prod(layout.shape) != 1 and tensor.requires_grad:  # without, torch has other words
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    whole = tensor
    if layout.is_partial and unsummed_axes(layout):
        with torch.enable_grad():  # off in the backward of a checkpoint, which starts a pass of its own
            whole = finished_but_sums(tensor)
    if whole is not tensor and tensor.requires_grad and not whole.requires_grad:
        return _roots_of_parts(tensor, seed, what)
    tensor, layout, comm = whole, whole._layout, layout.mesh.comm
    outs = comm.values(tensor._local)
    if seed is None:
        return list(outs), [torch.ones_like(v) for v in outs]
    local = from_gradient(layout if batch is None else with_batch_dim(layout, batch), seed, what)
    return list(outs), list(comm.pick(comm.structure(tensor._local), local))


def _roots_of_parts(tensor: Wrapper, seed: object, what: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parts of a tensor that a transform of torch.func made and that is over by now, so that it does not record
    their reduction, and what the gradient of the whole is for each of them."""
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    parts = wrap(comm.bind(torch.Tensor.clone)(tensor._local), layout)
    whole, pull = torch.func.vjp(finished_but_sums, parts)  # type: ignore[misc]
    given = torch.ones_like(whole) if seed is None else distributed_gradient(whole._layout, seed, what)
    outs = comm.values(tensor._local)
    return list(outs), list(comm.pick(comm.structure(tensor._local), pull(given)[0]._local))
