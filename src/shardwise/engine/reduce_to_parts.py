"""Gradients that are pending sums and are not summed on all ranks, but reduced straight to the parts of the tensor.

A tensor was gathered from its parts and then enters a call that is split, or leaves by `to_local(grad_placements=
[Partial()])`. In backward its gradient is reduced straight to the parts (a reduce-scatter), which takes half the bytes
of an all-reduce of which each rank keeps its part. A tensor that entered by `from_local(grad_placements=[Partial()])`
has no parts to reduce to: what each rank computes is its part of the gradient, and nothing moves.

The gradient of the whole tensor itself is never computed in this way, so it is done only if the program does not ask
for that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardwise.boundary import enter, other_side
from shardwise.comm.bridge import convert_gradients, own_each, share
from shardwise.comm.record import Note
from shardwise.errors import AutogradError
from shardwise.layout import Layout, Partial
from shardwise.layout.gradient import grad_layout
from shardwise.move import move, plan_steps
from shardwise.move.limit import current_cap
from shardwise.move.run import run_steps
from shardwise.move.steps import Spread
from shardwise.protocols import LocalValue
from shardwise.torch_private.autograd import is_transforming
from shardwise.wrapper import Wrapper


class _Parts(NamedTuple):
    """What a tensor was gathered from, with its version at that time: after a write to it this no longer holds."""

    local: LocalValue
    layout: Layout
    axes: tuple[int, ...]  # on which gradients may come in parts
    whole: LocalValue
    version: int
    for_calls: bool  # whether calls that the tensor enters may take it from the parts


_SKIPPED = object()  # stored in place of _Parts: a gradient has gone straight to the parts, past this tensor


def note_gathered(parts: Wrapper, whole: Wrapper, axes: tuple[int, ...], for_calls: bool) -> None:
    """Remember that `whole` is `parts`, gathered along the axes. A program that gathers a tensor itself may ask for its
    gradient after calls that it has entered, so only what leaves it as parts is reduced to parts then."""
    first = whole._layout.mesh.comm.first(whole._local)
    if axes and first.requires_grad and torch.is_grad_enabled() and not is_transforming():
        whole._gathered = _Parts(parts._local, parts._layout, axes, whole._local, first._version, for_calls)


def gathered_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    """The axes along which a move of a tensor gathers, if it reduces nothing."""
    pairs = list(enumerate(zip(source.placements, target.placements, strict=True)))
    if any(p.is_partial() or q.is_partial() for _, (p, q) in pairs):
        return ()
    return tuple(axis for axis, (p, q) in pairs if p.is_shard() and q.is_replicate())


def spread_from_parts(tensor: Wrapper, axes: tuple[tuple[int, ...], ...]) -> LocalValue | None:
    """The local value of a gathered tensor for calls that are split on these axes, whose gradient goes to its parts.

    Returns None for a tensor that was not gathered along these axes, or was written since."""
    parts = tensor.__dict__.get("_gathered")
    if not isinstance(parts, _Parts) or not parts.for_calls:
        return None
    return _from_parts(tensor, tuple(axis for group in axes for axis in group))


def _from_parts(tensor: Wrapper, axes: tuple[int, ...]) -> LocalValue | None:
    parts = tensor.__dict__.get("_gathered")
    if not isinstance(parts, _Parts) or axes != parts.axes or parts.whole is not tensor._local:
        return None
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    if comm.first(parts.whole)._version != parts.version:
        return None
    tensor._gathered = _SKIPPED
    if parts.layout is layout:  # the tensor was made with from_local, from parts
        return parts.local
    values = comm.rebuild(parts.whole, [value.detach() for value in comm.values(parts.whole)])
    entering = Spread(layout, axes)
    steps = plan_steps(parts.layout, layout, axes, current_cap())
    there = lambda *_: entering.run(comm, values)  # noqa: E731  (forward: the values are here already)
    return run_steps(comm, steps, parts.local, Note("redistribute"), run=there)


# -- in and out --------------------------------------------------------------------------------------------
def _summed(layout: Layout, theirs: Layout) -> tuple[int, ...]:
    """The axes on which a Replicate tensor gets its gradient in parts."""
    pairs = enumerate(zip(layout.placements, theirs.placements, strict=True))
    return tuple(axis for axis, (p, q) in pairs if p.is_replicate() and q.is_partial("sum"))


def leave_with_gradient(tensor: Wrapper, theirs: Layout) -> LocalValue:
    """The local values, for the user. Their gradient comes back laid out as `theirs`."""
    comm, mine, local = tensor._layout.mesh.comm, grad_layout(tensor._layout), tensor._local
    axes = _summed(tensor._layout, theirs)
    parts = _from_parts(tensor, axes) if axes and not is_transforming() else None
    if parts is not None:
        local, mine = parts, mine.placed(dict.fromkeys(axes, Partial()))
    if mine.placements == theirs.placements:
        return other_side(comm, own_each(comm, local))
    note = Note("to_local", backward=True)
    return convert_gradients(comm, own_each(comm, local), lambda grad: move(grad, theirs, mine, note))


def full_with_gradient(local: LocalValue, layout: Layout, whole: Layout, theirs: Layout) -> LocalValue:
    """The whole value, for the user. Its gradient comes back laid out as `theirs`."""
    comm, axes = layout.mesh.comm, _summed(whole, theirs)
    mine = whole.placed(dict.fromkeys(axes, Partial()))
    local = own_each(comm, move(local, layout, whole, Note("full_tensor"), axes))
    if mine.placements == theirs.placements:
        return local
    note = Note("full_tensor", backward=True)
    return convert_gradients(comm, local, lambda grad: move(grad, theirs, mine, note))


def enter_with_gradient(local: LocalValue, layout: Layout, theirs: Layout, of_leaves: bool) -> Wrapper:
    """A local value of the user's as a distributed tensor, which passes back a gradient laid out as `theirs`."""
    comm, mine, axes = layout.mesh.comm, grad_layout(layout), _summed(layout, theirs)
    note = Note("from_local", backward=True)
    made = enter(convert_gradients(comm, local, lambda grad: move(grad, mine, theirs, note)), layout, of_leaves)
    rest = [axis for axis, p in enumerate(theirs.placements) if p.is_replicate()]
    as_it_is = mine.placed(dict.fromkeys(axes, Partial())).placements == theirs.placements
    first = comm.first(made._local)
    if axes and as_it_is and first.requires_grad and torch.is_grad_enabled() and not is_transforming():
        each = comm.each(lambda value, _: value.view_as(value), share(comm, local, rest), axes)
        made._gathered = _Parts(each, layout, axes, made._local, first._version, for_calls=True)
    return made


def before_watching(tensor: torch.Tensor, what: str) -> None:
    """Called when the program asks for the gradient of this tensor: from now on it is computed. Raises if it is too
    late for that."""
    found = tensor.__dict__.pop("_gathered", None)
    if found is _SKIPPED:
        tensor._gathered = found  # type: ignore[attr-defined]
        raise AutogradError(
            f"{what}: the gradients of calls that this tensor of shape {tuple(tensor.shape)} has entered go directly "
            f"to the parts it was gathered from, or out as parts; call {what} before its first use, or on the tensor "
            f"that it was made from"
        )
