"""Copies of a distributed tensor, and what it is made of again after pickling."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.autograd.attributes import set_requires_grad
from shardwise.autograd.leaves import leaf_local
from shardwise.layout import Layout
from shardwise.mesh import as_mesh
from shardwise.wrapper import Wrapper, notes_of, wrap


def deep_copy(tensor: Wrapper, memo: dict[int, Any]) -> Any:
    """A copy in memory of its own, with copies of what the program has noted on the tensor."""
    comm, local = tensor._layout.mesh.comm, leaf_local(tensor)
    result = wrap(comm.rebuild(local, [value.__deepcopy__({}) for value in comm.values(local)]), tensor._layout)
    memo[id(tensor)] = result
    if _is_param(tensor):
        result._is_param = True
    result.__dict__.update(copy.deepcopy(notes_of(tensor), memo))
    return result


def pickled(tensor: Wrapper) -> tuple[Any, ...]:
    """The arguments with which `unpickled` makes the tensor again."""
    layout, local = tensor._layout, leaf_local(tensor)
    comm = layout.mesh.comm
    parts = [value.detach() for value in comm.values(local)]
    state = (layout.placements, layout.shape, layout.stride, layout.dtype, str(layout.device))
    flags, notes = (tensor.requires_grad, _is_param(tensor)), notes_of(tensor)
    return parts, comm.structure(local), layout.mesh.source, state, flags, *((notes,) if notes else ())


def unpickled(
    parts: Sequence[torch.Tensor],
    structure: Any,
    source: Any,
    state: tuple[Any, ...],
    flags: tuple[bool, bool],
    notes: Mapping[str, Any] | None = None,
) -> Any:
    """The tensor that `pickled` described: on the mesh `source`, laid out as `state` says."""
    placements, shape, stride, dtype, _ = state
    mesh = as_mesh(source)
    layout = Layout.make(mesh, placements, shape, dtype, stride, parts[0].device)
    result = wrap(mesh.comm.assemble(structure, parts), layout)
    requires_grad, is_param = flags
    set_requires_grad(result, requires_grad)
    if is_param:
        result._is_param = True
    result.__dict__.update(notes or {})
    return result


def _is_param(tensor: Wrapper) -> bool:
    """Whether it is an nn.Parameter: torch marks those whose class is not its own so."""
    return bool(getattr(tensor, "_is_param", False))
