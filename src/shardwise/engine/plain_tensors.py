"""Plain tensors that meet distributed ones: they count as replicated, unless `strict` refuses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.boundary import odd_kind
from shardwise.comm.rank_tensor import RankTensor
from shardwise.context import of_thread, refuses_plain
from shardwise.engine.call_shape import op_name, tensors_in
from shardwise.errors import LayoutError, MeshError, StrictError
from shardwise.functions import writes_first
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import Mesh
from shardwise.wrapper import Wrapper, wrap


def with_plain_wrapped(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the op `name`, with every plain tensor wrapped as Replicate on the mesh of the others."""
    _refuse_if_strict(name)
    kwargs = kwargs or {}
    mesh = mesh_in(args, kwargs)
    if mesh is None:
        raise MeshError(f"{name}: no distributed tensor among the arguments")
    return tuple(_wrapped(a, mesh) for a in args), {k: _wrapped(v, mesh) for k, v in kwargs.items()}


def refuse_own_batches(func: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Raise where a plain tensor meets a parameter that data parallelism manages, outside of the forward in which it is
    whole. Each rank has its own batch there, so the plain tensor is not the same on all ranks. Only writes into the
    parameter are allowed."""
    tensors = [t for _, t in tensors_in(args, kwargs or {}, torch.Tensor)]
    managed = [t for t in tensors if isinstance(t, Wrapper) and t._is_managed and math.prod(t._layout.mesh.shape) > 1]
    if not managed or of_thread.replicating or (writes_first(func) and args and args[0] is managed[0]):
        return
    plain = next((t for t in tensors if not isinstance(t, (Wrapper, RankTensor)) and t.dim()), None)
    if plain is not None:
        raise LayoutError(
            f"{op_name(func)}: got mixed torch.Tensor and DTensor: a plain tensor of shape {tuple(plain.shape)} meets "
            f"a parameter of shape {managed[0]._layout.shape} that is laid out over the ranks, outside of the forward "
            f"in which it is whole. Compute with it in its module's forward, or in a method that "
            f"register_fsdp_forward_method knows; if the tensor is the same on all ranks, inside of "
            f"`with implicit_replication():`"
        )


def plain_wrapped(name: str, value: torch.Tensor, mesh: Mesh) -> Wrapper:
    """A plain tensor that `name` was called with, as a Replicate one on `mesh`."""
    _refuse_if_strict(name)
    return replicated_plain(value, mesh)


def _refuse_if_strict(name: str) -> None:
    if refuses_plain():
        raise StrictError(
            f"{name}: a plain tensor meets a distributed one under strict(); "
            f"make it a DTensor with distribute_tensor(x, mesh, [Replicate(), ...])"
        )


def mesh_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mesh | None:
    """The mesh of the first distributed tensor among the arguments, lists and tuples looked into."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is Wrapper.concrete:  # this is quicker than isinstance, and nearly always enough
            return value._layout.mesh
        if isinstance(value, (list, tuple)):
            mesh = mesh_in(value, {})
            if mesh is not None:
                return mesh
        elif isinstance(value, Wrapper):
            return value._layout.mesh
    return None


def _wrapped(value: object, mesh: Mesh) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, Wrapper):
        return replicated_plain(value, mesh)
    if isinstance(value, (list, tuple)) and any(isinstance(v, (torch.Tensor, list, tuple)) for v in value):
        return type(value)(_wrapped(v, mesh) for v in value) if type(value) in (list, tuple) else value
    return value


def replicated_plain(value: torch.Tensor, mesh: Mesh) -> Wrapper:
    """A plain tensor as a Replicate one on `mesh`, sharing its memory and its autograd history. A RankTensor with one
    value per group of a simulated mesh, as `full_tensor()` on a sub-mesh gives it, counts as plain, too."""
    if isinstance(value, RankTensor):
        if not mesh.comm.is_shared(value):
            raise MeshError(
                "a RankTensor meets a DTensor; say how it is laid out: DTensor.from_local(x, mesh, placements)"
            )
        return wrap(mesh.comm.adopt(value, ()), replicated_like(value, mesh), int(value.storage_offset()))
    kind = odd_kind(value)
    if "DTensor" in kind:
        raise LayoutError(f"a {kind} meets a shardwise.DTensor; convert it: shardwise.interop.from_torch(x)")
    if kind:
        dense = {"nested": "x.unbind()", "quantized": "x.dequantize()"}.get(kind, "x.to_dense()")
        raise LayoutError(f"a {kind} tensor meets a DTensor, which only dense ones can; use {dense}")
    return wrap(mesh.comm.shared(value), replicated_like(value, mesh), int(value.storage_offset()))


def replicated_like(value: torch.Tensor, mesh: Mesh) -> Layout:
    """The layout of a plain tensor that all ranks of `mesh` hold."""
    places = [REPLICATE] * len(mesh.shape)
    return Layout.make(mesh, places, tuple(value.shape), value.dtype, value.stride(), value.device)
