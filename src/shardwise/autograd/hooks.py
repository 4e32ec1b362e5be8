"""Hooks on distributed tensors: they see the gradient of the whole tensor, once."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.autograd.gradients import as_gradient, check_is_told, from_gradient, gradient_of_parts, unsummed_axes
from shardwise.autograd.leaves import first_leaf, leaf_local, leaf_values
from shardwise.comm.bridge import joined
from shardwise.engine.reduce_to_parts import before_watching
from shardwise.errors import AutogradError
from shardwise.protocols import LocalValue
from shardwise.wrapper import Wrapper

Hook = Callable[[Any], torch.Tensor | None]


def register_hook(tensor: Wrapper, hook: Hook) -> RemovableHandle | Handles:
    """The hook sees the gradient as a distributed tensor, whole, and may replace it."""
    if not first_leaf(tensor).requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    before_watching(tensor, "register_hook")
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    check_is_told(layout, "register_hook")
    held = _Held(tensor) if unsummed_axes(layout) else None

    def on_local(local: LocalValue) -> LocalValue:
        result = hook(as_gradient(layout, local))
        if result is None:
            return local
        if held is None:
            return from_gradient(layout, result, "hook")
        return gradient_of_parts(layout, held.parts(), result, "hook")

    parts, structure = leaf_values(tensor), comm.structure(leaf_local(tensor))
    if len(parts) == 1:  # one graph: a rank of a process group, or simulated ranks that share their value

        def on_part(grad: torch.Tensor | None) -> torch.Tensor | None:
            if grad is None:  # none came by, which torch tells hooks too
                hook(None)
                return None
            return comm.pick(structure, on_local(comm.assemble(structure, [grad])))[0]

        return parts[0].register_hook(on_part)
    hooks = tensor._hooks
    if hooks is None:
        if tensor._local.used:  # type: ignore[attr-defined]
            return _register_late(parts, lambda grads: hook(as_gradient(layout, comm.assemble(structure, grads))))
        hooks = OrderedDict()
        tensor._leaf = tensor._local
        tensor._local, tensor._hooks = joined(comm, tensor._local, hooks), hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = on_local
    return handle


class _Held:
    """What the ranks held when a hook was registered."""

    def __init__(self, tensor: Wrapper) -> None:
        comm, local = tensor._layout.mesh.comm, leaf_local(tensor)
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


def _register_late(parts: Sequence[torch.Tensor], hook: Callable[[list[torch.Tensor]], Any]) -> Handles:
    """A hook on simulated ranks whose values are in use already. It sees the gradients once the last one is there; it
    cannot replace them, because the others have been passed on by then."""
    arrived: dict[int, torch.Tensor] = {}

    def on_part(i: int, grad: torch.Tensor) -> None:
        arrived[i] = grad
        if len(arrived) == len(parts) and hook([arrived.pop(j) for j in range(len(parts))]) is not None:
            raise AutogradError(
                "register_hook: a hook that replaces the gradient must be registered before the first use of the "
                "tensor on a simulated mesh, where the ranks' gradients meet in a node that only later uses go through"
            )

    return Handles([part.register_hook(functools.partial(on_part, i)) for i, part in enumerate(parts)])


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
            hook(tensor)

    return Handles([value.register_post_accumulate_grad_hook(on_part) for value in parts])


class Handles:
    """Several handles removed as one."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
