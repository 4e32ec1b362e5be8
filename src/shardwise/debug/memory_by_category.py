"""What memory is used for over time: parameters, gradients, states of optimizers, and the rest."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.comm.flight import Flight, memory_in_use
from shardwise.wrapper import Wrapper

_EVERY_SECONDS = 0.25  # at most
_SHARE = 0.003  # of the processor time, at most: models of many parameters are looked at less often
_MOST_A_STEP = 8


class MemoryByCategory:
    """Looks at one training step now and then: where the forward pass begins and ends, where the optimizer
    begins (all gradients are there) and ends. What is none of the categories is activations, buffers, and on a CPU the
    program itself."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._tops: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._next, self._left = 0.0, 0  # when a step is looked at again, and how often this one may be looked at yet
        self._began, self._used = time.thread_time(), 0.0  # of this thread: when that was, and what looking took
        self._hooks = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]

    def close(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()

    def forward_begins(self, module: torch.nn.Module) -> None:
        """An outermost module is called."""
        now = time.monotonic()
        if now >= self._next:
            if self._used <= _SHARE * (time.thread_time() - self._began):
                self._left = _MOST_A_STEP
            self._next = now + _EVERY_SECONDS
        if self._left > 0 and next(module.parameters(), None) is not None:
            self._tops.add(module)
            self._look()

    def forward_ends(self) -> None:
        """An outermost module has returned."""
        self._look()

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._left > 0:
            self._optimizers.add(optimizer)
            self._look()

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._look()
        self._left = 0

    def _look(self) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        began = time.thread_time()
        parameters = _distinct(p for module in self._tops for p in module.parameters())
        states = (t for optimizer in self._optimizers for t in _tensors(optimizer.state.values()))
        facts = {
            "at": time.time(),
            "parameters": sum(map(bytes_here, parameters)),
            # a parameter that ZeRO has gathered for the pass is no leaf: asked for its gradient, torch would warn
            "gradients": sum(bytes_here(p.grad) for p in parameters if p.is_leaf and p.grad is not None),
            "optimizer": sum(map(bytes_here, _distinct(states))),
            "in use": memory_in_use(),
        }
        self._flight.say(memory=facts)
        self._used += time.thread_time() - began


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _tensors(states: Iterable[object]) -> Iterator[torch.Tensor]:
    for state in states:
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def bytes_here(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that this process holds."""
    if not isinstance(tensor, Wrapper):
        return tensor.nbytes
    return sum(value.nbytes for value in tensor._layout.mesh.comm.values(tensor._local))
