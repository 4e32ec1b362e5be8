"""Views that a single rank had to copy, because the strides of its local tensor differ from those of the whole tensor:
it was made by a kernel for an odd shard, or received from other ranks. Each rank repeats a write to such a copy on the
tensor it was made from, and a write to that tensor on the copy. Nothing is communicated.

Until the first such copy is made, nothing is stored and a write costs nothing extra.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from shardwise.torch_private.tensors import storage_id


class _Pair(NamedTuple):
    source: torch.Tensor  # the tensor that was copied; the copy keeps it alive, as a view keeps its base alive
    copy: weakref.ref[torch.Tensor]
    again: Callable[[torch.Tensor], torch.Tensor]  # makes a copy of another tensor


LOCAL_COPIES: dict[int, list[_Pair]] = {}  # by the storage of the source, and by that of the copy


def view_or_copy(view: Callable[..., torch.Tensor], copy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Call `view`; where torch refuses it for the strides of a rank's tensor, call `copy` and note its result."""

    def call(x: torch.Tensor, *args: object) -> torch.Tensor:
        try:
            return view(x, *args)
        except RuntimeError:  # if it has another cause, `copy` raises it again
            out = copy(x, *args)
            note_local_copy(x, out, lambda other: copy(other, *args))
            return out

    return call


def note_local_copy(source: torch.Tensor, copy: torch.Tensor, again: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Note that `copy` is to be written with `source`, and the other way round."""
    keys = {storage_id(source), storage_id(copy)}
    pair = _Pair(source, weakref.ref(copy, functools.partial(_forget, keys)), again)
    for key in keys:
        LOCAL_COPIES.setdefault(key, []).append(pair)


def source_of_local_copy(storage: int) -> int:
    """If the tensor in this storage is a copy: the storage of its source. Else this storage."""
    for pair in LOCAL_COPIES.get(storage, ()):
        copy = pair.copy()
        if copy is not None and storage_id(copy) == storage != storage_id(pair.source):
            return source_of_local_copy(storage_id(pair.source))
    return storage


def _forget(keys: Iterable[int], _: object) -> None:
    for key in keys:
        alive = [pair for pair in LOCAL_COPIES.get(key, ()) if pair.copy() is not None]
        if alive:
            LOCAL_COPIES[key] = alive
        else:
            LOCAL_COPIES.pop(key, None)


def after_local_write(written: Iterable[torch.Tensor]) -> None:
    """Repeat a write to these local tensors on their sources and on their copies."""
    todo, done = [storage_id(value) for value in written], set[int]()
    while todo:
        storage = todo.pop()
        done.add(storage)
        for pair in LOCAL_COPIES.get(storage, ()):
            copy = pair.copy()
            if copy is None:
                continue
            source = pair.source
            other = storage_id(source) if storage_id(copy) == storage else storage_id(copy)
            if other in done:
                continue
            if storage_id(copy) == storage:
                source.copy_(_as_source(copy, source))
            else:
                copy.copy_(pair.again(source))
            todo.append(other)


def _as_source(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The elements of a copy under the shape and dtype of what it was made from."""
    if copy.dtype == source.dtype:
        return copy.reshape(source.shape)
    if source.dtype.is_complex and not copy.dtype.is_complex and copy.dtype == source.dtype.to_real():
        return torch.view_as_complex(copy.contiguous()).reshape(source.shape)
    if copy.dtype.is_complex and copy.dtype.to_real() == source.dtype:
        return torch.view_as_real(copy).reshape(source.shape)
    return copy.contiguous().view(source.dtype)
