"""Hooks on distributed tensors: they see the gradient of the whole tensor, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.autograd.gradients import (
    as_gradient,
    from_gradient,
    gradient_of_parts,
    refuse_pending_product,
    unsummed_axes,
)
from shardwise.autograd.leaves import first_leaf, leaf_values
from shardwise.autograd.meeting import edge_of, meeting_of
from shardwise.comm.rank_surface import Handles
from shardwise.engine.reduce_to_parts import before_watching
from shardwise.protocols import LocalValue
from shardwise.wrapper import Wrapper

Hook = Callable[[Any], torch.Tensor | None]


def register_hook(tensor: Wrapper, hook: Hook) -> RemovableHandle:
    """The hook sees the gradient as a distributed tensor, whole, and may replace it."""
    if not first_leaf(tensor).requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    before_watching(tensor, "register_hook")
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    refuse_pending_product(layout, "register_hook")
    held = _Held(tensor) if unsummed_axes(layout) else None

    def on_local(local: LocalValue | None) -> LocalValue | None:
        if local is None:  # no gradient came by, which torch tells hooks too
            hook(None)
            return None
        result = hook(as_gradient(layout, local))
        if result is None:
            return local
        if held is None:
            return from_gradient(layout, result, "hook")
        return gradient_of_parts(layout, held.parts(), result, "hook")

    parts, structure = leaf_values(tensor), comm.structure(tensor._local)
    if len(parts) == 1:  # one graph: a rank of a process group, or simulated ranks that share their value

        def on_part(grad: torch.Tensor | None) -> torch.Tensor | None:
            if grad is None:
                return on_local(None)
            return comm.pick(structure, on_local(comm.assemble(structure, [grad])))[0]

        edge_of(parts[0])  # torch crashes if the tensor is a view that was written through another one
        return parts[0].register_hook(on_part)
    waiting = meeting_of(comm, structure, parts)
    handle = RemovableHandle(waiting.hooks)
    waiting.hooks[handle.id] = on_local
    return handle


class _Held:
    """What the ranks held when a hook was registered."""

    def __init__(self, tensor: Wrapper) -> None:
        comm, local = tensor._layout.mesh.comm, tensor._local
        self._parts = comm.rebuild(local, [value.detach() for value in comm.values(local)])
        self._first = comm.first(self._parts)
        self._version = self._first._version

    def parts(self) -> LocalValue:
        if self._first._version != self._version:
            raise RuntimeError(
                "a hook replaces the gradient of a pending reduction that has been modified by an inplace operation "
                "since: how its parts share the gradient depends on the values that they had"
            )
        return self._parts


def register_post_accumulate_grad_hook(tensor: Wrapper, hook: Callable[[Any], None]) -> Handles:
    """The hook runs once the gradient of the whole tensor has been accumulated."""
    parts = leaf_values(tensor)
    if not parts[0].is_leaf:
        raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    arrived: set[int] = set()

    def on_part(value: torch.Tensor) -> None:
        arrived.add(id(value))
        if len(arrived) == len(parts):
            arrived.clear()
            return hook(tensor)  # torch raises if it is something
        return None

    return Handles([value.register_post_accumulate_grad_hook(on_part) for value in parts])
