"""Autograd nodes where plain tensors enter and leave the typed world: each says what a gradient means on its side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.base import Comm


class _Regrade(torch.autograd.Function):
    """Values pass; gradients go through `convert`, a function of local values."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, structure: Any, convert: Callable[[Any], Any], *values: torch.Tensor) -> Any:
        ctx.comm, ctx.structure, ctx.convert = comm, structure, convert
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back = ctx.convert(ctx.comm.assemble(ctx.structure, grads))
        return None, None, None, *ctx.comm.pick(ctx.structure, back)


def regrade(comm: Comm, local: Any, convert: Callable[[Any], Any]) -> Any:
    """`local`, whose gradient is converted on its way back."""
    structure = comm.structure(local)
    return comm.assemble(structure, _Regrade.apply(comm, structure, convert, *comm.values(local)))


class _OwnEach(torch.autograd.Function):
    """Each rank gets a value of its own; of the gradients, each distinct value takes its first holder's."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, structure: Any, *values: torch.Tensor) -> Any:
        ctx.comm, ctx.structure = comm, structure
        return tuple(values[i].view_as(values[i]) for i in structure)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        every = ctx.comm.assemble(tuple(range(len(grads))), grads)
        return None, None, *ctx.comm.pick(ctx.structure, every)


def own_each(comm: Comm, local: Any) -> Any:
    """A local value in which no two ranks share a tensor, for user code that may treat them differently."""
    structure = comm.structure(local)
    if structure is None or len(set(structure)) == len(structure):
        return local
    outs = _OwnEach.apply(comm, structure, *comm.values(local))
    return comm.assemble(tuple(range(len(outs))), outs)


class _Share(torch.autograd.Function):
    """Of ranks that agree, all get the first one's value; the gradient goes to every one of them."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, before: Any, after: Any, *values: torch.Tensor) -> Any:
        ctx.comm, ctx.before, ctx.after = comm, before, after
        return tuple(v.view_as(v) for v in comm.pick(after, comm.assemble(before, values)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *ctx.comm.pick(ctx.before, ctx.comm.assemble(ctx.after, grads))


def share(comm: Comm, local: Any, axes: Sequence[int]) -> Any:
    """A local value in which simulated ranks share one tensor along the Replicate `axes`, as results of ops do: else a
    tensor that meets it would take part in a call for each rank, and its gradient would be counted as often."""
    if not comm.simulated:
        return local
    before, after = comm.structure(local), comm.structure(comm.first_of_replicas(local, axes))
    return local if before == after else comm.assemble(after, _Share.apply(comm, before, after, *comm.values(local)))


class _Collapse(torch.autograd.Function):
    """The value all ranks agree on, as one plain tensor; its gradient goes to every holder."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        ctx.count = len(values)
        return values[0].view_as(values[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad,) * ctx.count


def collapse(comm: Comm, local: Any) -> torch.Tensor:
    """The plain tensor behind a Replicate local value."""
    values = comm.values(local)
    return values[0] if len(values) == 1 else _Collapse.apply(*values)


class _Joined(torch.autograd.Function):
    """Values pass; the gradients of all ranks come by together, so that a hook can see them as one tensor."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, structure: Any, hooks: Any, *values: torch.Tensor) -> Any:
        ctx.comm, ctx.structure, ctx.hooks = comm, structure, hooks
        return tuple(v.detach() for v in values)  # no views: a step may write to the values later

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        local = ctx.comm.assemble(ctx.structure, grads)
        for hook in list(ctx.hooks.values()):
            local = hook(local)
        return None, None, None, *ctx.comm.values(local)


def joined(comm: Comm, local: Any, hooks: dict[int, Callable[[Any], Any]]) -> Any:
    """`local` behind one node over all ranks, where `hooks` see every rank's gradient at once."""
    structure = comm.structure(local)
    return comm.assemble(structure, _Joined.apply(comm, structure, hooks, *comm.values(local)))
