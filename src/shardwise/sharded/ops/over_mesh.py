"""Any torch function on sharded tensors: elementwise ones run tile by tile; for the others the tensors become DTensors,
the engine computes, and the results become sharded tensors again."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardwise.comm.record import Note, recorders, tell
from shardwise.context import is_strict
from shardwise.engine.call_shape import op_name
from shardwise.errors import StrictError
from shardwise.functions import writes_first
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import Mesh, as_mesh
from shardwise.sharded.from_dtensor import to_sharded
from shardwise.sharded.groups import Group, all_gather_rows, communication_device, is_member, ranks_of, same_ranks
from shardwise.sharded.ops import registry
from shardwise.sharded.ops.elementwise import on_tiles
from shardwise.sharded.ops.registry import Function
from shardwise.sharded.tensor import ShardedTensor
from shardwise.sharded.to_dtensor import mesh_of, natural_layout, on_mesh
from shardwise.strategy.registry import in_place_flag
from shardwise.tensor import DTensor


@registry.general
def call(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function with sharded tensors among its arguments."""
    result = on_tiles(func, args, kwargs)
    return over_mesh(func, args, kwargs) if result is NotImplemented else result


def over_mesh(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute a function on DTensors. What it wrote is written back; a result of one value is a plain tensor."""
    leaves, structure = tree_flatten((tuple(args), kwargs))
    sharded = [x for x in leaves if isinstance(x, ShardedTensor)]
    name, group = op_name(func), sharded[0]._process_group
    _check_groups(name, sharded)
    mesh = as_mesh(mesh_of(group, sharded[0].device.type))
    check_agreement(name, [x for x in leaves if type(x) in (torch.Tensor, torch.nn.Parameter)], group)
    if is_strict():
        _refuse_moves(name, sharded, mesh)
    moved: dict[int, DTensor] = {}
    for x in sharded:
        if id(x) not in moved:
            moved[id(x)] = on_mesh(x, mesh)
    on_dtensors = [moved[id(x)] if isinstance(x, ShardedTensor) else x for x in leaves]
    new_args, new_kwargs = tree_unflatten(on_dtensors, structure)
    result = func(*new_args, **new_kwargs)
    written = _written(func, args, kwargs)
    for x in written:
        _write_back(x, moved[id(x)])
    back = {id(moved[id(x)]): x for x in written}
    return tree_map(lambda r: back.get(id(r), _from_mesh(r)), result)


def _check_groups(name: str, sharded: Sequence[ShardedTensor]) -> None:
    first = sharded[0]._process_group
    if not is_member(first):
        raise RuntimeError(f"{name}: this rank is not in the tensor's process group; call it on its ranks only")
    for x in sharded[1:]:
        if not same_ranks(x._process_group, first):
            raise RuntimeError(
                f"{name}: the tensors live on different process groups, of ranks {ranks_of(first)} and "
                f"{ranks_of(x._process_group)}"
            )


def _refuse_moves(name: str, sharded: Sequence[ShardedTensor], mesh: Mesh) -> None:
    for x in sharded:
        if x.dim() and not natural_layout(x, mesh).agrees:
            raise StrictError(
                f"{name} would communicate under strict(): no mesh layout of {len(ranks_of(x._process_group))} ranks "
                f"has the tiles of a tensor of size {list(x.size())}; reshard it to slabs of one dim first"
            )


def _from_mesh(result: object) -> Any:
    """Return a DTensor as a sharded tensor or, if it is one value, as the plain tensor that all ranks have."""
    if not isinstance(result, DTensor):
        return result
    if result.dim() == 0:
        return result.redistribute(placements=[REPLICATE] * len(result.placements)).to_local()
    return to_sharded(result)


def _written(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> list[ShardedTensor]:
    """Return the sharded tensors that the call writes into."""
    out = kwargs.get("out")
    found = list(out) if isinstance(out, (tuple, list)) else [out] if out is not None else []
    if args and (writes_first(func) or in_place_flag(func, args, kwargs)):
        found += list(args[0]) if isinstance(args[0], (tuple, list)) else [args[0]]
    return [x for x in found if isinstance(x, ShardedTensor)]


def _write_back(tensor: ShardedTensor, value: DTensor) -> None:
    """Copy the values of a DTensor into the sharded tensor it was made from, where they do not share memory."""
    if len(tensor._parts) == 1 and value._local.data_ptr() == tensor._parts[0].data_ptr() and value._local.numel():
        if value._local is not tensor._parts[0]:
            _replace_parts(tensor, [value._local.view(tensor._parts[0].shape)])
        return
    back = to_sharded(value)._in_tiles_of(tensor)
    if any(p.requires_grad for p in back._parts) and torch.is_grad_enabled():
        _replace_parts(tensor, back._parts)
        return
    with torch.no_grad():
        for part, new in zip(tensor._parts, back._parts):
            part.copy_(new.view(part.shape))


def _replace_parts(tensor: ShardedTensor, parts: Sequence[torch.Tensor]) -> None:
    """Replace the tensors of the tiles: the graph of what was written goes on from the new ones."""
    for shard, part in zip(tensor._local_shards, parts):
        shard.tensor = part
    if not tensor._local_shards:
        tensor._empty = parts[0].view(tensor._anchor.shape)


# -- plain tensors among the arguments -----------------------------------------------------------------------------
def check_agreement(name: str, tensors: Sequence[torch.Tensor], group: Group) -> None:
    """Raise on all ranks where a plain tensor is not the same on all: one small exchange of fingerprints."""
    tensors = [t for t in tensors if t.device.type != "meta"]
    world = dist.get_world_size(group)
    if not tensors or world == 1:
        return
    device = communication_device(group)
    mine = torch.stack([_fingerprint(t).to(device) for t in tensors])
    if to := recorders():
        tell("tiles", "all_gather", (world - 1) * mine.nbytes, Note(name, "do plain tensors agree?"), to)
    table = all_gather_rows(mine, group, name)
    differing = (table != table[0]).any(dim=1).nonzero().flatten().tolist()
    if differing:
        which = int((table[differing[0]] != table[0]).nonzero()[0])
        ranks = ranks_of(group)
        raise RuntimeError(
            f"{name}: plain tensor {which} among the arguments differs between rank {ranks[0]} and rank "
            f"{ranks[differing[0]]}. A plain tensor that meets a ShardedTensor counts as the same on all ranks; if "
            f"each rank holds its own part of it, make it a ShardedTensor with init_from_local_shards"
        )


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number for shape, dtype and bits; the same values in another order give another number."""
    shape = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    bits = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    words = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    weights = torch.arange(1, len(words) + 1, device=words.device) * 0x9E37_79B9 + 1
    return (words * weights).sum() + shape
