"""Results of captured calls that are still to be differentiated.

In an eager run two calls share what brings the gradients of a parameter together: the gradients of both uses are added
up on every rank, and then the ranks add up theirs, once. A backward program does the second by itself, so that the sum
of two of them is rounded otherwise. Where the results of two calls wait at the same time, the function runs eagerly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from gc import collect as collect_garbage
from typing import Protocol

import torch

TOGETHER = (
    "the result of an earlier call may still be differentiated, together with this one; capture the whole step, with "
    "its backward pass"
)


class Function(Protocol):
    """A captured function, or a part of one."""

    is_together: bool  # whether its results were there to be differentiated together with others: it runs eagerly


class Pending:
    """What one call leaves for a backward pass; it lives as long as the graph does.

    Attributes:
        is_done: Whether a backward pass has come by.
        owner: The function that was called.
    """

    __slots__ = ("__weakref__", "_sources", "is_done", "owner")

    def __init__(self, sources: frozenset[int], owner: Function) -> None:
        self._sources, self.owner, self.is_done = sources, owner, False
        _alive.add(self)

    def meets(self, sources: frozenset[int]) -> bool:
        """Whether a call with these sources of gradients would share some."""
        return not self.is_done and not self._sources.isdisjoint(sources)

    def watch(self, results: Iterable[torch.Tensor]) -> None:
        """Wait for the backward pass of results of an eager run."""

        def passed(gives: object, takes: object) -> None:
            self.is_done = True

        for node in {t.grad_fn: None for t in results if t.grad_fn is not None}:
            node.register_hook(passed)


_alive: weakref.WeakSet[Pending] = weakref.WeakSet()


def sources_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """What tells calls that share some of these tensors."""
    return frozenset(map(id, tensors))


def is_any_waiting(sources: frozenset[int]) -> bool:
    """Whether the result of another call waits for a backward pass to some of these tensors. Functions of such calls
    run eagerly from then on."""
    if not sources or not any(other.meets(sources) for other in _alive):
        return False
    collect_garbage()  # graphs that nobody can reach any more: they would be there on some ranks only
    met = [other for other in _alive if other.meets(sources)]
    for other in met:
        other.owner.is_together = True
    return bool(met)
