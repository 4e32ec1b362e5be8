"""What fits into the slots of a template: the first tensor decides about the others."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from shardwise.testing.spread import is_float
from shardwise.torch_private.tensors import storage_id

Fits = Callable[[torch.Tensor], bool]


class NothingFits(Exception):
    """No tensor of the program, and no new one, fits into a slot."""


class Scope(Protocol):
    """The program that is being written, as slots see it."""

    rng: random.Random
    space: dict[str, Any]

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def any_shape(self, dims: int | None = None) -> tuple[int, ...]: ...

    def new_input(self, shape: Sequence[int], dtype: torch.dtype = torch.float64, grad: bool | None = None) -> str: ...

    def pick(self, fits: Fits, new: bool = True, shape: Sequence[int] | None = None) -> str: ...


class Slots:
    """The slots of one template."""

    def __init__(self, composer: Scope) -> None:
        self.composer, self.rng = composer, composer.rng
        self.first: torch.Tensor | None = None
        self.dim: int | None = None
        self.count = self.rng.randint(0, 4)  # of indices into one dim: those of one statement fit to each other
        self.many = self.composer.any_shape(self.rng.choice([1, 1, 2]))
        self.name = ""
        self.written = False

    def is_tensor(self, kind: str) -> bool:
        return kind in _TENSORS

    def text(self, kind: str, detail: str | None) -> str:
        if kind in _TENSORS:
            return self.tensor(kind)
        if self.first is None:
            raise NothingFits
        return str(getattr(self, f"slot_{kind}")(detail) if kind == "shape" else getattr(self, f"slot_{kind}")())

    def tensor(self, kind: str) -> str:
        if self.name and kind != "b":
            known = self.first
            if known is not None and _TENSORS[kind](known):
                return self.name
        dims = {"m": 2, "q": 2, "v": 1, "t": 3, "img": 4}.get(kind)
        shape = self.composer.any_shape(dims)
        shape = (shape[0],) * 2 if kind == "q" else shape
        fits = _TENSORS[kind]
        if kind == "w":
            self.written = True
            fits = lambda t: is_float(t.dtype) and not overlaps(t)
        if kind in ("i", "b"):
            name = self.pick_or_make(fits, shape, torch.int64 if kind == "i" else torch.bool)
        else:
            name = self.composer.pick(fits, shape=shape)
        if self.first is None:
            self.name, self.first = name, self.composer.space[name]
        return name

    def pick_or_make(self, fits: Fits, shape: Sequence[int], dtype: torch.dtype) -> str:
        found = [name for name, t in self.composer.tensors().items() if fits(t)]
        if found and self.rng.random() < 0.7:
            return self.rng.choice(found)
        return self.composer.new_input(shape, dtype)

    @property
    def x(self) -> torch.Tensor:
        assert self.first is not None
        return self.first

    def slot_dim(self) -> int:
        if self.dim is None:
            self.dim = self.rng.randrange(-self.x.dim(), self.x.dim()) if self.x.dim() else 0
        return self.dim

    def slot_dim2(self) -> int:
        return self.rng.randrange(-self.x.dim(), self.x.dim()) if self.x.dim() else 0

    def slot_y(self) -> str:
        fits = lambda t: t.dtype == self.x.dtype and _broadcast(t, self.x) and self.apart(t)
        return self.pick_or_make(fits, self.smaller(), self.x.dtype)

    def apart(self, t: torch.Tensor) -> bool:
        """Whether a tensor may stand beside the first: what is written must not be read through another name."""
        return not self.written or storage_id(t) != storage_id(self.x)

    def smaller(self) -> tuple[int, ...]:
        """A shape that broadcasts to the first tensor's."""
        shape = [n if self.rng.random() < 0.75 else 1 for n in self.x.shape]
        return tuple(shape[self.rng.choice([0, 0, 0, 1]) :])

    def slot_same(self) -> str:
        alike = lambda t: t.dtype == self.x.dtype and t.shape == self.x.shape and self.apart(t)
        return self.pick_or_make(alike, self.x.shape, self.x.dtype)

    def slot_target(self) -> str:
        alike = lambda t: t.dtype == self.x.dtype and t.shape == self.x.shape and self.apart(t)
        return self.pick_or_make(lambda t: alike(t) and not overlaps(t), self.x.shape, self.x.dtype)

    def slot_mask(self) -> str:
        return self.pick_or_make(lambda t: t.dtype is torch.bool and t.shape == self.x.shape, self.x.shape, torch.bool)

    def indices(self, size: int, shape: Sequence[int]) -> str:
        if not size:
            raise NothingFits
        made = self.composer.new_input(shape, torch.int64)
        return f"({made} % {size})"

    def slot_index(self) -> str:
        dim = self.slot_dim()
        if not self.x.dim():
            raise NothingFits
        return self.indices(self.x.shape[dim], (self.count,))

    def slot_index0(self) -> str:
        if not self.x.dim():
            raise NothingFits
        return self.indices(self.x.shape[0], self.many)

    def slot_index1(self) -> str:
        if self.x.dim() < 2:
            raise NothingFits
        return self.indices(self.x.shape[1], (self.rng.randint(1, 4),))

    def slot_gatherindex(self) -> str:
        dim = self.slot_dim()
        if not self.x.dim():
            raise NothingFits
        return self.indices(self.x.shape[dim], self.x.shape)

    def slot_start(self) -> int:
        dim = self.slot_dim()
        if not self.x.dim() or not self.x.shape[dim]:
            raise NothingFits
        return self.rng.randrange(self.x.shape[dim])

    def slot_one(self) -> int:
        return 1

    def slot_slice(self) -> str:
        low, high = self.rng.choice(["", "1", "2", "-2"]), self.rng.choice(["", "", "-1", "3"])
        return f"{low}:{high}" + self.rng.choice(["", "", ":2", ":3"])

    def slot_perm(self) -> str:
        return ", ".join(map(str, self.rng.sample(range(self.x.dim()), self.x.dim()))) or "()"

    def slot_reshape(self) -> str:
        """Another shape of as many elements."""
        left = self.x.numel()
        shape: list[int] = []
        while left > 1 and len(shape) < 3:
            n = self.rng.choice([d for d in range(1, left + 1) if left % d == 0])
            shape.append(n)
            left //= n
        return str(tuple([*shape, left] if left != 1 or not shape else shape))

    def slot_expand(self) -> str:
        return ", ".join(map(str, [self.rng.choice([1, 2, 3]), *self.x.shape]))

    def slot_repeat(self) -> str:
        dims = self.x.dim() + self.rng.choice([0, 0, 1])
        return ", ".join(str(self.rng.choice([1, 1, 2])) for _ in range(dims)) or "2"

    def slot_strided(self) -> str:
        """Sizes and strides within the memory of a contiguous tensor of this size."""
        n = self.x.numel()
        if n < 2:
            raise NothingFits
        a = self.rng.randint(1, max(1, n // 2))
        step = self.rng.choice([0, 1, 2]) if a > 1 else 1
        b = self.rng.choice([1, 2])
        if (a - 1) * step + (b - 1) >= n:
            raise NothingFits
        return f"({a}, {b}), ({step}, 1)"

    def slot_shape(self, detail: str) -> str:
        """A new input: letters are the sizes of the first tensor, -1 its last."""
        shape = []
        for word in detail.split(","):
            if word in string.ascii_letters:
                shape.append(self.x.shape["abcd".index(word)])
            elif word == "-1":
                if not self.x.dim():
                    raise NothingFits
                shape.append(self.x.shape[-1])
            else:
                shape.append(int(word))
        return self.composer.new_input(shape, self.x.dtype if is_float(self.x.dtype) else torch.float64)


def _broadcast(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a tensor can be broadcast to the other's shape."""
    return a.dim() <= b.dim() and all(n in (1, m) for n, m in zip(reversed(a.shape), reversed(b.shape)))


_real = lambda t: t.dtype.is_floating_point
_TENSORS: dict[str, Fits] = {
    "x": lambda t: True,
    "f": _real,
    "c": lambda t: is_float(t.dtype),
    "i": lambda t: not is_float(t.dtype) and t.dtype is not torch.bool,
    "b": lambda t: t.dtype is torch.bool,
    "m": lambda t: _real(t) and t.dim() == 2,
    "q": lambda t: _real(t) and t.dim() == 2 and t.shape[0] == t.shape[1],
    "v": lambda t: _real(t) and t.dim() == 1,
    "t": lambda t: _real(t) and t.dim() == 3,
    "img": lambda t: _real(t) and t.dim() == 4,
    "w": lambda t: is_float(t.dtype),
}


def overlaps(x: torch.Tensor) -> bool:
    """Whether several elements of a tensor are one number in memory."""
    places = torch.zeros(x.shape, dtype=torch.int64)
    for dim, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        places += (torch.arange(size) * step).view([-1 if d == dim else 1 for d in range(x.dim())])
    return places.unique().numel() < x.numel()
