"""Ops that read memory by strides, and those that say what memory a tensor has. The memory they mean is that of the
whole tensor on one device: every element has its place there, wherever it is held. What a tensor is a part of, it does
not have; an op that would read there raises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.context import relaxed
from shardwise.errors import RuleError
from shardwise.layout import Partial, contiguous_stride
from shardwise.layout.shapes import dense_stride, outermost_first
from shardwise.strategy import Tensor, run_local, whole
from shardwise.strategy.registry import program, refused
from shardwise.strategy.unsaved import rows
from shardwise.wrapper import Wrapper, origin_of, rebind, restride, shares_memory, wrap

Sizes = Sequence[int]


# -- as_strided ------------------------------------------------------------------------------------------------------
# torch's meta kernels are not asked whether a call is right: `places` says so
@program("as_strided", is_checked=False, is_view=True)
def viewed(x: Tensor, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Tensor:
    """A view where all ranks have the whole memory as one device has it; else a copy, which the engine notes."""
    offset = x._offset if storage_offset is None else storage_offset
    comm, layout = x._layout.mesh.comm, x._layout
    if (tuple(size), tuple(stride), offset) == (layout.shape, layout.stride, x._offset):
        return torch.ops.aten.alias(x)  # what it is already
    as_on_one_device = [(v.stride(), v.storage_offset()) == (layout.stride, x._offset) for v in comm.values(x._local)]
    if all(p.is_replicate() for p in layout.placements) and all(as_on_one_device):
        local = comm.bind(torch.as_strided)(x._local, size, stride, offset)
        view: Wrapper = wrap(local, layout.replace(shape=tuple(size), stride=tuple(stride)), offset)
        view._origin = origin_of(x)
        return view
    begins_there = offset == x._offset and layout.stride == dense_stride(layout.shape, layout.stride)
    if begins_there and tuple(stride) == contiguous_stride(size) and 0 < math.prod(size) <= x.numel():
        return in_memory_order(x).view(-1)[: math.prod(size)].view(tuple(size))
    result = picked(x, size, stride, storage_offset)
    restride(result, tuple(stride), offset)
    return result


def in_memory_order(x: Tensor) -> Tensor:
    """A view whose dims are in the order in which they lie in memory."""
    return x.permute(outermost_first(x._layout.stride))


@program("as_strided_copy", is_checked=False)
def picked(x: Tensor, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Tensor:
    """The elements that stand there in memory, in memory of their own."""
    own = (x._layout.shape, x._layout.stride, storage_offset if storage_offset is None else x._offset)
    if (tuple(size), tuple(stride), storage_offset) == own:
        return x.clone(memory_format=torch.contiguous_format)
    at = places(x, size, stride, storage_offset)
    layout = x._layout.replicated(shape=tuple(size))
    read = lambda v: rows(v.reshape(-1), 0, at.flatten().to(v.device)).view(at.shape)
    return run_local(read, [whole(x)], layout)


@program("as_strided_scatter", is_checked=False)
def overwritten(x: Tensor, src: Tensor, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Tensor:
    """A copy with `src` written there; elements that are one in memory are all written."""
    at, own = (places(x, *where) for where in ((size, stride, storage_offset), (x.shape, x._layout.stride, x._offset)))
    if src.shape != torch.Size(size):
        raise RuntimeError(f"expected src to have a size equal to the slice of self, {tuple(size)}, got {src.shape}")
    repeats = not torch.equal(own.flatten(), torch.arange(own.numel()))
    start = 0 if storage_offset is None else storage_offset - x._offset

    def put(v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        if repeats:
            return v.reshape(-1).index_put((at.to(v.device),), s.to(v.dtype))[own.to(v.device)]
        stored = torch.empty_strided(v.shape, x._layout.stride, dtype=v.dtype, device=v.device).copy_(v)
        return torch.as_strided_scatter(stored, s, size, stride, start)  # torch's own, for its gradients

    out = run_local(put, [whole(x), whole(src)], x._layout.replicated())
    restride(out, x._layout.stride, x._offset)
    return out


def places(x: Tensor, size: Sizes, stride: Sizes, offset: int | None) -> torch.Tensor:
    """For every element that stands at (size, stride, offset) in memory, its number among those of `x`, row by row."""
    torch.empty_strided(tuple(size), tuple(stride), device="meta")  # raises torch's own errors
    held = addresses(x.shape, x._layout.stride, x._offset).flatten()
    wanted = addresses(size, stride, x._offset if offset is None else offset)
    order = held.argsort(stable=True)
    rank = torch.searchsorted(held[order], wanted).clamp(max=max(len(held) - 1, 0))
    if wanted.numel() and (not len(held) or not torch.equal(held[order][rank], wanted)):
        raise RuleError(
            f"as_strided to size {tuple(size)}, strides {tuple(stride)}, storage offset {offset} of a tensor of shape "
            f"{tuple(x.shape)}, strides {x._layout.stride}, offset {x._offset} reads memory that is not part of it, "
            f"and a distributed tensor has none; use as_strided on what it is a part of or on a copy, or slices"
        )
    return order[rank] if len(held) else wanted


def addresses(size: Sizes, stride: Sizes, offset: int) -> torch.Tensor:
    """Where the elements of a tensor stand in memory."""
    at = torch.full((), offset)
    for n, step in zip(size, stride, strict=True):
        at = at.unsqueeze(-1) + torch.arange(n) * step
    return at


# -- what memory a tensor has ----------------------------------------------------------------------------------------
@program("resize resize_as", writes=True)
def resize(x: Tensor, *size: object, **kwargs: object) -> Tensor:
    """The elements in the order of memory, as far as there is room; after them zeros, where torch leaves anything."""
    if x.requires_grad:
        raise RuntimeError("cannot resize variables that require grad")
    first: Any = size[0] if size else kwargs.get("size", kwargs.get("the_template"))
    wanted: tuple[Any, ...] = size if isinstance(first, int) else tuple(getattr(first, "shape", first))
    if wanted == tuple(x.shape):
        return x
    stride, room = x._layout.stride, math.prod(wanted)
    if is_part(x) or stride != dense_stride(x.shape, stride) or x._offset:  # the first asks all ranks
        raise RuleError(
            f"resize_ of a distributed tensor from {tuple(x.shape)} to {wanted}: it is part of another; use reshape, "
            f"F.pad or a new tensor"
        )
    if room <= x.numel():  # in the memory that it has, which others may share
        return x.as_strided_(wanted, contiguous_stride(wanted))
    flat = in_memory_order(x).reshape(-1)
    return rebind(x, F.pad(flat, (0, room - flat.numel())).reshape(wanted).detach())  # no view, which cannot be written


def is_part(x: Tensor) -> bool:
    """Whether some rank's local tensor is a part of a larger one. All ranks get the same answer."""
    layout = x._layout.replace(shape=(), dtype=torch.int64, placements=[Partial("max")] * len(x.placements))
    larger = lambda v: torch.tensor(int(v.untyped_storage().nbytes() > v.numel() * v.itemsize), device=v.device)
    with relaxed():
        found = run_local(larger, [x.detach()], layout)
        if layout.mesh.comm.outlined:
            found.full_tensor()  # ranks with values exchange it
            return bool(larger(x._local))
        return bool(found)


@program("is_set_to")
def is_set_to(x: Tensor, other: Tensor) -> bool:
    same = [(t._layout, t._offset) for t in (x, other)]
    return same[0] == same[1] and shares_memory(x, other)


refused("set_", "set_ gives a tensor other memory, and that of this one is on many ranks; use x.data = y")
