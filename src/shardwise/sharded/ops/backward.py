"""`torch.autograd.backward` and `grad` from and to sharded tensors: a pass starts from all tiles of a rank at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.sharded.autograd import call_hooks, hooks_called_later
from shardwise.sharded.ops.registry import own
from shardwise.sharded.tensor import ShardedTensor, parts_of

_backward, _grad = torch.autograd.backward, torch.autograd.grad


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _starts(tensors: Sequence[Any], given: Any, what: str) -> tuple[list[Any], list[Any]]:
    """Return the plain tensors a backward pass starts from, and their gradients."""
    grads = [None] * len(tensors) if given is None else _listed(given)
    roots: list[Any] = []
    seeds: list[Any] = []
    for tensor, grad in zip(tensors, grads):
        if not isinstance(tensor, ShardedTensor):
            roots.append(tensor)
            seeds.append(grad)
            continue
        if grad is None and tensor.numel() != 1:
            raise RuntimeError(f"{what}: grad can be implicitly created only for scalar outputs")
        if grad is not None and not isinstance(grad, ShardedTensor):
            raise TypeError(f"{what}: the gradient of a ShardedTensor must be one too, got {type(grad).__name__}")
        roots += tensor._parts
        seeds += [torch.ones_like(p) for p in tensor._parts] if grad is None else grad._in_tiles_of(tensor)._parts
    return roots, seeds


@own(torch.autograd.backward)
def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    tensors = _listed(tensors)
    roots, seeds = _starts(tensors, grad_tensors, "backward")
    leaves = None if inputs is None else [p for x in _listed(inputs) for p in parts_of(x)]
    _backward(roots, seeds, retain_graph, create_graph, inputs=leaves)


@own(torch.autograd.grad)
def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    outputs, inputs = _listed(outputs), _listed(inputs)
    roots, seeds = _starts(outputs, grad_outputs, "grad")
    with hooks_called_later():
        found = list(_grad(roots, [p for x in inputs for p in parts_of(x)], seeds, *args, **kwargs))
    create_graph = kwargs.get("create_graph", args[1] if len(args) > 1 else False)
    result: list[Any] = []
    for x in inputs:
        mine = [found.pop(0) for _ in parts_of(x)]
        if not isinstance(x, ShardedTensor):
            result += mine
        elif all(g is None for g in mine):
            result.append(None)
        else:
            with torch.set_grad_enabled(create_graph):
                result.append(x._with_parts(call_hooks(x, mine)))
    return tuple(result)
