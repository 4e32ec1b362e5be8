"""Modules that a call changes in place: as they were, if it fails; and parameters that it replaced are remembered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Replaced(NamedTuple):
    """A parameter that no module has any more: who replaced it, under which name it stood, and its gradient then."""

    by: str
    name: str
    grad: Callable[[], torch.Tensor | None]
    version: int

    def is_unused_since(self, param: torch.Tensor) -> bool:
        """Whether it has got no gradient since. One that has is used by another module, which may train it."""
        grad = param.grad
        return grad is None or (grad is self.grad() and grad._version == self.version)


_replaced = WeakIdKeyDictionary()
_replacements = 0


@contextmanager
def unchanged_on_error(root: nn.Module, by: str) -> Iterator[None]:
    """If what is inside raises, every module in `root` has the parameters, buffers, hooks and attributes of before.

    Else the parameters that it replaced are remembered: an optimizer that still has one raises, and names `by`."""
    before = [(module, dict(module.__dict__)) for module in root.modules()]
    tables = [(table, table.copy()) for _, values in before for table in values.values() if isinstance(table, dict)]
    named = dict(root.named_parameters())
    try:
        yield
    except BaseException:
        for module, values in before:
            module.__dict__.clear()
            module.__dict__.update(values)
        for table, entries in tables:
            table.clear()
            table.update(entries)
        raise
    kept = {id(param) for param in root.parameters()}
    for name, param in named.items():
        if id(param) not in kept:
            _remember(param, name, by)


def _remember(param: torch.Tensor, name: str, by: str) -> None:
    global _replacements
    _replacements += 1
    grad = param.grad
    if grad is None:
        _replaced[param] = Replaced(by, name, lambda: None, 0)
    else:
        _replaced[param] = Replaced(by, name, weakref.ref(grad), grad._version)


def count_replaced() -> int:
    """How many parameters were replaced so far."""
    return _replacements


def replaced(param: torch.Tensor) -> Replaced | None:
    """What became of a parameter that was replaced; None of another one."""
    return _replaced.get(param)
