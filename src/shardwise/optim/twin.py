"""The twin of an optimizer: the same options, but its parameters and state are the local tensors behind the DTensors.

A step on the twin is plain torch's step, foreach and fused kernels included. The optimizer itself keeps DTensors; both
sides share their memory, so after the first step nothing is converted any more.
"""

from __future__ import annotations

from collections import defaultdict
from operator import is_
from typing import Any

import torch

from shardwise.autograd.leaves import leaf_local, leaf_values
from shardwise.engine import aliasing
from shardwise.errors import LayoutError
from shardwise.optim.elementwise import NUMBERS
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap


class Twin:
    """Keeps the local side of one optimizer between steps."""

    def __init__(self, optimizer: Any) -> None:
        self.stand_in = object.__new__(type(optimizer))
        self.state: dict[Any, Any] = defaultdict(dict)
        self.groups: list[tuple[list[Any], list[Any], list[Any]]] = []  # parameters, their slots, local tensors

    def enter(self, optimizer: Any) -> Any:
        """The stand-in, holding what the optimizer holds now."""
        if not self._knows(optimizer.param_groups):
            self._learn(optimizer.param_groups)
        state = optimizer.state
        groups = []
        for group, (params, slots, locals) in zip(optimizer.param_groups, self.groups, strict=True):
            for param, slot in zip(params, slots, strict=True):
                if slot is not None:
                    slot.enter(state.get(param), self.state)
                elif param in state:
                    self.state[param] = state[param]
            inner = {key: _plain(value) for key, value in group.items()}
            inner["params"] = locals
            groups.append(inner)
        own = {key: _plain(value) for key, value in optimizer.__dict__.items()}
        own["state"], own["param_groups"] = self.state, groups
        self.stand_in.__dict__ = own
        return self.stand_in

    def leave(self, optimizer: Any) -> None:
        """What the step made or replaced, back on the optimizer."""
        state = optimizer.state
        for params, slots, _ in self.groups:
            for param, slot in zip(params, slots, strict=True):
                if slot is not None:
                    if slot.values[0] in self.state:
                        slot.leave(state[param], self.state)
                elif param in self.state and param not in state:
                    state[param] = self.state[param]
                if aliasing.COPIES and slot is not None:
                    aliasing.after_write(param)
        for group, inner in zip(optimizer.param_groups, self.stand_in.param_groups, strict=True):
            for key, value in inner.items():
                if key != "params" and value is not group.get(key) and not isinstance(group.get(key), DTensor):
                    group[key] = value

    def _knows(self, groups: Any) -> bool:
        """Whether the parameters are the same tensors as at the last step, with the same memory."""
        if len(groups) != len(self.groups):
            return False
        for group, (params, slots, _) in zip(groups, self.groups, strict=True):
            given = group["params"]
            if len(given) != len(params) or not all(map(is_, given, params)):
                return False
            for param, slot in zip(params, slots, strict=True):
                if slot is not None and not slot.is_of(param):
                    return False
        return True

    def _learn(self, groups: Any) -> None:
        self.state.clear()
        self.groups = []
        for group in groups:
            params = list(group["params"])
            slots = [Slot(p) if isinstance(p, DTensor) else None for p in params]
            locals = [v for p, s in zip(params, slots, strict=True) for v in ((p,) if s is None else s.values)]
            self.groups.append((params, slots, locals))


class Slot:
    """One parameter: its local tensors (one for each distinct value of the ranks played here) and their states."""

    def __init__(self, param: Any) -> None:
        self.local, self.layout = leaf_local(param), param._layout
        self.values = leaf_values(param)
        self.seen: dict[str, tuple[Any, tuple[Any, ...]]] = {}  # by key: both sides of the state after the last step
        self.alike: tuple[list[Any], list[Any]] | None = None  # if nothing changes: what both sides held then

    def is_of(self, param: Any) -> bool:
        own = param.__dict__
        return own.get("_leaf", own["_local"]) is self.local and own["_layout"] is self.layout

    def enter(self, outer: dict[str, Any] | None, state: dict[Any, Any]) -> None:
        """Bring the states of the local tensors to what the optimizer holds for the parameter."""
        if self.alike is not None and outer and _are(outer.values(), self.alike[0]):
            return
        seen, self.alike = self.seen, None
        for key, value in outer.items() if outer else ():
            known = seen.get(key)
            if known is None or known[0] is not value:
                if isinstance(value, DTensor) and value._layout.placements != self.layout.placements:
                    value = outer[key] = value.redistribute(placements=self.layout.placements)  # type: ignore[index]
                parts = self._inward(value)
                for local, part in zip(self.values, parts, strict=True):
                    state[local][key] = part
                seen[key] = (value, parts)
            elif len(known[1]) > 1 and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                for part in known[1][1:]:  # a number someone may have loaded in place
                    part.copy_(value)
        if len(seen) > len(outer or ()):
            for key in [key for key in seen if not outer or key not in outer]:
                del seen[key]
                for local in self.values:
                    state[local].pop(key, None)

    def leave(self, outer: dict[str, Any], state: dict[Any, Any]) -> None:
        """Put what the step made or replaced on the optimizer's side."""
        seen, values = self.seen, self.values
        inner = state[values[0]]
        if self.alike is not None and _are(inner.values(), self.alike[1]):
            return
        for key, value in inner.items():
            known = seen.get(key)
            if known is None or known[1][0] is not value:
                parts = tuple(state[local][key] for local in values)
                outer[key] = made = self._outward(key, parts)
                seen[key] = (made, parts)
        if len(values) == 1:
            self.alike = [*outer.values()], [*inner.values()]

    def _inward(self, value: Any) -> tuple[Any, ...]:
        """A state, for each local tensor."""
        if isinstance(value, DTensor):
            comm = self.layout.mesh.comm
            return comm.pick(comm.structure(self.local), value._local)
        if isinstance(value, torch.Tensor):  # a number: every local tensor counts for itself
            return (value, *(value.clone() for _ in self.values[1:]))
        return (value,) * len(self.values)

    def _outward(self, key: str, parts: tuple[Any, ...]) -> Any:
        """A state as the optimizer shows it, from those of the local tensors."""
        first = parts[0]
        if not isinstance(first, torch.Tensor) or key in NUMBERS or (first.dim() == 0 and self.layout.ndim > 0):
            return first
        for local, part in zip(self.values, parts, strict=True):
            if part.shape != local.shape:
                raise LayoutError(
                    f"optimizer state {key!r} has shape {tuple(part.shape)} where this rank holds {tuple(local.shape)} "
                    f"of a parameter of shape {self.layout.shape}: the optimizer is not elementwise, so it must not be "
                    f"stepped on local tensors; use it without shardwise.optim.local(..., elementwise=True)"
                )
        comm = self.layout.mesh.comm
        return wrap(comm.assemble(comm.structure(self.local), parts), self.layout.replace(dtype=first.dtype))


def _are(values: Any, known: list[Any]) -> bool:
    """Whether these are the same objects in the same order."""
    return len(values) == len(known) and all(map(is_, values, known))


def _plain(value: Any) -> Any:
    """An option or attribute as the twin takes it: numbers given as DTensors (a learning rate, a gradient scale)."""
    return value.full_tensor() if isinstance(value, DTensor) else value
