"""What must still hold of tensors when a program is run again: memory, gradients that they take, hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from shardwise.autograd.leaves import first_leaf
from shardwise.captures.readings import Reading, Tables
from shardwise.torch_private.autograd import gradient_hook_tables
from shardwise.torch_private.tensors import without_torch_function
from shardwise.wrapper import Wrapper

_OF_WRAPPER = ("_local", "_layout", "_leaf", "_hooks")
_requires_grad, _shape = attrgetter("requires_grad"), attrgetter("shape")


class Tensors:
    """Tensors that were there before: whether they are what they were, and which of them take gradients.

    Args:
        found: Those that the function may read, distributed or plain.
        state: The plain ones that the program reads.
        began: Leaves, and whether they had no gradient when the program began: where it makes a difference.
    """

    def __init__(
        self,
        found: Iterable[torch.Tensor],
        state: Iterable[torch.Tensor],
        began: Sequence[tuple[torch.Tensor, bool]],
    ) -> None:
        found = list(found)
        wrappers = [t for t in found if isinstance(t, Wrapper)]
        self._tables = Reading("a tensor was swapped with another", lambda: list(map(vars, wrappers)))
        self._shaped = [t for t in found if not isinstance(t, Wrapper)]
        tables = list(map(vars, wrappers))
        plain = {id(t): t for t in (first_leaf(t) if isinstance(t, Wrapper) else t for t in found)}
        plain.update((id(t), t) for t in state)
        self._plain, self._began = list(plain.values()), began
        with without_torch_function():
            self._note(tables)

    def _note(self, tables: list[dict[str, Any]]) -> None:
        self._flags = list(map(_requires_grad, self._plain))
        self._shapes = list(map(_shape, self._shaped))
        self._wrappers = Tables()
        for table in tables:
            self._wrappers.add_entries("layout or memory of a tensor", table, _OF_WRAPPER)
        self._wrappers.note()
        leaves = [t for t in self._plain if t.requires_grad]
        self._hooks = [Reading("hooks of a tensor", lambda: gradient_hook_tables(leaves))]
        hooks: list[Any] = [*gradient_hook_tables(leaves), *(table.get("_hooks") for table in tables)]
        self._hooks += [Reading("hooks of a tensor", own.values) for own in hooks if own is not None]

    def changed(self) -> str:
        """What is another than it was; empty if nothing is."""
        with without_torch_function():  # memory that `data_parallel` has given back
            return self._changed()

    def _changed(self) -> str:
        if list(map(_requires_grad, self._plain)) != self._flags:
            return "a tensor takes gradients that did not, or no more"
        if list(map(_shape, self._shaped)) != self._shapes:
            return "a tensor has another shape"
        if reason := self._wrappers.changed():
            return reason
        for reading in (self._tables, *self._hooks):
            reason = reading.changed()
            if reason:
                return reason
        for leaf, had_none in self._began:
            if (leaf.grad is None) is not had_none:
                return "gradients were there, or not"
        return ""


class Arguments:
    """Which arguments that take gradients are tensors that the function knows by another name, and which are not.

    Args:
        given: The plain tensors of the arguments.
        known: Tensors that the function may read, or that the program has read.
    """

    def __init__(self, given: Sequence[torch.Tensor], known: Iterable[torch.Tensor]) -> None:
        self._at = [i for i, t in enumerate(given) if t.requires_grad and t.is_leaf]
        self._known = {}
        if self._at:
            self._known = {id(t): t for t in (first_leaf(t) if isinstance(t, Wrapper) else t for t in known)}
        self._same = [id(given[i]) if id(given[i]) in self._known else None for i in self._at]

    def fit(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether these arguments stand to those tensors as the first ones did."""
        now = [id(given[i]) if id(given[i]) in self._known else None for i in self._at]
        return now == self._same
