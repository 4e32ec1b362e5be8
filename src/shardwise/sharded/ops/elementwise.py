"""Elementwise functions, casts and functions of lists: called tile by tile. Nothing moves if the tiles are the same."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.comm.record import Note
from shardwise.context import is_strict
from shardwise.engine.call_shape import op_name
from shardwise.errors import StrictError
from shardwise.functions import writes_first
from shardwise.sharded.moves import same_tiles
from shardwise.sharded.ops.group_steps import spread
from shardwise.sharded.ops.registry import Function
from shardwise.sharded.tensor import ShardedTensor
from shardwise.strategy import registry as rules

_CASTS = frozenset(
    "float double half bfloat16 int long short char byte bool cfloat cdouble chalf type type_as contiguous".split()
)
_NOT_ELEMENTWISE_LISTS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


@functools.cache
def _elementwise_names() -> frozenset[str]:
    """Return the ops whose rules are in rules/pointwise.py, except the one that halves a dim."""
    return frozenset(name for name, (_, family) in rules.registered().items() if family == "pointwise") - {"glu"}


def is_elementwise(func: Function) -> bool:
    found = rules.find(func)
    return (found is not None and found.name in _elementwise_names()) or getattr(func, "__name__", "") in _CASTS


def on_tiles(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function that can be called tile by tile, else NotImplemented."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None:
        return NotImplemented
    if name.startswith(("_foreach_", "_fused_")) and not name.startswith(_NOT_ELEMENTWISE_LISTS):
        return _on_lists(func, args, kwargs)
    if not is_elementwise(func):
        return NotImplemented
    leaves, structure = tree_flatten((tuple(args), kwargs))
    sharded = [x for x in leaves if isinstance(x, ShardedTensor)]
    writes = writes_first(func) or rules.in_place_flag(func, args, kwargs)
    model = args[0] if writes else sharded[0]
    if not isinstance(model, ShardedTensor) or not _fits(model, leaves):
        return NotImplemented
    if name == "type" and not writes and len(leaves) == 1:
        return torch.empty(0, dtype=model.dtype).type()  # x.type() returns the name of the type
    columns = _columns(op_name(func), leaves, model)
    calls = [tree_unflatten(column, structure) for column in columns]
    results = [func(*own_args, **own_kwargs) for own_args, own_kwargs in calls]
    return model if writes else _wrapped(results, model)


def _fits(model: ShardedTensor, leaves: Sequence[Any]) -> bool:
    """Whether every tensor is of the model's size, or a plain one that broadcasts to it."""
    for x in leaves:
        if isinstance(x, ShardedTensor):
            if x.size() != model.size():
                return False
        elif isinstance(x, torch.Tensor):
            if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.dim() > model.dim():
                return False
            if any(n not in (1, m) for n, m in zip(x.shape, model.size()[model.dim() - x.dim() :])):
                return False
    return True


def _columns(name: str, leaves: Sequence[Any], model: ShardedTensor) -> list[list[Any]]:
    """Return, for each tile of the model, the arguments of its call."""
    every = []
    for x in leaves:
        if isinstance(x, ShardedTensor):
            every.append(move_to_tiles_of(name, x, model)._parts)
        elif isinstance(x, torch.Tensor):
            whole = spread(x, model._process_group) if x.requires_grad and torch.is_grad_enabled() else x
            empty = ([0] * model.dim(), [0] * model.dim())  # what a rank without tiles uses
            every.append([_cut(whole, box) for box in [s.box for s in model.local_shards()] or [empty]])
        else:
            every.append([x] * len(model._parts))
    return [list(column) for column in zip(*every)]


def move_to_tiles_of(name: str, x: ShardedTensor, model: ShardedTensor) -> ShardedTensor:
    """Return `x` in the tiles of another tensor of its size; the ledger records the move under the name of the op."""
    if x is model or same_tiles(x, model):
        return x
    if is_strict():
        raise StrictError(
            f"{name} would communicate under strict(): its operands, of size {list(x.size())}, are tiled by "
            f"{type(x.sharding_spec()).__name__} and {type(model.sharding_spec()).__name__} differently; reshard "
            f"one first"
        )
    return x._in_tiles_of(model, Note(name, "operands in different tiles"))


def _cut(x: torch.Tensor, box: tuple[Sequence[int], Sequence[int]]) -> torch.Tensor:
    """Return the part of a plain tensor that is used with a tile."""
    for dim in range(-x.dim(), 0):
        if x.shape[dim] != 1:  # else it is broadcast, along a tile without elements too
            x = x.narrow(dim, min(box[0][dim], x.shape[dim]), box[1][dim])  # an empty one may start behind
    return x


def _wrapped(results: Sequence[Any], model: ShardedTensor) -> Any:
    if isinstance(results[0], torch.Tensor):
        return model._with_parts(results)
    return type(results[0])(model._with_parts(column) for column in zip(*results))


# -- lists ---------------------------------------------------------------------------------------------------------
def _on_lists(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a foreach function on longer lists, with one entry per tile."""
    lead = next((a for a in args if isinstance(a, (list, tuple)) and any(map(_is_sharded, a))), None)
    if lead is None:
        return NotImplemented
    name = op_name(func)
    counts = [len(x._parts) if _is_sharded(x) else 1 for x in lead]

    def longer(value: object) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(lead):
            return value
        rows = zip(value, lead, counts)
        each = [move_to_tiles_of(name, x, model)._parts if _is_sharded(x) else [x] * n for x, model, n in rows]
        return list(itertools.chain.from_iterable(each))

    flat = func(*map(longer, args), **{k: longer(v) for k, v in kwargs.items()})
    if writes_first(func) or flat is None:
        return lead if flat is not None else None
    found = iter(flat)
    taken = [(model, list(itertools.islice(found, n))) for model, n in zip(lead, counts)]
    return type(flat)(model._with_parts(parts) if _is_sharded(model) else parts[0] for model, parts in taken)


def _is_sharded(value: object) -> bool:
    return isinstance(value, ShardedTensor)
