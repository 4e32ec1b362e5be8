"""How arguments, results and saved tensors of a Function stand among the flat values of its node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from shardwise.autograd.gradients import as_gradient, from_gradient
from shardwise.comm.rank_tensor import RankTensor, unique
from shardwise.engine.plain_tensors import replicated_plain
from shardwise.wrapper import Wrapper, wrap


class Form:
    """How one argument, result or saved tensor stands among the flat values of the node: here, as itself."""

    count = 1

    def __init__(self, value: object) -> None:
        self.is_tensor = isinstance(value, torch.Tensor)
        self.empty = [_kind(value)] if isinstance(value, torch.Tensor) else []

    def flat(self, value: object) -> Sequence[Any]:
        return (value,)

    def value(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    def gradient(self, parts: Sequence[Any], materialize: bool) -> Any:
        """The gradient as the user's code sees it."""
        if all(part is None for part in parts) and not (materialize and self.empty):
            return None
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self.empty)
        return self._gradient([zero if part is None else part for part, zero in zip(parts, zeros, strict=True)])

    def _gradient(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    def flat_gradient(self, grad: torch.Tensor | None, what: str) -> Sequence[torch.Tensor | None]:
        """The gradient as autograd takes it."""
        return (grad.full_tensor() if isinstance(grad, Wrapper) else grad,)  # type: ignore[attr-defined]


class Distributed(Form):
    """A distributed tensor, which stands among the flat values as its local tensors."""

    is_tensor = True

    def __init__(self, value: Wrapper) -> None:
        self.layout = value._layout
        self.comm = self.layout.mesh.comm
        self.structure = self.comm.structure(value._local)
        self.empty = [_kind(part) for part in self.flat(value)]
        self.count = len(self.empty)

    def flat(self, value: Wrapper) -> Sequence[torch.Tensor]:
        return self.comm.values(value._local)

    def value(self, parts: Sequence[torch.Tensor]) -> Wrapper:
        return wrap(self.comm.assemble(self.structure, parts), self.layout)

    def _gradient(self, parts: Sequence[torch.Tensor]) -> Wrapper:
        return as_gradient(self.layout, self.comm.assemble(self.structure, parts))

    def flat_gradient(self, grad: torch.Tensor | None, what: str) -> Sequence[torch.Tensor | None]:
        if grad is None:
            return (None,) * self.count
        if not isinstance(grad, Wrapper):
            grad = replicated_plain(grad, self.layout.mesh)
        if _expands(self.layout.shape, grad.shape):
            grad = grad.sum_to_size(self.layout.shape)
        return self.comm.pick_gradients(self.structure, from_gradient(self.layout, grad, what))


class _OfRanks(Form):
    """What simulated ranks hold: it stands among the flat values as the tensors of all of them."""

    is_tensor = True

    def __init__(self, value: RankTensor) -> None:
        parts = self.flat(value)
        numbers = {id(part): i for i, part in enumerate(parts)}
        self.structure = [numbers[id(v)] for v in value.ranks]
        self.empty, self.count = [_kind(part) for part in parts], len(parts)

    def flat(self, value: RankTensor) -> Sequence[torch.Tensor]:
        return unique(value.ranks)

    def value(self, parts: Sequence[torch.Tensor]) -> RankTensor:
        return RankTensor([parts[i] for i in self.structure])

    _gradient = value

    def flat_gradient(self, grad: torch.Tensor | None, what: str) -> Sequence[torch.Tensor | None]:
        if grad is None:
            return (None,) * self.count
        each = grad.ranks if isinstance(grad, RankTensor) else (grad,) * len(self.structure)
        return [each[self.structure.index(i)] for i in range(self.count)]


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of `shape` expands to the shape `to`: torch allows gradients of expanded tensors."""
    tail = to[len(to) - len(shape) :]
    return shape != to and len(shape) == len(tail) and all(a in (1, b) for a, b in zip(shape, tail, strict=True))


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.device


def form_of(value: object) -> Form:
    if isinstance(value, RankTensor):
        return _OfRanks(value)
    return Distributed(value) if isinstance(value, Wrapper) else Form(value)


def flattened(values: Iterable[Any], forms: Sequence[Form]) -> list[Any]:
    return [part for form, value in zip(forms, values, strict=True) for part in form.flat(value)]


def by_form(forms: Sequence[Form], flat: Sequence[Any]) -> list[Sequence[Any]]:
    """The flat values of each form."""
    values = iter(flat)
    return [tuple(islice(values, form.count)) for form in forms]
