"""Copies of a distributed tensor, as an array too, and what it is made of again after pickling."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.autograd.attributes import set_requires_grad
from shardwise.context import is_strict
from shardwise.engine.aliasing import COPIES, copied_from, note_view
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.layout.checks import checked_values
from shardwise.layout.placement import check_reductions
from shardwise.mesh import Mesh, UserMesh, as_mesh
from shardwise.protocols import Structure
from shardwise.strategy.memory import stored_as
from shardwise.torch_private.tensors import storage_id
from shardwise.wrapper import Wrapper, is_note, notes_of, origin_of, storage_id_of, wrap


def as_array(tensor: Wrapper, whole: torch.Tensor, force: bool) -> object:
    """``tensor.numpy(force=force)``, whose value is `whole`. In plain torch it shares the tensor's memory; where it
    cannot, it is read-only: a write to it would be lost."""
    if type(whole) is torch.Tensor and tensor.stride() != whole.stride() and not (whole.is_conj() or whole.is_neg()):
        whole = stored_as(whole, tensor.stride())
    array = whole.numpy(force=force)
    if whole.device.type == "cpu" and type(whole) is torch.Tensor and storage_id(whole) != storage_id_of(tensor):
        array.flags.writeable = False
    return array


def deep_copy(tensor: Wrapper, memo: dict[int, Any]) -> Any:
    """A copy in memory of its own, with copies of what the program has noted on the tensor. Copies of tensors that
    share memory share theirs, as in torch, except those of parameters."""
    result = _copy_of_view(tensor, memo)
    if result is None:
        result = _copy_in_memory(tensor, *(({}, 0) if _is_param(tensor) else (memo, tensor._offset)))
    memo[id(tensor)] = result
    if _is_param(tensor):
        result._is_param = True
    result.__dict__.update(copy.deepcopy(notes_of(tensor), memo))
    return result


def _copy_in_memory(tensor: Wrapper, memo: dict[Any, Any], offset: int) -> Wrapper:
    """A copy of what the ranks hold. In `memo` torch finds the memory that it has copied before."""
    comm, local = tensor._layout.mesh.comm, tensor._local
    values = [value.__deepcopy__(memo) for value in comm.values(local)]
    result: Wrapper = wrap(comm.rebuild(local, values), tensor._layout, offset)
    result._origin = memo.setdefault(("origin", id(origin_of(tensor).memory)), origin_of(result))
    return result


def _copy_of_view(tensor: Wrapper, memo: dict[int, Any]) -> Wrapper | None:
    """The copy of a view that had to be copied: that view of a copy of its base. None for other tensors."""
    made = copied_from(tensor)
    if made is None or _is_param(tensor) or is_strict() or (tensor.requires_grad and not tensor.is_leaf):
        return None
    source, again = made
    with torch.no_grad():
        result: Wrapper = again(copy.deepcopy(source.detach() if source.requires_grad else source, memo))
    set_requires_grad(result, tensor.requires_grad)
    return result


def shallow_copy(tensor: Wrapper) -> Wrapper:
    """Another tensor of the same memory, a leaf: in torch a pickle that shares it."""
    same: Wrapper = unpickled(*pickled(tensor))
    same._offset, same._origin = tensor._offset, origin_of(tensor)
    if COPIES:
        note_view(tensor, same)
    return same


def pickled(tensor: Wrapper) -> tuple[Any, ...]:
    """The arguments with which `unpickled` makes the tensor again."""
    layout, local = tensor._layout, tensor._local
    comm = layout.mesh.comm
    parts = [value.detach() for value in comm.values(local)]
    state = (layout.placements, layout.shape, layout.stride, layout.dtype, str(layout.device))
    flags, notes = (tensor.requires_grad, _is_param(tensor)), notes_of(tensor)
    return parts, comm.structure(local), layout.mesh.source, state, flags, *((notes,) if notes else ())


def unpickled(
    parts: Sequence[torch.Tensor],
    structure: Structure,
    source: UserMesh,
    state: tuple[Any, ...],
    flags: tuple[bool, bool],
    notes: Mapping[str, Any] | None = None,
) -> Any:
    """The tensor that `pickled` described: on the mesh `source`, laid out as `state` says. A file may say anything:
    all of it is checked before the tensor is made."""
    mesh = as_mesh(source)
    layout = _checked_layout(mesh, parts, state)
    _check_parts(layout, parts, structure)
    requires_grad, is_param = _checked_flags(layout, flags)
    _check_notes(notes)
    result = wrap(mesh.comm.assemble(structure, parts), layout)
    set_requires_grad(result, requires_grad)
    if is_param:
        result._is_param = True
    result.__dict__.update(notes or {})
    return result


def _checked_layout(mesh: Mesh, parts: object, state: object) -> Layout:
    if not isinstance(state, tuple) or len(state) != 5:
        raise LayoutError(f"DTensor from a pickle: its state must be five values, got {state!r}")
    if not isinstance(parts, (list, tuple)) or not parts or any(type(part) not in _PLAIN for part in parts):
        raise LayoutError(f"DTensor from a pickle: its parts must be plain tensors, got {_kinds(parts)}")
    placements, shape, stride, dtype, _ = state  # the device is that of the parts: torch.load may map it
    layout = Layout.make(mesh, placements, *checked_values(shape, dtype, stride, parts[0].device))
    check_reductions(layout.placements, dtype)
    return layout


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _kinds(parts: object) -> str:
    return str([type(part).__name__ for part in parts] if isinstance(parts, (list, tuple)) else parts)


def _check_parts(layout: Layout, parts: Sequence[torch.Tensor], structure: object) -> None:
    """Raise if the ranks of this process cannot hold these parts under the layout."""
    coords = layout.mesh.comm.coords_here()
    if layout.mesh.comm.simulated:
        numbers = range(len(parts))
        if not isinstance(structure, (tuple, list)) or len(structure) != len(coords):
            raise LayoutError(
                f"DTensor from a pickle: its structure must say which part each of the {len(coords)} ranks of "
                f"{layout.mesh!r} holds, got {structure!r}"
            )
        if set(map(type, structure)) != {int} or set(structure) != set(numbers):
            raise LayoutError(
                f"DTensor from a pickle: its structure must number its {len(parts)} parts from 0 on, got {structure!r}"
            )
    else:
        structure = (0,) * len(coords)
        if len(parts) != len(coords):
            raise LayoutError(f"DTensor from a pickle: it has {len(parts)} parts, and this process one rank")
    cut = [axis for axis, p in enumerate(layout.placements) if not p.is_replicate()]
    holders: dict[int, tuple[int, ...]] = {}
    for where, number in zip(coords, structure, strict=True):
        part, shape = parts[number], layout.local_shape_at(where)
        found = (tuple(part.shape), part.dtype, part.layout, part.device)
        if found != (shape, layout.dtype, torch.strided, layout.device):
            raise LayoutError(
                f"DTensor from a pickle: the rank at {where} has a part of shape {found[0]}, {found[1]}, {found[2]} on "
                f"{found[3]}; under {layout!r} it must be of shape {shape}, {layout.dtype}, strided, on {layout.device}"
            )
        mine = tuple(where[axis] for axis in cut)
        if holders.setdefault(number, mine) != mine:
            raise LayoutError(
                f"DTensor from a pickle: its structure gives the rank at {where} a part that another rank has; under "
                f"{list(layout.placements)} they hold different ones"
            )


def _checked_flags(layout: Layout, flags: object) -> tuple[bool, bool]:
    if not isinstance(flags, tuple) or len(flags) != 2 or not all(isinstance(flag, bool) for flag in flags):
        raise LayoutError(f"DTensor from a pickle: its flags must be two bools, got {flags!r}")
    if flags[0] and not (layout.dtype.is_floating_point or layout.dtype.is_complex):
        raise LayoutError(f"DTensor from a pickle: its flags say that it requires grad, and {layout.dtype} cannot")
    return flags


def _check_notes(notes: object) -> None:
    """Raise if the attributes that a program has set on a tensor would hide one that the tensor has."""
    if notes is None:
        return
    if not isinstance(notes, Mapping):
        raise LayoutError(f"DTensor from a pickle: its notes must be a dict of attributes, got {notes!r}")
    for name in notes:
        if not isinstance(name, str) or not is_note(name):
            raise LayoutError(
                f"DTensor from a pickle: its notes set {name!r}, which is no attribute that a program may set"
            )


def _is_param(tensor: Wrapper) -> bool:
    """Whether it is an nn.Parameter: torch marks those whose class is not its own so."""
    return bool(getattr(tensor, "_is_param", False))
