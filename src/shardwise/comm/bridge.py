"""Autograd nodes at the places where plain tensors become distributed ones and the other way round. Each converts
gradients between the two sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.base import Comm
from shardwise.comm.record import recorders, recording_to
from shardwise.protocols import Ctx, LocalValue, Structure, Tensors
from shardwise.torch_private.autograd import is_recorded, is_transforming
from shardwise.torch_private.tensors import is_zero_tensor, zero_tensor


class _Held:
    """How ranks share the tensors of a local value, before and after a node, and what the node does with the gradient.
    An object and not a tuple, since torch.func takes tuples among a Function's arguments apart."""

    def __init__(
        self, comm: Comm, before: Structure, after: Structure, gradient: Callable[..., Any] | None = None
    ) -> None:
        self.comm, self.before, self.after, self.gradient = comm, before, after, gradient


class _ConvertGradients(torch.autograd.Function):
    """Values pass; gradients go through `convert`, a function of local values."""

    generate_vmap_rule = True

    @staticmethod
    def forward(held: _Held, *values: torch.Tensor) -> Tensors:
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        ctx.held, ctx.recorders = inputs[0], recorders()

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        held = ctx.held
        with recording_to(ctx.recorders):
            back = held.gradient(held.comm.assemble(held.before, grads))
        return None, *held.comm.pick_gradients(held.before, back)

    @staticmethod
    def jvp(ctx: Ctx, _: object, *tangents: torch.Tensor) -> Tensors:
        return tuple(t.view_as(t) for t in tangents)


class _Entered(torch.autograd.Function):
    """The same memory as a tensor that is neither a leaf nor a view of one, so that it may be written to."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Ctx, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.clone()


def entered(value: torch.Tensor) -> torch.Tensor:
    """A leaf of the user's as a tensor that may be written. Gradients of that tensor go back to the leaf."""
    return _Entered.apply(value)


def convert_gradients(comm: Comm, local: LocalValue, convert: Callable[[Any], Any]) -> LocalValue:
    """`local`, whose gradient is converted on its way back."""
    structure = comm.structure(local)
    held = _Held(comm, structure, structure, convert)
    return comm.assemble(structure, _ConvertGradients.apply(held, *comm.values(local)))


class _Regroup(torch.autograd.Function):
    """The same values, shared by other groups of ranks: each group takes the value of its first member. The gradient is
    shared out in reverse."""

    generate_vmap_rule = True

    @staticmethod
    def forward(held: _Held, *values: torch.Tensor) -> Tensors:
        return tuple(v.view_as(v) for v in held.comm.pick(held.after, held.comm.assemble(held.before, values)))

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        ctx.held = inputs[0]

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        held = ctx.held
        back = _Regroup.apply(_Held(held.comm, held.after, held.before), *grads)
        each = range(len(back))
        return None, *held.comm.pick_gradients(each, held.comm.assemble(each, back))

    @staticmethod
    def jvp(ctx: Ctx, _: object, *tangents: torch.Tensor) -> Tensors:
        return _Regroup.forward(ctx.held, *tangents)


def regroup(comm: Comm, local: LocalValue, after: Structure) -> LocalValue:
    """`local` with the tensors shared as the structure `after` says."""
    before = comm.structure(local)
    if before == after:
        return local
    return comm.assemble(after, _Regroup.apply(_Held(comm, before, after), *comm.values(local)))


def own_each(comm: Comm, local: LocalValue) -> LocalValue:
    """A local value in which no two ranks share a tensor, for user code that may treat them differently."""
    return regroup(comm, local, tuple(range(len(comm.structure(local))))) if comm.simulated else local


def share(comm: Comm, local: LocalValue, axes: Sequence[int]) -> LocalValue:
    """A local value in which simulated ranks share one tensor along the Replicate `axes`, as in results of ops.
    Otherwise a call would run once per rank, and would add up the gradient of another operand as often."""
    if not comm.simulated:
        return local
    return regroup(comm, local, comm.structure(comm.first_of_replicas(local, axes)))


def collapse(comm: Comm, local: LocalValue) -> LocalValue:
    """The plain tensor of a Replicate local value; a RankTensor where the groups of a simulated sub-mesh hold different
    ones."""
    if not comm.simulated:
        return local
    found = regroup(comm, local, comm.whole(local))
    values = comm.values(found)
    return values[0] if len(values) == 1 else found


class _Replaced(torch.autograd.Function):
    """A value that takes the place of another one in the graph: its gradient goes to the old one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new.view_as(new)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Ctx, old: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
        return old.view_as(old)


def replaced(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, with the autograd history of `old`."""
    return _Replaced.apply(old, new) if old.requires_grad or is_transforming() else new


