"""Shapes and strides: of broadcasting, and of tensors without holes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that these broadcast to. (torch has one too, which imports sympy first.)

    >>> broadcast_shape((2, 1, 4), (3, 1))
    (2, 3, 4)
    """
    columns = itertools.zip_longest(*map(reversed, shapes), fillvalue=1)
    return tuple(next((n for n in column if n != 1), 1) for column in columns)[::-1]


@lru_cache(maxsize=4096)
def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape whose last dim is the innermost in memory.

    >>> contiguous_stride((2, 3, 4))
    (12, 4, 1)
    """
    return _contiguous_stride(tuple(shape))


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without holes, with the dims in memory in the order they have under the strides `like`.

    >>> dense_stride((2, 3, 4), like=(20, 1, 5))
    (12, 1, 3)
    """
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def outermost_first(stride: Sequence[int], dims: Iterable[int] | None = None) -> list[int]:
    """Dims (None: all) in the order in which they lie in memory; among equal strides as they are given.

    >>> outermost_first((1, 12, 4))
    [1, 2, 0]
    """
    return sorted(range(len(stride)) if dims is None else dims, key=lambda d: -stride[d])


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether these strides leave no holes and repeat nothing; dims of one index do not count.

    >>> is_dense((2, 1, 3), (1, 9, 2)), is_dense((2, 3), (6, 2)), is_dense((2, 3), (0, 1))
    (True, False, False)
    """
    step = 1
    for s, n in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if n and s != step:
            return False
        step *= n
    return True
