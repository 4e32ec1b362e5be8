"""Hooks on the gradient of a tensor of which a rank holds several tiles: the hook sees all of it at once.

The tiles' gradients come one by one. Those of a leaf end in `grad`, so they can wait: each but the last enters as
zeros, and when the last has come the hook is asked and its answer takes their places. Elsewhere in a graph a gradient
cannot wait: there a hook can watch only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.torch_private import will_run

_state = threading.local()


@contextmanager
def asked_later() -> Iterator[None]:
    """Inside, hooks of leaves let gradients pass: autograd.grad gives them to whoever called it, who then asks."""
    saved = getattr(_state, "later", False)
    _state.later = True
    try:
        yield
    finally:
        _state.later = saved


class LeafHooks:
    """The hooks of one leaf: each is a function of the gradients of all parts that gives others, or None."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts, self.asks = list(parts), dict[int, Callable[[list[torch.Tensor]], Any]]()
        self.nodes = [torch.autograd.graph.get_gradient_edge(part).node for part in parts]
        self.come: dict[int, torch.Tensor] = {}
        self.handles: list[Any] = []
        self.count = 0

    def add(self, ask: Callable[[list[torch.Tensor]], Any]) -> Handle:
        if not self.asks:
            self.handles = [part.register_hook(self._on(i)) for i, part in enumerate(self.parts)]
        self.count += 1
        self.asks[self.count] = ask
        return Handle(self, self.count)

    def drop(self, number: int) -> None:
        self.asks.pop(number, None)
        if not self.asks:
            for handle in self.handles:
                handle.remove()

    def _on(self, i: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda grad: self._came(i, grad)

    def _came(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        if getattr(_state, "later", False):
            return grad
        self.come[i] = grad
        awaited = [j for j, node in enumerate(self.nodes) if j not in self.come and will_run(node)]
        if awaited:
            return torch.zeros_like(grad)
        come, self.come = self.come, {}
        given = self.answer([come.get(j) for j in range(len(self.parts))])
        for j in come:
            if j != i:
                _put(self.parts[j], given[j])
        return given[i]

    def answer(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """What the hooks make of the gradients, one after the other."""
        given = [torch.zeros_like(part) if grad is None else grad for grad, part in zip(grads, self.parts)]
        for ask in list(self.asks.values()):
            answer = ask(given)
            given = given if answer is None else list(answer)
        return given


def _put(part: torch.Tensor, grad: torch.Tensor) -> None:
    """Into the place of the zeros."""
    if grad.requires_grad or part.grad is None:
        part.grad = grad if part.grad is None else part.grad + grad
    else:
        with torch.no_grad():
            part.grad.add_(grad)


class Handle:
    """Removes one hook."""

    def __init__(self, hooks: LeafHooks, number: int) -> None:
        self.hooks, self.number = hooks, number

    def remove(self) -> None:
        self.hooks.drop(self.number)
