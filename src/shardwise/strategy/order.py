"""Ops that keep the order of numbers, or turn it around: the greatest of some, after such an op, is the greatest (or
the least) of what the op makes of each. Each function here says which way an op goes for the arguments of one call.

Only ops that give NaN for NaN alone and never for a number are among them: the square root of the least of a negative
and a positive number is a number, the least of their square roots is not."""

from __future__ import annotations

import cmath
from collections.abc import Callable

import torch

from shardwise.wrapper import Wrapper

UP, DOWN, NEITHER = 1, -1, 0


def rising(name: str, *args: object, **kwargs: object) -> int:
    """A greater operand never has a smaller result."""
    return UP


def rising_alone(name: str, x: torch.Tensor, *args: object, **kwargs: object) -> int:
    """As `rising`, where nothing else is said: to round to 400 decimals is to multiply by infinity."""
    return NEITHER if args or kwargs else UP


def of_the_same(kind: str) -> Callable[..., int]:
    """For extremes along dims: the greatest of greatest values is one."""

    def way(name: str, x: Wrapper, *args: object, **kwargs: object) -> int:
        return UP if all(not p.is_partial() or p.is_partial(kind) for p in x._layout.placements) else NEITHER

    return way


def falling(name: str, x: torch.Tensor, *args: object, **kwargs: object) -> int:
    """A greater operand never has a greater result. The least integer is its own negative."""
    return DOWN if x.dtype.is_floating_point else NEITHER


def rising_by(name: str, x: torch.Tensor, *numbers: object, **kwargs: object) -> int:
    """For slopes and scales: where they are positive and finite."""
    given = [n for n in (*numbers, *kwargs.values()) if not isinstance(n, bool)]  # not `inplace`
    return UP if all(_is_finite(n) and n > 0 for n in given) else NEITHER  # type: ignore[operator]


def rising_threshold(name: str, x: object, threshold: float, value: float, *args: object, **kwargs: object) -> int:
    """What lies below the threshold must not come out above it."""
    return UP if _is_finite(threshold) and _is_finite(value) and value <= threshold else NEITHER


def added(name: str, x: object, other: object, *args: object, **kwargs: object) -> int:
    """A sum or difference with a number. Integers wrap around; infinities of both signs have no sum."""
    if args or kwargs or not isinstance(x, torch.Tensor) or not _is_finite(other, x.dtype):
        return NEITHER
    return DOWN if "rsub" in name else UP


def scaled(name: str, x: object, other: float, *args: object, **kwargs: object) -> int:
    """A product with a number, or a quotient by one. Zero times infinity is no number, nor is zero over zero; and
    what divides may be one over the number, times."""
    if args or kwargs or not isinstance(x, torch.Tensor) or not _is_finite(other, x.dtype) or other == 0:
        return NEITHER
    return NEITHER if not _is_finite(1 / other, x.dtype) else UP if other > 0 else DOWN


def _is_finite(number: object, dtype: torch.dtype = torch.float64) -> bool:
    """Whether it is a number, and a finite one among those of `dtype`."""
    return dtype.is_floating_point and isinstance(number, (int, float)) and abs(number) <= torch.finfo(dtype).max


def is_endless(*values: object) -> bool:
    """Whether a number among the arguments is infinite: parts of both signs times infinity have no sum."""
    return any(isinstance(v, (float, complex)) and cmath.isinf(v) for v in values)
