"""Indexing. Basic indices are selects, slices and new dims; tensor indices look up in dims that are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.rules.pointwise import broadcast
from shardwise.rules.registry import rule
from shardwise.rules.slicing import clipped, select, slice_
from shardwise.rules.spec import Algorithm, Factors, Operand
from shardwise.rules.view import dim_of, unsqueeze

Action = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]  # rule, function, arguments


def _is_tensor(index: Any) -> bool:
    return isinstance(index, (torch.Tensor, Operand, list)) or type(index) is bool


def spelled_out(index: Any, ndim: int) -> list[Any]:
    """The index as a list with one entry a dim (besides None), the ellipsis written as full slices."""
    entries = list(index) if isinstance(index, tuple) else [index]
    used = 0
    for entry in entries:
        if entry is None or entry is Ellipsis or type(entry) is bool:
            continue
        is_mask = isinstance(entry, (torch.Tensor, Operand)) and entry.dtype in (torch.bool, torch.uint8)
        used += entry.ndim if is_mask else 1
    where = next((i for i, e in enumerate(entries) if e is Ellipsis), None)
    fill = [slice(None)] * max(ndim - used, 0)
    if where is None:
        return entries + fill
    return [*entries[:where], *fill, *entries[where + 1 :]]


def basic_actions(
    entries: Sequence[Any], shape: Sequence[int], keep_selected: bool = False
) -> tuple[list[Action], list[Any]]:
    """The selects, slices and new dims of an index, and what is left: one tensor index or None a dim of the result.

    With `keep_selected` an integer becomes a slice of one, so that the result is always a view of the operand.
    """
    actions: list[Action] = []
    left: list[Any] = []
    dim = read = 0
    for entry in entries:
        if entry is None:
            actions.append((unsqueeze, torch.unsqueeze, (dim,)))
            left.append(None)
            dim += 1
        elif isinstance(entry, slice):
            n = shape[read]
            if entry.step is not None and entry.step <= 0:
                raise ValueError(f"step must be greater than zero, got {entry.step} in {entry}")
            if entry != slice(None) and clipped(entry.start, entry.stop, entry.step or 1, n) != (0, n, 1):
                actions.append((slice_, torch.ops.aten.slice, (dim, entry.start, entry.stop, entry.step or 1)))
            left.append(None)
            dim, read = dim + 1, read + 1
        elif isinstance(entry, int) and type(entry) is not bool:
            n = shape[read]
            if not -n <= entry < n:
                raise IndexError(f"index {entry} is out of bounds for dimension {read} with size {n}")
            if keep_selected:
                at = entry % n
                actions.append((slice_, torch.ops.aten.slice, (dim, at, at + 1, 1)))
                left.append(None)
                dim += 1
            else:
                actions.append((select, torch.select, (dim, entry)))
            read += 1
        else:
            left.append(entry)
            is_mask = isinstance(entry, (torch.Tensor, Operand)) and entry.dtype in (torch.bool, torch.uint8)
            width = entry.ndim if is_mask else 1
            dim, read = dim + width, read + width
    return actions, left


@rule("__getitem__")
def getitem(x: Any, index: Any) -> Any:
    if not isinstance(x, Operand):
        return Algorithm(lambda x, index: torch.ops.aten.index(x, _index_list(index, x.ndim)))
    actions, left = basic_actions(spelled_out(index, x.ndim), x.shape)
    if all(entry is None for entry in left):
        if len(actions) == 1:
            return actions[0][0](x, *actions[0][2])
        if not actions:
            return Algorithm(lambda x, index: x.alias() if hasattr(x, "alias") else x.view(x.shape))
    return Algorithm(take_item)


def _index_list(index: Any, ndim: int) -> list[Any]:
    return [None if isinstance(e, slice) else e for e in spelled_out(index, ndim)]


def take_item(x: Any, index: Any) -> Any:
    actions, left = basic_actions(spelled_out(index, x.dim()), x.shape)
    for _, function, arguments in actions:
        x = function(x, *arguments)
    if any(entry is not None for entry in left):
        x = torch.ops.aten.index(x, _as_tensors(left, x))
    return x


def _as_tensors(entries: Sequence[Any], like: Any) -> list[Any]:
    return [e if e is None or isinstance(e, torch.Tensor) else torch.as_tensor(e, device=like.device) for e in entries]


@rule("__setitem__")
def setitem(x: Any, index: Any, value: Any) -> Any:
    return Algorithm(put_item, writes=True)


def put_item(x: Any, index: Any, value: Any) -> None:
    """Write through a view where the index is basic, with index_put_ where it is not."""
    entries = spelled_out(index, x.dim())
    if any(_is_tensor(entry) for entry in entries):
        return _put_at_tensors(x, entries, value)
    view = x
    for _, function, arguments in basic_actions(entries, x.shape, keep_selected=True)[0]:
        view = function(view, *arguments)
    if not isinstance(value, torch.Tensor):
        view.fill_(value)
        return None
    for dim, entry in enumerate(entries):  # the value has no dim where an integer was
        at = value.dim() - (len(entries) - dim - 1)
        if isinstance(entry, int) and at >= 0:
            value = value.unsqueeze(at)
    if view.dim() < value.dim():
        value = value.reshape(value.shape[value.dim() - view.dim() :])
    view.copy_(value.to(view.dtype) if value.dtype != view.dtype else value)
    return None


def _put_at_tensors(x: Any, entries: list[Any], value: Any) -> None:
    value = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    value = value.to(x.dtype)
    if x.dim() == 0:  # the only index left is a mask: whether to write at all
        x.copy_(torch.where(_as_tensors(entries, x)[0], value, x))
        return
    entries = [torch.tensor(e, device=x.device) if type(e) is int else e for e in entries]
    actions, left = basic_actions(entries, x.shape)
    view = x
    for _, function, arguments in actions:
        view = function(view, *arguments)
    torch.ops.aten.index_put_(view, _as_tensors(left, view), value)


@rule("index")
def index(x: Operand, indices: Sequence[Any]) -> Factors | None:
    """Indexed dims are whole; the others, and the dims of the indices, pass."""
    found = [i for i in indices if i is not None]
    if not found or not all(isinstance(i, Operand) and i.dtype not in (torch.bool, torch.uint8) for i in found):
        return None
    where = [d for d, i in enumerate(indices) if i is not None]
    looked = broadcast(found)
    names = [None if d in where else f"x{d}" for d in range(x.ndim)]
    together = where == list(range(where[0], where[-1] + 1))
    at = where[0] if together else 0
    kept = [n for d, n in enumerate(names) if d not in where]
    outs = [*kept[:at], *looked.outputs[0], *kept[at:]]
    return Factors([tuple(names), *looked.inputs], [tuple(outs)], linear="each", joint=frozenset({0}))


@rule("index_select")
def index_select(x: Operand, dim: int, index: Operand) -> Factors:
    d = dim_of(dim, x.ndim)
    names = [None if i == d else f"x{i}" for i in range(x.ndim)]
    outs = ["i" if i == d else n for i, n in enumerate(names)]
    where = ("i",) if index.ndim and x.ndim else (None,) * index.ndim  # of a 0-d tensor: one index, for every rank
    return Factors([tuple(names), where], [tuple(outs)], linear="each", joint=frozenset({0}))


@rule("gather take_along_dim")
def gather(x: Operand, dim: Any, index: Any = None, **kwargs: Any) -> Factors | None:
    """Dims beside `dim` are looked up position by position: they pass where both have the same size."""
    if isinstance(dim, Operand) or not isinstance(index, Operand) or x.ndim != index.ndim or not x.ndim:
        return None
    d = dim_of(dim, x.ndim)
    same = [i != d and x.shape[i] == index.shape[i] for i in range(x.ndim)]
    mine = tuple(f"x{i}" if ok else None for i, ok in enumerate(same))
    theirs = tuple("i" if i == d else f"x{i}" if ok else None for i, ok in enumerate(same))
    return Factors([mine, theirs], [theirs], linear="each", joint=frozenset({0}))
