"""A tensor gathered from its parts that then enters a call which is split. Its gradient is added up for the parts at
once: half the bytes of adding it up for all ranks, who then keep their part.

That way it passes the whole tensor by, so it is taken only if nobody watches the gradient of that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardwise.comm.record import Note
from shardwise.errors import AutogradError
from shardwise.layout import Layout
from shardwise.move import plan_steps
from shardwise.move.limit import current_cap
from shardwise.move.node import run_steps
from shardwise.move.steps import Spread


class _Parts(NamedTuple):
    """What a tensor was gathered from, and as what."""

    local: Any
    layout: Layout
    axis: int
    whole: Any
    version: int


_PASSED_BY = object()


def note_gathered(parts: Any, whole: Any, axis: int) -> None:
    """`whole` is `parts` with every rank along the axis holding all."""
    first = whole._layout.mesh.comm.first(whole._local)
    if first.requires_grad and torch.is_grad_enabled():
        whole._gathered = _Parts(parts._local, parts._layout, axis, whole._local, first._version)


def spread_from_parts(tensor: Any, axes: tuple[tuple[int, ...], ...]) -> Any:
    """The local value of a gathered tensor for calls that are split on these axes, whose gradient goes to its parts;
    None for any other tensor."""
    parts = tensor.__dict__.get("_gathered")
    if not isinstance(parts, _Parts) or axes != ((parts.axis,),) or parts.whole is not tensor._local:
        return None
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    if comm.first(parts.whole)._version != parts.version:
        return None
    values = comm.rebuild(parts.whole, [value.detach() for value in comm.values(parts.whole)])
    entering = Spread(layout, (parts.axis,))
    steps = plan_steps(parts.layout, layout, (parts.axis,), current_cap())
    tensor._gathered = _PASSED_BY
    there = lambda *_: entering.run(comm, values)  # noqa: E731  (the values have come already)
    return run_steps(comm, steps, parts.local, Note("redistribute"), run=there)


def before_watching(tensor: Any, what: str) -> None:
    """Somebody wants to see the gradient of this tensor, so it must come by."""
    found = tensor.__dict__.pop("_gathered", None)
    if found is _PASSED_BY:
        tensor._gathered = found
        raise AutogradError(
            f"{what}: this tensor of shape {tuple(tensor.shape)} was gathered from parts for a module, and the "
            f"gradients of calls that it has entered go to the parts directly; call {what} before its first use, or on "
            f"the tensor that the module was given"
        )
