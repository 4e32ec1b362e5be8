"""Gradients that wait: inside of `no_sync` they add up on each rank, and a later backward pass reduces them.

The optimizer sees the parameters' own gradients, not those of the leaves. So each parameter with a gradient that waits
gets a gradient of zeros and a mark, which `optim` refuses to step on; and if the program replaces or clears that
gradient (`zero_grad`), what waits is dropped too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.parallel.data.parameter import ManagedParameter


def mark_unreduced(parameters: Iterable[ManagedParameter]) -> None:
    """Remember the gradients that the optimizer sees while the leaves have some that are not in them."""
    for p in parameters:
        if any(leaf.grad is not None for leaf in p.leaves):
            p.unreduced = []
            for value in p.values:
                if value.grad is None:
                    value.grad = torch.zeros_like(value)
                p.unreduced.append((value.grad, value.grad._version))
            p.param._unreduced = True  # type: ignore[attr-defined]


def forget_marks(parameters: Iterable[ManagedParameter]) -> None:
    """Everything is reduced."""
    for p in parameters:
        if p.unreduced is not None:
            _unmark(p)


def drop_what_was_cleared(parameters: Iterable[ManagedParameter]) -> None:
    """Drop the gradients that wait where the program has cleared or replaced those that it sees."""
    for p in parameters:
        if p.unreduced is not None and not all(
            value.grad is grad and grad._version == version
            for value, (grad, version) in zip(p.values, p.unreduced, strict=True)
        ):
            _unmark(p)
            for leaf in p.leaves:
                leaf.grad = None


def _unmark(p: ManagedParameter) -> None:
    p.unreduced = None
    p.param.__dict__.pop("_unreduced", None)
