"""Any torch function on sharded tensors: elementwise ones run on the tiles; the others move to a mesh layout, are
computed there by the DTensor engine, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardwise.context import is_strict
from shardwise.engine.call_shape import op_name
from shardwise.errors import StrictError
from shardwise.functions import writes_first
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import as_mesh
from shardwise.sharded import registry
from shardwise.sharded.convert import agreeing_placements, mesh_of, to_dtensor, to_sharded
from shardwise.sharded.ops.agreement import check_agreement
from shardwise.sharded.ops.elementwise import on_tiles
from shardwise.sharded.owners import is_member, ranks_of
from shardwise.sharded.tensor import ShardedTensor
from shardwise.strategy.registry import in_place_flag
from shardwise.tensor import DTensor


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func` on arguments among which there are sharded tensors."""
    result = on_tiles(func, args, kwargs)
    return over_mesh(func, args, kwargs) if result is NotImplemented else result


def over_mesh(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute on DTensors. What was written is written back; a result of one value is a plain tensor."""
    leaves, structure = tree_flatten((tuple(args), kwargs))
    sharded = [x for x in leaves if isinstance(x, ShardedTensor)]
    name = op_name(func)
    _check_groups(name, sharded)
    mesh = mesh_of(sharded[0]._process_group, sharded[0].device.type)
    plain = [x for x in leaves if type(x) in (torch.Tensor, torch.nn.Parameter)]
    check_agreement(name, plain, sharded[0]._process_group)
    if is_strict():
        _refuse_moves(name, sharded, mesh)
    moved: dict[int, DTensor] = {}
    for x in sharded:
        if id(x) not in moved:
            moved[id(x)] = to_dtensor(x, mesh)
    given = [moved[id(x)] if isinstance(x, ShardedTensor) else x for x in leaves]
    new_args, new_kwargs = tree_unflatten(given, structure)
    result = func(*new_args, **new_kwargs)
    written = _written(func, args, kwargs)
    for x in written:
        _write_back(x, moved[id(x)])
    back = {id(moved[id(x)]): x for x in written}
    return tree_map(lambda r: back.get(id(r), _came_back(r)), result)


def _check_groups(name: str, sharded: Sequence[ShardedTensor]) -> None:
    first = sharded[0]._process_group
    if not is_member(first):
        raise RuntimeError(f"{name}: this rank is not in the tensor's process group; call it on its ranks only")
    for x in sharded[1:]:
        if ranks_of(x._process_group) != ranks_of(first):
            raise RuntimeError(
                f"{name}: the tensors live on different process groups, of ranks {ranks_of(first)} and "
                f"{ranks_of(x._process_group)}"
            )


def _refuse_moves(name: str, sharded: Sequence[ShardedTensor], mesh: Any) -> None:
    for x in sharded:
        if x.dim() and agreeing_placements(x, as_mesh(mesh)) is None:
            raise StrictError(
                f"{name} would communicate under strict(): no mesh layout of {len(ranks_of(x._process_group))} ranks "
                f"has the tiles of a tensor of size {list(x.size())}; reshard it to slabs of one dim first"
            )


def _came_back(result: Any) -> Any:
    """A DTensor as a sharded tensor, or, if it is one value, as the plain tensor that all ranks have."""
    if not isinstance(result, DTensor):
        return result
    if result.dim() == 0:
        return result.redistribute(placements=[REPLICATE] * len(result.placements)).to_local()
    return to_sharded(result)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[ShardedTensor]:
    """The sharded tensors that the call writes into."""
    out = kwargs.get("out")
    found = list(out) if isinstance(out, (tuple, list)) else [out] if out is not None else []
    if args and (writes_first(func) or in_place_flag(func, args, kwargs)):
        found += list(args[0]) if isinstance(args[0], (tuple, list)) else [args[0]]
    return [x for x in found if isinstance(x, ShardedTensor)]


def _write_back(tensor: ShardedTensor, value: DTensor) -> None:
    """The values of a DTensor made from a sharded tensor, where they are not in its own memory."""
    if len(tensor._parts) == 1 and value._local.data_ptr() == tensor._parts[0].data_ptr() and value._local.numel():
        if value._local is not tensor._parts[0]:
            _adopt(tensor, [value._local.view(tensor._parts[0].shape)])
        return
    back = to_sharded(value)
    back = back._like(tensor)
    if any(p.requires_grad for p in back._parts) and torch.is_grad_enabled():
        _adopt(tensor, back._parts)
        return
    with torch.no_grad():
        for part, new in zip(tensor._parts, back._parts):
            part.copy_(new.view(part.shape))


def _adopt(tensor: ShardedTensor, parts: Sequence[torch.Tensor]) -> None:
    """Other tensors in the place of a tensor's parts: the graph of what was written goes on from them."""
    for shard, part in zip(tensor._local_shards, parts):
        shard.tensor = part
    if not tensor._local_shards:
        tensor._empty = parts[0].view(tensor._anchor.shape)


registry.fallback.append(call)
