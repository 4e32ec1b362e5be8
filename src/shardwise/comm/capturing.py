"""Captures under way. A capture sees ops on local tensors by itself. All else that a program does (moves, random fills,
steps of optimizers) is reported to its tape through this file, by the code that does it.

A tape (`captures/tape.py`) is a dispatch mode, so the stack of modes says which tape a thread writes to. Autograd
copies the stack to its own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from shardwise.protocols import Item
from shardwise.torch_private.tensors import dispatch_modes


class Tape(Protocol):
    """What a capture must be told, besides the ops on local tensors."""

    paused: int  # while it is not 0, nothing is written down

    def fill(
        self, name: str, draw: Callable[[], int] | None, put: Callable[..., None], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Draw a key, and run put(key, *tensors), which fills the tensors. This is two statements. Without `draw`,
        put(*tensors) draws itself."""

    def move(
        self, run: Callable[..., Any], comm: Item, steps: Sequence[Any], local: Item, note: Item, to: list[Any]
    ) -> Item:
        """Run a move and write it down as one statement."""

    def is_of_program(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made since the capture began, or has no graph (that could be older)."""

    def number_of(self, tensor: torch.Tensor) -> Item:
        """Give a tensor a number. Called for a leaf before its gradient is used."""

    def set_grad(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """The gradient of a plain tensor was set by a hook of autograd, where no mode sees it."""

    def refuse(self, reason: str) -> None:
        """Give up the capture, since what the program does cannot be written down: it runs eagerly."""

    def begin_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step of an optimizer begins; it is one statement."""

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step has ended."""


settings: list[Callable[[torch.nn.Module], Hashable]] = []
"""Functions that tell how a module is set to run, beside its own attributes; None if they know nothing of it."""

steppers: list[Callable[[torch.optim.Optimizer, Callable[[torch.optim.Optimizer], None]], bool]] = []
"""Functions that step an optimizer on local tensors by what they are given in the place of torch's step; they say
whether they could."""

tapes: list[Tape] = []  # of all threads; nearly always empty, and a warm call checks no more than that


def tape_here() -> Tape | None:
    """The tape that this thread writes on, unless it is paused."""
    for mode in dispatch_modes():
        if mode in tapes:
            return None if mode.paused else mode
    return None


@contextmanager
def unwritten() -> Iterator[None]:
    """In this context, nothing is written down: what is computed here depends on shapes and layouts only."""
    tape = tape_here() if tapes else None
    if tape is None:
        yield
        return
    tape.paused += 1
    try:
        yield
    finally:
        tape.paused -= 1
