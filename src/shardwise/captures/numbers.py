"""The numbers of tensors in a program, for as long as the tensors live."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch.utils.weak import TensorWeakRef

from shardwise.captures.program import Ref


class Numbers:
    """Tensors to numbers, by identity, without keeping the tensors alive.

    torch's own `WeakTensorKeyDictionary` makes a reference for every look-up and takes an entry out when its tensor
    dies, which is most of what writing an op down would cost. Here an entry of a dead tensor stays until another one
    gets its id, and counts for nobody.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], Ref]] = {}

    def __setitem__(self, tensor: torch.Tensor, ref: Ref) -> None:
        self._found[id(tensor)] = weakref.ref(tensor), ref

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.get(tensor) is not None

    def get(self, tensor: torch.Tensor) -> Ref | None:
        """The number of a tensor; None if it has none."""
        found = self._found.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def items(self) -> Iterator[tuple[torch.Tensor, Ref]]:
        """The tensors that are alive, with their numbers."""
        for key, ref in list(self._found.values()):
            alive = key()
            tensor = None if alive is None else TensorWeakRef(alive)()  # one that only C++ held is Python's again
            if tensor is not None:
                yield tensor, ref
