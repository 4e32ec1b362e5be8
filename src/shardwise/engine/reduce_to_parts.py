"""A tensor was gathered from its parts and then enters a call that is split. In backward its gradient is reduced
straight to the parts (a reduce-scatter), which takes half the bytes of an all-reduce of which each rank keeps its part.

The gradient of the gathered tensor itself is never computed that way, so it is done only if nobody asks for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardwise.comm.record import Note
from shardwise.errors import AutogradError
from shardwise.layout import Layout
from shardwise.move import plan_steps
from shardwise.move.limit import current_cap
from shardwise.move.run import run_steps
from shardwise.move.steps import Spread
from shardwise.protocols import LocalValue
from shardwise.wrapper import Wrapper


class _Parts(NamedTuple):
    """What a tensor was gathered from, and what it was then: a write to it makes that another value."""

    local: LocalValue
    layout: Layout
    axis: int
    whole: LocalValue
    version: int


_SKIPPED = object()  # in place of _Parts: a gradient goes to the parts, and this tensor will not see it


def note_gathered(parts: Wrapper, whole: Wrapper, axis: int) -> None:
    """Remember that `whole` is `parts`, gathered along the axis."""
    first = whole._layout.mesh.comm.first(whole._local)
    if first.requires_grad and torch.is_grad_enabled():
        whole._gathered = _Parts(parts._local, parts._layout, axis, whole._local, first._version)


def spread_from_parts(tensor: Wrapper, axes: tuple[tuple[int, ...], ...]) -> LocalValue | None:
    """The local value of a gathered tensor for calls that are split on these axes, whose gradient goes to its parts.

    Returns None for a tensor that was not gathered along these axes, or was written since."""
    parts = tensor.__dict__.get("_gathered")
    if not isinstance(parts, _Parts) or axes != ((parts.axis,),) or parts.whole is not tensor._local:
        return None
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    if comm.first(parts.whole)._version != parts.version:
        return None
    values = comm.rebuild(parts.whole, [value.detach() for value in comm.values(parts.whole)])
    entering = Spread(layout, (parts.axis,))
    steps = plan_steps(parts.layout, layout, (parts.axis,), current_cap())
    tensor._gathered = _SKIPPED
    there = lambda *_: entering.run(comm, values)  # noqa: E731  (forward: the values are here already)
    return run_steps(comm, steps, parts.local, Note("redistribute"), run=there)


def before_watching(tensor: torch.Tensor, what: str) -> None:
    """Somebody asks for the gradient of this tensor: from now on it is computed. Raises if it is too late for that."""
    found = tensor.__dict__.pop("_gathered", None)
    if found is _SKIPPED:
        tensor._gathered = found  # type: ignore[attr-defined]
        raise AutogradError(
            f"{what}: this tensor of shape {tuple(tensor.shape)} was gathered from parts for a module, and the "
            f"gradients of calls that it has entered go to the parts directly; call {what} before its first use, or on "
            f"the tensor that the module was given"
        )
