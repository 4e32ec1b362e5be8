"""One distributed parameter of an optimizer, its local tensors, and the state that both sides keep for it."""

from __future__ import annotations

from collections.abc import Collection
from operator import is_
from typing import Any

import torch

from shardwise.autograd.leaves import leaf_local, leaf_values
from shardwise.errors import LayoutError
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

State = dict[Any, Any]  # an optimizer's state: for each parameter a dict, and what else an optimizer keeps there
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})  # one for a whole parameter: plain tensors, as torch has them


class Slot:
    """One parameter: its local tensors (one for each distinct value of the ranks of this process) and their states."""

    def __init__(self, param: DTensor) -> None:
        self.local, self.layout = leaf_local(param), param._layout
        self.values: tuple[torch.Tensor, ...] = leaf_values(param)
        self.seen: dict[str, tuple[Any, tuple[Any, ...]]] = {}  # by key: both sides of the state after the last step
        self._unchanged: tuple[list[Any], list[Any]] | None = None  # what both sides held after a step: the short cut

    def is_of(self, param: torch.Tensor) -> bool:
        """Whether the parameter still has the memory and layout it had when this was made."""
        own = param.__dict__
        return own.get("_leaf", own["_local"]) is self.local and own["_layout"] is self.layout

    def enter(self, outer: dict[str, Any] | None, state: State) -> None:
        """Bring the states of the local tensors to what the optimizer holds for the parameter."""
        if self._unchanged is not None and outer and _are(outer.values(), self._unchanged[0]):
            return
        seen, self._unchanged = self.seen, None
        if outer is not None:
            for local in self.values:
                state.setdefault(local, {})
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
                    state.get(local, {}).pop(key, None)

    def leave(self, outer: dict[str, Any], state: State) -> None:
        """Put what the step made, replaced or removed on the optimizer's side."""
        seen, values = self.seen, self.values
        inner = state[values[0]]
        if self._unchanged is not None and _are(inner.values(), self._unchanged[1]):
            return
        for key, value in inner.items():
            known = seen.get(key)
            if known is None or known[1][0] is not value:
                parts = tuple(state[local][key] for local in values)
                outer[key] = made = self._outward(key, parts)
                seen[key] = (made, parts)
        for key in seen.keys() - inner.keys():
            del seen[key]
            outer.pop(key, None)
        if len(values) == 1:
            self._unchanged = [*outer.values()], [*inner.values()]

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


def _are(values: Collection[Any], known: list[Any]) -> bool:
    """Whether these are the same objects in the same order."""
    return len(values) == len(known) and all(map(is_, values, known))
