"""How results lie in memory, where torch's meta kernels say it otherwise than its other kernels do.

The strides that a distributed tensor reports are those that plain torch has for the whole tensor. A meta call tells
them; where it is known to be wrong, a correction that stands beside the op's rule mends what it said. The proof
compares the strides of every result with plain torch's, and so finds what is missing here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.layout import Layout
from shardwise.layout.shapes import contiguous_stride
from shardwise.strategy.registry import SPELLINGS
from shardwise.torch_private.tensors import schema_of, storage_id

Correction = Callable[..., None]  # (the result on meta tensors, the call's arguments): changes the result's strides
C = TypeVar("C", bound=Correction)


class _Registered(NamedTuple):
    correct: Correction
    when: Callable[..., bool]  # whether it is about a call with these arguments


# by the name of an op and the kind of device whose kernels it is about; None: any
_corrections: dict[tuple[str, str | None], _Registered] = {}
_SMALL = 2**12  # elements


def stored(
    names: str, device: str | None = None, when: Callable[..., bool] = lambda *args, **kwargs: True
) -> Callable[[C], C]:
    """Register the function below as the correction for these ops (names separated by spaces), if need be only for the
    kernels of one kind of device, or only for calls whose arguments `when` is true of."""

    def register(function: C) -> C:
        _corrections.update({(name, device): _Registered(function, when) for name in names.split()})
        return function

    return register


def correct_memory(
    func: Callable[..., object], device: str, result: object, args: Sequence[object], kwargs: dict[str, Any]
) -> None:
    """Give the results of a call on meta tensors the strides that they have on this kind of device."""
    schema = schema_of(func)
    name = schema.name.removeprefix("aten::") if schema is not None else getattr(func, "__name__", "")
    names = name, SPELLINGS.get(name, name).removeprefix("special_")
    found = (_corrections.get((spelled, kind)) for spelled in names for kind in (device, None))
    known = next(filter(None, found), None)
    if known is not None and known.when(*args, **kwargs):
        known.correct(result, *args, **kwargs)
    if schema is None or schema.name.startswith("aten::"):
        correct_thin(func, device, result, args, kwargs)


def correct_thin(
    func: Callable[..., object], device: str, result: object, args: Sequence[object], kwargs: dict[str, Any]
) -> None:
    """Correct the strides of results with dims of size 0 or 1. Meta kernels follow no known rule there, so torch's
    other kernels are asked: on small tensors this costs next to nothing. For large tensors the strides of meta kernels
    stay; they do not say where elements are, since such a dim has one element at most."""
    thin = [out for out in tensors_among(result) if not {0, 1}.isdisjoint(out.shape)]
    if not any(device == "cpu" or not out.numel() for out in thin):
        return
    given = tensors_among(args, kwargs)
    if max((t.numel() for t in given), default=0) > _SMALL or not {"device", "generator", "out"}.isdisjoint(kwargs):
        return
    zeros = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_() if t.is_meta else t
    real_args, real_kwargs = tree_map_only(torch.Tensor, zeros, (tuple(args), kwargs))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            real = tensors_among(func(*real_args, **real_kwargs))
    except (RuntimeError, IndexError):  # a call that refuses zeros, as a Cholesky decomposition
        return
    memory = {storage_id(t) for t in given}
    for out, like in zip(tensors_among(result), real, strict=False):
        if out.shape == like.shape and storage_id(out) not in memory:
            restrided(out, like.stride())


def meta_like(layout: Layout) -> torch.Tensor:
    """A meta tensor of the global shape."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def restrided(meta: torch.Tensor, stride: Sequence[int]) -> None:
    """Give a new meta tensor other strides."""
    if meta.stride() != tuple(stride):
        meta.as_strided_(meta.shape, tuple(stride))


def formatted(meta: torch.Tensor, memory_format: torch.memory_format) -> None:
    """Give a new meta tensor the strides of a memory format."""
    restrided(meta, torch.empty(meta.shape, device="meta", memory_format=memory_format).stride())


def copied_stride(
    shape: Sequence[int], stride: Sequence[int], memory_format: torch.memory_format | None = None
) -> tuple[int, ...]:
    """The strides of a clone of a tensor."""
    like = torch.empty_strided(shape, stride, device="meta")
    return like.clone(memory_format=memory_format or torch.preserve_format).stride()


def stored_as(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The same values in memory with these strides, which a dim of equal slices may have as 0; `value` itself if it has
    them."""
    if value.stride() == tuple(stride):
        return value
    out = torch.empty_strided(value.shape, tuple(stride), dtype=value.dtype, device=value.device)
    if 0 not in stride:
        return out.copy_(value)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
    out[once].copy_(value[once])
    return out


def iterated(shape: Sequence[int], operands: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The strides of what one of torch's elementwise kernels makes: the order of its dims in memory is that of the
    first operand that tells two of them apart.

    Args:
        shape: Of the result.
        operands: The strides of each operand, for every dim of the result: 0 where it is broadcast.

    >>> iterated((2, 3), [(0, 0), (1, 2)])
    (1, 2)
    """

    def comes_after(a: int, b: int) -> int:
        for stride in operands:
            if stride[a] and stride[b]:
                if stride[a] != stride[b]:
                    return 1 if stride[a] > stride[b] else -1
                if shape[a] > shape[b]:
                    return 1
        return 0

    order = list(range(len(shape)))[::-1]  # the innermost first
    for i in range(1, len(order)):
        for before in range(i - 1, -1, -1):
            says = comes_after(order[before], order[i])
            if says > 0:
                order[before], order[i], i = order[i], order[before], before  # noqa: PLW2901
            elif says < 0:
                break
    if order == list(range(len(shape)))[::-1]:
        return contiguous_stride(shape)
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def suggested(x: torch.Tensor) -> torch.memory_format:
    """The memory format that torch's kernels see in strides (`suggest_memory_format` in C++)."""
    order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(len(x.shape))
    stride = x.stride()
    if order is None or not stride[1]:
        return torch.contiguous_format
    least = 0
    for d in order:
        if not x.shape[d] or stride[d] < least or (d == 0 and least == stride[1]):
            return torch.contiguous_format
        least = stride[d] * max(x.shape[d], 1)
    return torch.channels_last if len(order) == 4 else torch.channels_last_3d


def tensors_among(*values: object) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def like_a_sum(result: object, *args: object, **kwargs: object) -> None:
    """As that of every elementwise kernel of two operands."""
    some = [torch.empty_strided(t.shape, t.stride(), device="meta") for t in tensors_among(args, kwargs)]
    for out in tensors_among(result):
        restrided(out, (torch.add(*some) if len(some) == 2 else torch.neg(some[0])).stride())


def contiguous(result: object, *args: object, **kwargs: object) -> None:
    """Without holes, row by row."""
    for out in tensors_among(result):
        formatted(out, torch.contiguous_format)


def like_a_clone(result: torch.Tensor, x: torch.Tensor, *args: object, **kwargs: object) -> None:
    """As a clone of the first operand, where the result has its shape."""
    if result.shape == x.shape:
        restrided(result, copied_stride(x.shape, x.stride()))


def as_first_suggests(result: object, x: torch.Tensor, *args: object, **kwargs: object) -> None:
    """In the memory format of the first operand, if the first result has as many dims."""
    out = tensors_among(result)[0]
    formatted(out, suggested(x) if out.dim() == x.dim() else torch.contiguous_format)
