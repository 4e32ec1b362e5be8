"""Captures under way. What ops on local tensors do not show (moves, random fills, steps of optimizers) is reported to
the tape here by the code that does it.

A tape (`captures/tape.py`) is a dispatch mode, so the stack of modes says which one a thread writes on; autograd takes
the stack along to its own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from shardwise.protocols import Item
from shardwise.torch_private.tensors import dispatch_modes


class Tape(Protocol):
    """What a capture is told besides the ops on local tensors."""

    paused: int  # while it is not 0, nothing is written down

    def fill(
        self, name: str, draw: Callable[[], int] | None, put: Callable[..., None], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Draw a key, and run put(key, *tensors), which fills the tensors: two statements. Without `draw`, it is
        put(*tensors) that draws."""

    def move(
        self, run: Callable[..., Any], comm: Item, steps: Sequence[Any], local: Item, note: Item, to: list[Any]
    ) -> Item:
        """Run a move and write it down as one statement."""

    def is_of_program(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made since the capture began, or has no graph that could be older."""

    def number_of(self, tensor: torch.Tensor) -> Item:
        """Know a tensor: a leaf, before something is done with its gradient."""

    def set_grad(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """The gradient of a plain tensor was set by a hook of autograd, where no mode sees it."""

    def refuse(self, reason: str) -> None:
        """What goes on cannot be written down: the program runs eagerly."""

    def begin_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step of an optimizer begins; it is one statement."""

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step has ended."""


settings: list[Callable[[torch.nn.Module], Hashable]] = []
"""Functions that tell how a module is set to run, beside its own attributes; None if they know nothing of it."""

steppers: list[Callable[[torch.optim.Optimizer, Callable[[torch.optim.Optimizer], None]], bool]] = []
"""Functions that step an optimizer on local tensors by what they are given in the place of torch's step; they say
whether they could."""

tapes: list[Tape] = []  # of all threads; empty nearly always, which is all that a warm path asks


def tape_here() -> Tape | None:
    """The tape that this thread writes on, unless it is paused."""
    for mode in dispatch_modes():
        if mode in tapes:
            return None if mode.paused else mode
    return None


@contextmanager
def unwritten() -> Iterator[None]:
    """Inside, nothing is written down: what is found out here holds as long as shapes and layouts do."""
    tape = tape_here() if tapes else None
    if tape is None:
        yield
        return
    tape.paused += 1
    try:
        yield
    finally:
        tape.paused -= 1
