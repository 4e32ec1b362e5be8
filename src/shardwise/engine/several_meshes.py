"""Calls whose tensors are on several meshes.

- Meshes of the same ranks with other process groups: everything is on the first one.
- A list op: its positions are planned mesh by mesh. A number beside the lists, as a tensor, meets each of them.
- A mesh and what is cut from it (`mesh["tp"]`): the call is on the smallest, where the tensors of the larger ones are
  Replicate along the other axes: each row of ranks has the whole value. To go the other way, the ranks of all rows must
  hold the same, and nothing says so: a tensor of `mesh["tp"]` may be another one in every row. The program says it by
  `redistribute`, or for a part of itself by `implicit_replication()`.
- Numbers (tensors without dims) on meshes none of which is a part of all others: each rank has them whole, and the
  result is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from shardwise.context import of_thread, running
from shardwise.engine.call_shape import op_name, tensors_in
from shardwise.engine.plain_tensors import replicated_plain
from shardwise.engine.plan import Plan
from shardwise.errors import MeshError
from shardwise.functions import may_write, written
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import Mesh, as_mesh, root_of
from shardwise.move.across import is_part_of, spelled_out
from shardwise.strategy.program import of_one_list
from shardwise.wrapper import Wrapper, wrap

Call = Callable[..., Any]
Distributed: TypeAlias = Any  # a DTensor, the class of which is above this layer


def over_meshes(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan | None:
    """The plan of a call whose tensors are on several meshes; None where there is one mesh."""
    tensors = [tensor for _, tensor in tensors_in(args, kwargs)]
    meshes = list(dict.fromkeys(tensor._layout.mesh for tensor in tensors))
    if len(meshes) < 2:
        return None
    if all(mesh.is_alike(meshes[0]) for mesh in meshes[1:]):
        return lambda args, kwargs, local_args, local_kwargs: _on_first(func, args, kwargs)
    if _is_list_op(func, args):
        return lambda args, kwargs, local_args, local_kwargs: _by_mesh(func, args, kwargs)
    return lambda args, kwargs, local_args, local_kwargs: _on_one(func, args, kwargs)


def _on_first(func: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    first = next(tensor for _, tensor in tensors_in(args, kwargs))._layout.mesh
    here = lambda x: x if x._layout.mesh is first else wrap(x._local, x._layout.replace(mesh=first))  # noqa: E731
    args, kwargs = tree_map_only(Wrapper, here, (tuple(args), dict(kwargs)))
    return func(*args, **kwargs)


# -- lists -------------------------------------------------------------------------------------------------
def _is_list_op(func: Call, args: Sequence[Any]) -> bool:
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    name = op_name(func)
    return bool(lists) and lists[0] is args[0] and ("_foreach_" in name or name.startswith("_fused_"))


def _by_mesh(func: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """The op on the positions of each mesh, their results in the order of all positions."""
    count = len(args[0])
    groups: dict[Mesh, list[int]] = {}
    for j, tensor in enumerate(args[0]):
        groups.setdefault(tensor._layout.mesh, []).append(j)
    results: list[Any] = [None] * count
    nothing = False
    for mesh, positions in groups.items():

        def at(value: object, mesh: Mesh = mesh, positions: list[int] = positions) -> object:
            if isinstance(value, (list, tuple)) and len(value) == count:
                value = [value[j] for j in positions]
            return tree_map_only(Wrapper, lambda x: _seen_on(x, mesh, func), value)

        made = func(*map(at, args), **{name: at(value) for name, value in kwargs.items()})
        nothing = made is None
        for n, j in enumerate(positions if not nothing else ()):
            results[j] = made[n] if isinstance(made[n], torch.Tensor) else [column[n] for column in made]
    if nothing or not all(isinstance(y, Wrapper) for y in results):
        return None if nothing else results
    return of_one_list(results)


def _seen_on(tensor: Wrapper, mesh: Mesh, func: Call) -> Wrapper:
    """The tensor, if it is on `mesh`; a number, which every rank has, as a tensor on `mesh` with the same memory."""
    layout = tensor._layout
    if layout.mesh is mesh:
        return tensor
    if layout.mesh.comm.outside and not mesh.comm.outside:
        raise _unknown_here(op_name(func), layout.mesh)
    if tensor.numel() != 1:
        raise MeshError(
            f"{op_name(func)}: a tensor of shape {layout.shape} is on {layout.mesh!r}, and that of the same place in "
            f"the first list on {mesh!r}; give both the same mesh: x.redistribute(mesh, placements)"
        )
    if not all(place.is_replicate() for place in layout.placements):
        with running(op_name(func)):
            tensor = _replicated(tensor)
    return replicated_plain(layout.mesh.comm.agreed(tensor._local, f"{op_name(func)}: a number"), mesh)


def _replicated(tensor: Distributed) -> Distributed:
    return tensor.redistribute(placements=[REPLICATE] * len(tensor._layout.placements))


# -- a mesh and what is cut from it ------------------------------------------------------------------------
def _on_one(func: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    tensors = [tensor for _, tensor in tensors_in(args, kwargs)]
    meshes = list(dict.fromkeys(tensor._layout.mesh for tensor in tensors))
    least = min(meshes, key=lambda mesh: len(mesh.shape))
    nested = all(mesh is least or is_part_of(least, mesh) for mesh in meshes)
    numbers = all(not tensor.shape for tensor in tensors)
    name = op_name(func)
    if nested and all(not tensor.shape or _is_whole_beside(tensor, least) for tensor in tensors):
        target: Mesh | None = least
        here = lambda x: _lowered(x, least, name)  # noqa: E731
    else:
        joint = target = joint_mesh(meshes)
        if joint is not None and of_thread.replicating:
            here = lambda x: _lifted(x, joint)  # noqa: E731
        elif numbers and not nested:
            target = None
            here = lambda x: _as_number(x, name)  # noqa: E731
        else:
            raise _refusal(name, meshes, joint)
    if may_write(func, kwargs):
        for what, tensor in written(func, args, kwargs):
            if isinstance(tensor, Wrapper) and tensor._layout.mesh is not target:
                raise MeshError(
                    f"{name} writes into {what}, which is on {tensor._layout.mesh!r}, but its operands are on "
                    f"{meshes}; bring the others there: x.redistribute(mesh, placements)"
                )
    args, kwargs = tree_map_only(Wrapper, here, (tuple(args), dict(kwargs)))
    return func(*args, **kwargs)


def _is_whole_beside(tensor: Wrapper, mesh: Mesh) -> bool:
    """Whether the tensor is Replicate along the axes that `mesh` does not have."""
    layout = tensor._layout
    places = zip(layout.mesh.axis_names, layout.placements, strict=True)
    return layout.mesh is mesh or all(p.is_replicate() for name, p in places if name not in mesh.axis_names)


def _lowered(tensor: Distributed, mesh: Mesh, name: str) -> Distributed:
    """The same tensor on a sub-mesh of its mesh."""
    if tensor._layout.mesh is mesh:
        return tensor
    if not _is_whole_beside(tensor, mesh):  # a number
        with running(name):
            tensor = _replicated(tensor)
    places = dict(zip(tensor._layout.mesh.axis_names, tensor._layout.placements, strict=True))
    return tensor.redistribute(mesh.source, [places[axis] for axis in mesh.axis_names])


def _lifted(tensor: Distributed, mesh: Mesh) -> Distributed:
    """The tensor on a mesh of which its own is a sub-mesh, with the same value in every row."""
    if tensor._layout.mesh is mesh:
        return tensor
    return tensor.redistribute(mesh.source, spelled_out(tensor._layout, mesh).placements)


def _as_number(tensor: Distributed, name: str) -> torch.Tensor:
    if tensor._layout.mesh.comm.outside:
        raise _unknown_here(name, tensor._layout.mesh)
    with running(name):
        return _replicated(tensor).full_tensor()


def _unknown_here(name: str, mesh: Mesh) -> MeshError:
    return MeshError(
        f"{name}: one operand is a number on the mesh of ranks {list(mesh.ranks)}, which this rank is not in and does "
        f"not know; redistribute it to a mesh of all ranks first: x.redistribute(mesh, placements)"
    )


def joint_mesh(meshes: Sequence[Mesh]) -> Mesh | None:
    """The smallest mesh that all of these are parts of, if they are cut from one."""
    names = {name for mesh in meshes for name in mesh.axis_names}
    for mesh in meshes:
        if names == set(mesh.axis_names):
            found = mesh
            break
    else:
        root = root_of(meshes[0])
        if root is None or not names <= set(root.axis_names):
            return None
        inside = tuple(name for name in root.axis_names if name in names)
        found = root if inside == root.axis_names else as_mesh(root.source[inside], outside=True)
    return found if all(mesh is found or is_part_of(mesh, found) for mesh in meshes) else None


def _refusal(name: str, meshes: Sequence[Mesh], joint: Mesh | None) -> MeshError:
    shown = " and ".join(map(repr, meshes))
    if joint is None:
        return MeshError(
            f"{name}: operands are on different meshes, {shown}; lay one of them out on the other's mesh: "
            f"x.redistribute(mesh, placements)"
        )
    part = next(mesh for mesh in meshes if mesh is not joint)
    others = [axis for axis in joint.axis_names if axis not in part.axis_names]
    return MeshError(
        f"{name}: operands are on different meshes, {shown}. Whether a tensor of {part!r} is the same along {others} "
        f"is not known: say so by x.redistribute(mesh, placements) with the mesh {joint.axis_names} and a placement "
        f"for each of its axes, or for a part of the program by `with implicit_replication():`"
    )
