"""Indexing. Basic indices are selects, slices and new dims. Tensor indices look up: in a dim that is cut every rank
answers for the indices it holds and gives zeros for the others, so that the answers add up."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.errors import dim_from_front
from shardwise.layout.shapes import broadcast_shape, contiguous_stride
from shardwise.layout.split import Intervals
from shardwise.rules.data_dependent import select_masked
from shardwise.rules.pointwise import broadcast
from shardwise.rules.view import clipped, select, slice_, unsqueeze
from shardwise.strategy import Algorithm, Answer, Factors, Operand, Tensor, factors
from shardwise.strategy.indices import is_mask, one_number, spelled_out
from shardwise.strategy.lookup import adds_up, by_holders, located, located_all, pointable, sum_of
from shardwise.strategy.memory import correct_memory, iterated, restrided, stored
from shardwise.strategy.registry import program, rule
from shardwise.wrapper import Wrapper, restride, shares_memory

Action = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]  # rule, function, arguments


def basic_actions(entries: Sequence[Any], shape: Sequence[int], keep: bool = False) -> tuple[list[Action], list[Any]]:
    """The selects (with `keep`, slices of one: always views), slices and new dims of an index; and what is left for
    each dim of the result: a tensor or None."""
    actions: list[Action] = []
    left: list[Any] = []
    dim = read = 0
    for entry in entries:
        if isinstance(entry, int) and type(entry) is not bool:
            n = shape[read]
            if not -n <= entry < n:
                raise IndexError(f"index {entry} is out of bounds for dimension {read} with size {n}")
            if keep:
                entry = slice(entry % n, entry % n + 1)
        if entry is None or type(entry) is bool or (is_mask(entry) and not entry.ndim):  # a new dim, masked or not
            actions.append((unsqueeze, torch.unsqueeze, (dim,)))
            entry = torch.tensor(entry) if type(entry) is bool else entry
            left.append(entry.reshape(1) if isinstance(entry, torch.Tensor) else entry)
            dim += 1
        elif isinstance(entry, slice):
            n, step = shape[read], 1 if entry.step is None else entry.step
            if step <= 0:
                raise ValueError(f"step must be greater than zero, got {step} in {entry}")
            if clipped(entry.start, entry.stop, step, n) != (0, n, 1):
                actions.append((slice_, torch.ops.aten.slice, (dim, entry.start, entry.stop, step)))
            left.append(None)
            dim, read = dim + 1, read + 1
        elif isinstance(entry, int):
            actions.append((select, torch.select, (dim, entry)))
            read += 1
        else:
            left.append(entry)
            width = entry.ndim if is_mask(entry) else 1
            dim, read = dim + width, read + width
    return actions, left


def viewed(x: Tensor, actions: Sequence[Action]) -> Tensor:
    return functools.reduce(lambda view, action: action[1](view, *action[2]), actions, x)


@rule("__getitem__")
def getitem(x: object, index: object) -> Answer:
    if isinstance(x, Operand):  # else a plain tensor, at indices that are distributed
        actions, left = basic_actions(spelled_out(index, x.ndim), x.shape)
        if all(entry is None for entry in left) and len(actions) < 2:
            return actions[0][0](x, *actions[0][2]) if actions else Algorithm(lambda x, index: x.view(x.shape))
    return Algorithm(take_item, is_checked=not asks_whether(index))


def asks_whether(index: object) -> bool:
    """Whether a mask without dims is an index: torch asks for its value, to see if it is true, and not to take it for a
    number, nor for Python's True, at which a value of any dtype may be written."""
    entries = index if isinstance(index, tuple) else (index,)
    return any(is_mask(e) and not e.ndim for e in entries)


def take_item(x: Tensor, index: Any) -> Tensor:
    actions, left = basic_actions(spelled_out(index, x.dim()), x.shape)
    view = viewed(x, actions)
    at = [e if e is None else torch.as_tensor(e, device=x.device) for e in left]
    return view if all(e is None for e in at) else torch.ops.aten.index(view, at)