class _Constant(torch.autograd.Function):
    """A value that does not change with the tensors it comes from: their gradients are zeros, or there are none."""

    @staticmethod
    def forward(ctx: Ctx, missing: str, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.missing = missing
        ctx.kinds = [(s.shape, s.dtype, s.device) if s.requires_grad else None for s in sources]
        return value.detach()

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.missing:
            raise NotImplementedError(f"the derivative for '{ctx.missing}' is not implemented.")
        zeros = [kind and torch.zeros(kind[0], dtype=kind[1], device=kind[2]) for kind in ctx.kinds]
        return None, None, *zeros


def constant_of(value: torch.Tensor, sources: Sequence[torch.Tensor], missing: str) -> torch.Tensor:
    """`value`, which requires grad as the sources do, though a derivative would be zero. Where torch has no derivative
    for the op, `missing` is its name: a backward pass raises."""
    return _Constant.apply(missing, value, *sources)


class _Beside(torch.autograd.Function):
    """See `beside`."""

    @staticmethod
    def forward(ctx: Ctx, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.number = len(sources)
        return value.detach()

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[None, ...]:
        return (None,) * (1 + ctx.number)


def beside(value: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """`value`, which requires grad because the sources do, though none of it comes from them: they get no gradient."""
    return _Beside.apply(value, *sources)


Kinds = Sequence[tuple[Sequence[int], torch.dtype]]  # the shapes and dtypes of some tensors


class _Zeros(torch.autograd.Function):
    """See `zeros_of`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kinds: Kinds, seen: int, bilinear: bool, *tensors: torch.Tensor) -> Tensors:
        return tuple(tensors[0].new_zeros(shape, dtype=dtype) for shape, dtype in kinds)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: Tensors) -> None:
        _, seen, ctx.bilinear, *tensors = inputs
        ctx.kinds, ctx.own = kinds_of(tensors), kinds_of(output)
        ctx.save_for_backward(*tensors[:seen])

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        if ctx.bilinear:
            return None, None, None, *_ZeroGradients.apply(ctx.kinds, *saved, *grads)
        return None, None, None, *zeros_of(ctx.kinds, (*grads, *saved))

    @staticmethod
    def jvp(ctx: Ctx, *tangents: torch.Tensor | None) -> Tensors:
        some = next(tangent for tangent in tangents if tangent is not None)
        return tuple(some.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.own)


class _ZeroGradients(torch.autograd.Function):
    """The gradients of a product of two tensors, which are zero. That of each depends on the other."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kinds: Kinds, *tensors: torch.Tensor) -> Tensors:
        return tuple(tensors[0].new_zeros(shape, dtype=dtype) for shape, dtype in kinds)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors, given = ctx.saved_tensors, [grad for grad in grads if grad is not None]
        zeros = zeros_of(kinds_of(tensors), (*given, *tensors))
        kept = [grads[1] is not None, grads[0] is not None] + [True] * (len(tensors) - 2)
        return None, *(zero if keep else None for zero, keep in zip(zeros, kept, strict=True))


def kinds_of(tensors: Sequence[torch.Tensor]) -> Kinds:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def zeros_of(kinds: Kinds, tensors: Sequence[torch.Tensor], seen: int | None = None, bilinear: bool = False) -> Tensors:
    """Zeros, for a rank that has nothing to compute with. Autograd takes them for a function of the tensors by one
    node, and their gradients for functions of the first `seen` tensors (all, if it is not said) by one node too. The
    kernels of the other ranks make such graphs, and the moves of the backward pass must be the same on all ranks, in
    the same order.

    Args:
        kinds: The shapes and dtypes of the zeros.
        tensors: What they come from.
        seen: How many of the tensors torch's backward looks at.
        bilinear: Whether they stand for a product of the first two tensors.
    """
    return _Zeros.apply(kinds, len(tensors) if seen is None else seen, bilinear, *tensors)


class _Kept(torch.autograd.Function):
    """See `kept_for_gradient`."""

    @staticmethod
    def forward(ctx: Ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad + zeros_of([(grad.shape, grad.dtype)], [x])[0] if torch.is_grad_enabled() else grad


def kept_for_gradient(x: torch.Tensor) -> torch.Tensor:
    """`x`, whose gradient autograd takes for a function of it: a derivative of that gradient is zeros, and a write to
    `x` before the backward pass is refused."""
    return _Kept.apply(x) if is_recorded(x) and not is_transforming() else x


class _Nothing(torch.autograd.Function):
    """See `nothing_of`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor | None) -> torch.Tensor | None:
        return None if grad is None else _Nothing.apply(grad)

    @staticmethod
    def jvp(ctx: Ctx, tangent: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tangent)


def nothing_of(x: torch.Tensor) -> torch.Tensor:
    """Zeros that are a function of `x` for autograd. Their gradients are zeros, too, whatever comes in (a product with
    0 would keep NaNs). Nothing is saved for the backward pass, so a graph that may be used twice stays so."""
    return _Nothing.apply(x)


class _AlsoOf(torch.autograd.Function):
    """See `also_of`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return value.detach()  # no view, so that it may be written

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[torch.Tensor, torch.Tensor], output: object) -> None:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype = tuple(inputs[1].shape), inputs[1].dtype

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if grad is None:
            return None, None
        if ctx.dtype.itemsize == 1:  # an 8-bit float: a second gradient could not be added to the first
            return grad, None
        if is_zero_tensor(grad):  # it cannot be written: so it is on the ranks that hold elements
            return grad, zero_tensor(ctx.shape, ctx.dtype, grad.device)
        return grad, also_of(grad.new_zeros(ctx.shape, dtype=ctx.dtype), grad)


def also_of(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`value`, in its own memory, that autograd takes for a function of `source` too, whose gradients are zeros. It
    computes nothing, which not every dtype could."""
    return _AlsoOf.apply(value, source)
