"""Autograd nodes where plain tensors enter and leave the typed world: each says what a gradient means on its side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.base import Comm
from shardwise.comm.record import recorders, recording_to


class _ConvertGradients(torch.autograd.Function):
    """Values pass; gradients go through `convert`, a function of local values."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, structure: Any, convert: Callable[[Any], Any], *values: torch.Tensor) -> Any:
        ctx.comm, ctx.structure, ctx.convert, ctx.recorders = comm, structure, convert, recorders()
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with recording_to(ctx.recorders):
            back = ctx.convert(ctx.comm.assemble(ctx.structure, grads))
        return None, None, None, *ctx.comm.pick_gradients(ctx.structure, back)


def convert_gradients(comm: Comm, local: Any, convert: Callable[[Any], Any]) -> Any:
    """`local`, whose gradient is converted on its way back."""
    structure = comm.structure(local)
    return comm.assemble(structure, _ConvertGradients.apply(comm, structure, convert, *comm.values(local)))


class _Regroup(torch.autograd.Function):
    """The same values, shared by other ranks: each group takes its first member's. The gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, before: Any, after: Any, *values: torch.Tensor) -> Any:
        ctx.comm, ctx.before, ctx.after = comm, before, after
        return tuple(v.view_as(v) for v in comm.pick(after, comm.assemble(before, values)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back = _Regroup.apply(ctx.comm, ctx.after, ctx.before, *grads)
        each = range(len(back))
        return None, None, None, *ctx.comm.pick_gradients(each, ctx.comm.assemble(each, back))


def regroup(comm: Comm, local: Any, after: Any) -> Any:
    """`local` with the tensors shared as the structure `after` says."""
    before = comm.structure(local)
    if before == after:
        return local
    return comm.assemble(after, _Regroup.apply(comm, before, after, *comm.values(local)))


def own_each(comm: Comm, local: Any) -> Any:
    """A local value in which no two ranks share a tensor, for user code that may treat them differently."""
    return regroup(comm, local, tuple(range(len(comm.structure(local))))) if comm.simulated else local


def share(comm: Comm, local: Any, axes: Sequence[int]) -> Any:
    """A local value in which simulated ranks share one tensor along the Replicate `axes`, as results of ops do: else a
    tensor that meets it would take part in a call for each rank, and its gradient would be counted as often."""
    if not comm.simulated:
        return local
    return regroup(comm, local, comm.structure(comm.first_of_replicas(local, axes)))


def collapse(comm: Comm, local: Any) -> torch.Tensor:
    """The plain tensor behind a Replicate local value."""
    if not comm.simulated:
        return local
    return comm.values(regroup(comm, local, (0,) * len(comm.structure(local))))[0]


class _Replaced(torch.autograd.Function):
    """Another value in the place of one; the gradient is the old one's."""

    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new.view_as(new)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def replaced(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, with the autograd history of `old`."""
    return _Replaced.apply(old, new) if old.requires_grad else new


class _Constant(torch.autograd.Function):
    """A value that does not change with the tensors it comes from: their gradients are zeros, or there are none."""

    @staticmethod
    def forward(ctx: Any, missing: str, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.missing = missing
        ctx.kinds = [(s.shape, s.dtype, s.device) if s.requires_grad else None for s in sources]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.missing:
            raise NotImplementedError(f"the derivative for '{ctx.missing}' is not implemented.")
        zeros = [kind and torch.zeros(kind[0], dtype=kind[1], device=kind[2]) for kind in ctx.kinds]
        return None, None, *zeros


def constant_of(value: torch.Tensor, sources: Sequence[torch.Tensor], missing: str) -> torch.Tensor:
    """`value`, which requires grad as the sources do, though a derivative would be zero. Where torch has no derivative
    for the op, `missing` is its name: a backward pass raises."""
    return _Constant.apply(missing, value, *sources)


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