def put_item(x: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """Write through a view where the index is basic, with index_put_ where it is not."""
    entries = spelled_out(index, x.dim())
    if any(isinstance(entry, torch.Tensor) or type(entry) is bool for entry in entries):
        entries = [int(e) if one_number(e) else e for e in entries]
        picks = [i for i, e in enumerate(entries) if isinstance(e, (torch.Tensor, int))]
        if picks[-1] - picks[0] == len(picks) - 1:  # side by side, they stay in place; nothing is read to be written
            entries = [torch.tensor(e, device=x.device) if type(e) is int else e for e in entries]
        actions, left = basic_actions(entries, x.shape)
        view, aten = viewed(x, actions), torch.ops.aten
        if not isinstance(value, torch.Tensor):
            value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        elif value.dtype != x.dtype and type(index) is not bool:  # x[True] = value is a copy
            value = _fill_value(value, x.dtype, [e for e in entries if isinstance(e, torch.Tensor) or type(e) is bool])
        there = view, [e if e is None else torch.as_tensor(e, device=x.device) for e in left], value.to(x.dtype)
        return view.copy_(aten.index_put(*there)) if any(map(is_mask, left)) else aten.index_put_(*there)
    view = viewed(x, basic_actions(entries, x.shape, keep=True)[0])
    if not isinstance(value, torch.Tensor):
        return view.fill_(value)
    for dim, entry in enumerate(entries):  # the value has no dim where an integer was
        at = value.dim() - (len(entries) - dim - 1)
        if isinstance(entry, int) and at >= 0:
            value = value.unsqueeze(at)
    if view.dim() < value.dim():
        value = value.reshape(value.shape[value.dim() - view.dim() :])
    same = isinstance(value, Wrapper) and shares_memory(value, x)  # x[0, 1] += 2 gives back what it took
    return view.copy_(value.to(view.dtype, copy=same))


rule("__setitem__")(lambda x, index, value: Algorithm(put_item, writes=True, is_checked=not asks_whether(index)))


def _fill_value(value: Tensor, dtype: torch.dtype, indices: Sequence[Any]) -> Tensor:
    """A value of another dtype than what is written into: one number at a mask is cast, all else torch refuses."""
    if len(indices) == 1 and value.numel() == 1 and is_mask(indices[0]) and indices[0].ndim:
        if not value.dtype.is_complex or dtype.is_complex:
            return value.to(dtype)
        raise RuntimeError(f"value cannot be converted to type {dtype}: it is complex; take its real part")
    raise RuntimeError(
        f"Index put requires the source and destination dtypes match, got {dtype} for the destination and "
        f"{value.dtype} for the source; cast the value: value.to({dtype})"
    )


# -- look-ups ----------------------------------------------------------------------------------------------
class Indexed:
    """What x[indices] means (None where a dim is not indexed): a factor for every dim of x, of the indices, of the
    result, where the dims of the indices stand together at `at`."""

    def __init__(self, x: Operand, indices: Sequence[Any]) -> None:
        found = [i for i in indices if i is not None]
        self.dims = [d for d, i in enumerate(indices) if i is not None]
        self.sizes = [x.shape[d] for d in self.dims]
        self.at = self.dims[0] if self.dims[-1] - self.dims[0] == len(found) - 1 else 0
        self.after = x.ndim - len(found) - self.at  # how many dims of x come after those of the indices
        self.names = tuple(f"x{d}" for d in range(x.ndim))
        looked = broadcast(found)
        self.index_names, self.looked = looked.inputs, looked.outputs[0]
        kept = tuple(n for d, n in enumerate(self.names) if d not in self.dims)
        self.result = (*kept[: self.at], *self.looked, *kept[self.at :])
        shape = broadcast_shape(*(i.shape for i in found))
        self.size = dict(zip((*self.names, *self.looked), (*x.shape, *shape), strict=True))

    def placed(self, found: Sequence[Any]) -> list[Any]:
        """The indices in their places, None where there is none."""
        at = dict(zip(self.dims, found, strict=True))
        return [at.get(d) for d in range(self.dims[-1] + 1)]


@rule("index _unsafe_index")
def index(x: Operand, indices: Sequence[Any]) -> Factors | Algorithm | None:
    if all(i is None for i in indices):
        return None
    if any(map(is_mask, indices)):
        return Algorithm(_index_by_masks)
    at, chosen = Indexed(x, indices), torch.ops.aten.index  # x[...] would take an index without dims as a number

    def look_up(v: torch.Tensor, *rest: Any) -> torch.Tensor:
        *indices, held = rest
        places, mine = located_all(indices, held, at.sizes)
        found = chosen(pointable(v, *at.dims), at.placed(places))
        return found.masked_fill(~mine.reshape((*mine.shape, *(1,) * at.after)), 0)

    local = by_holders(at.dims, look_up, lambda v, *found: chosen(v, at.placed(found)))
    reduce = {at.names[d]: sum_of(x) for d in at.dims}
    mine = at.names if adds_up(x) else tuple(None if d in at.dims else n for d, n in enumerate(at.names))
    return Factors([mine, *at.index_names], [at.result], "each", frozenset({0}), reduce=reduce, local=local)


@stored("index _unsafe_index")
def of_index(result: torch.Tensor, x: torch.Tensor, indices: Sequence[Any]) -> None:
    """In the order of x, and then in that of the indices, also where these are no rows."""
    found = [i for i in indices if i is not None]
    dims = [d for d, i in enumerate(indices) if i is not None]
    if not found or any(map(is_mask, found)):
        return
    shape, kept = broadcast_shape(*(i.shape for i in found)), [d for d in range(x.dim()) if d not in dims]
    before = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    strides = [x.stride(d) for d in kept]
    operands = [(*strides[:before], *(0,) * len(shape), *strides[before:])]
    ones = (1,) * before, (1,) * (len(kept) - before)
    for i in found:
        looked = i.expand(shape).reshape((*ones[0], *shape, *ones[1]))  # dims of size 1 get other strides, too
        pairs = zip(looked.shape, result.shape, looked.stride(), strict=True)
        operands.append(tuple(0 if n == 1 != size else stride for n, size, stride in pairs))
    restrided(result, iterated(result.shape, operands))


@stored("__getitem__")
def of_item(result: torch.Tensor, x: torch.Tensor, index: object) -> None:
    actions, left = basic_actions(spelled_out(index, x.dim()), x.shape)
    if any(entry is not None for entry in left):
        of_index(result, viewed(x, actions), [e if e is None else torch.as_tensor(e) for e in left])


def _index_by_masks(x: Tensor, indices: Sequence[Any]) -> Tensor:
    at = [d for d, i in enumerate(indices) if i is not None]
    if len(at) > 1:
        return torch.ops.aten.index(x, without_masks(indices))
    d, mask = at[0], indices[at[0]].bool()
    found = select_masked(x, mask, d)
    restride(found, _rows_stride(x._layout.shape, x._layout.stride, d, mask.ndim, found.shape[d], x.device.type))
    return found


@functools.lru_cache(maxsize=1024)
def _rows_stride(
    shape: tuple[int, ...], stride: tuple[int, ...], d: int, ndim: int, count: int, device: str
) -> tuple[int, ...]:
    """The strides of x[mask], with x of this shape and stride and a mask of `ndim` dims from dim `d` on that chooses
    `count` rows: as if they were chosen by their numbers."""
    x, rows = torch.empty_strided(shape, stride, device="meta"), torch.empty(count, dtype=torch.int64, device="meta")
    x, indices = x if ndim else x.unsqueeze(d), [None] * d + [rows] * max(ndim, 1)
    found = torch.ops.aten.index(x, indices)
    correct_memory(torch.ops.aten.index.Tensor, device, found, (x, indices), {})
    return found.stride()


def without_masks(indices: Sequence[Any]) -> list[Any]:
    """Masks as the indices they are true at."""
    return [i for entry in indices for i in (torch.nonzero(entry, as_tuple=True) if is_mask(entry) else (entry,))]


def look_up_along(x: Operand, d: int, pick: Any, names: Sequence[Any], mask: Any, error: type[Exception]) -> Factors:
    """pick(x, index) along dim d; `names` are the index's; a mask of it in the shape `mask` fits the result."""
    mine = tuple(f"x{i}" if i != d or adds_up(x) else None for i in range(x.ndim))
    outs = tuple("i" if i == d else n for i, n in enumerate(mine))

    def look_up(v: torch.Tensor, index: torch.Tensor, held: tuple[Intervals]) -> torch.Tensor:
        at, mine = located(index, held[0], x.shape[d], error)
        return pick(pointable(v, d), at).masked_fill(~mine.reshape(mask or mine.shape), 0)

    reduce, local = {f"x{d}": sum_of(x)}, by_holders([d], look_up, pick)
    return Factors([mine, names], [outs], "each", frozenset({0}), reduce=reduce, local=local)


@rule("index_select")
def index_select(x: Operand, dim: int, index: Operand) -> Factors:
    d = dim_from_front(dim, x.ndim)
    names = ("i",) if index.ndim and x.ndim else (None,) * index.ndim  # of a 0-d tensor: one index, for every rank
    mask = [-1 if i == d else 1 for i in range(x.ndim)]
    return look_up_along(x, d, lambda v, at: v.index_select(d, at), names, mask, IndexError)


@rule("gather")
def gather(x: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Factors | Algorithm:
    """Dims beside `dim` are looked up position by position, as many as the index has: the rest of x is not needed."""
    d = dim_from_front(dim, x.ndim)
    if x.ndim != index.ndim or not x.ndim:
        return factors("*x!, *i! -> *i", [x, index], "each", joint={0})
    if any(i != d and index.shape[i] < n for i, n in enumerate(x.shape)):
        first = tuple(slice(None if i == d else n) for i, n in enumerate(index.shape))
        return Algorithm(lambda x, dim, index, **kwargs: torch.gather(x[first], dim, index))
    names = tuple("i" if i == d else f"x{i}" for i in range(x.ndim))
    return look_up_along(x, d, lambda v, at: v.gather(d, at), names, None, RuntimeError)


@rule("take")
def take(x: Operand, index: Operand) -> Factors | Algorithm:
    if any(p.is_shard() for p in x.layout.placements):
        return Algorithm(lambda x, index: torch.ops.aten.index(x, unravelled(index, x.shape)))
    return factors("*x!, *i -> *i", [x, index], "each", joint={0})


def unravelled(index: Tensor, shape: Sequence[int]) -> list[Any]:
    """One index per dim for indices into the flattened tensor; those out of bounds are so in the first dim."""
    n = math.prod(shape)
    index = torch.where(index < 0, index + n, index)
    index = torch.where(index < 0, n, index)
    places = [index.div(step, rounding_mode="floor") for step in contiguous_stride(shape)]
    return [places[0], *(at % max(size, 1) for at, size in zip(places[1:], shape[1:], strict=True))]


def clamped(x: Tensor, indices: Sequence[Any]) -> list[Any]:
    """Indices under a mask may point anywhere where it is False."""
    return [i if i is None else i.clamp(-n, n - 1) for i, n in zip(indices, x.shape, strict=False)]


_item = torch.ops.aten.index
program("_unsafe_masked_index")(lambda x, mask, at, fill: _item(x, clamped(x, at)).masked_fill(~mask, fill))
