"""Where a tensor of the user's becomes a local value of a distributed tensor, and where one comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.argument_types import MeshArgument, Placements
from shardwise.comm.base import Comm
from shardwise.comm.bridge import entered, share
from shardwise.comm.capturing import tapes
from shardwise.comm.rank_tensor import RankTensor
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout, as_placements
from shardwise.mesh import as_mesh
from shardwise.protocols import LocalValue
from shardwise.torch_private.autograd import is_recorded, is_transforming
from shardwise.torch_private.tensors import storage_id
from shardwise.wrapper import Wrapper, wrap


def odd_kind(tensor: torch.Tensor) -> str:
    """What kind of tensor it is, if not a dense one: those only can be distributed."""
    first = tensor.ranks[0] if isinstance(tensor, RankTensor) else tensor
    if type(first) is not torch.Tensor and hasattr(first, "placements"):
        return "torch.distributed.tensor.DTensor"
    if first.layout is not torch.strided:
        return str(first.layout)
    return "nested" if first.is_nested else "quantized" if first.is_quantized else ""


def check_dense(tensor: torch.Tensor) -> None:
    """Raise LayoutError for a sparse, nested or quantized tensor."""
    kind = odd_kind(tensor)
    if "DTensor" in kind:
        raise LayoutError(f"got a {kind}, which is distributed already; convert it: shardwise.interop.from_torch(x)")
    if kind:
        raise LayoutError(f"layout: only torch.strided tensors can be distributed, got {kind}")


def are_leaves(tensor: torch.Tensor) -> bool:
    """Whether what the user gives consists of leaves."""
    return all(value.is_leaf for value in (tensor.ranks if isinstance(tensor, RankTensor) else (tensor,)))


def enter(local: LocalValue, layout: Layout, of_leaves: bool = False) -> Any:
    """A local value of the user's as a distributed tensor, differentiable; `layout` is known to fit it. Made
    `of_leaves` it may be written, which torch allows no view of a leaf. Of others it is a view, so that a write is
    theirs too. It begins in memory where the local tensor does."""
    comm = layout.mesh.comm
    replicas = [axis for axis, p in enumerate(layout.placements) if p.is_replicate()]
    local = share(comm, local, replicas)
    if of_leaves and torch.is_grad_enabled():
        local = comm.rebuild(local, [entered(v) if v.requires_grad else _alias(v) for v in comm.values(local)])
    else:
        local = other_side(comm, local)
    local = _with_own_memory(comm, local) if type(local) is RankTensor else local
    return wrap(local, layout, 0 if comm.outside or is_transforming() else comm.first(local).storage_offset())


def held_outside(
    device_mesh: MeshArgument, placements: Placements, shape: Sequence[int], dtype: torch.dtype | None
) -> Wrapper:
    """A tensor on a mesh that this rank is not in."""
    mesh = as_mesh(device_mesh, outside=True)
    if not mesh.comm.outside:
        raise MeshError(f"outside: this rank is in {mesh!r}; make the tensor with distribute_tensor or from_local")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    layout = Layout.make(mesh, as_placements(placements), tuple(shape), dtype)
    return wrap(torch.empty(0, dtype=dtype, device=mesh.device), layout)


def leave(tensor: Wrapper) -> LocalValue:
    """The local value of a Replicate tensor, as one tensor that all simulated ranks share."""
    comm = tensor._layout.mesh.comm
    local = other_side(comm, share(comm, tensor._local, range(len(tensor._layout.placements))))
    if type(local) is RankTensor:
        local.copies = True
    return local


def other_side(comm: Comm, local: LocalValue) -> LocalValue:
    """The same memory as a tensor with autograd flags, hooks and `.grad` of its own: the user has one, the distributed
    tensor the other."""
    if type(local) is not RankTensor:
        return _alias(local)
    return comm.rebuild(local, [_alias(value) for value in comm.values(local)])


def lent(tensor: Wrapper) -> LocalValue:
    """The local value for the user, without a graph. What is written there autograd sees, unless it is ``.data``'s."""
    local, origin = tensor._local, tensor._origin
    if origin is not None and origin.memory is not origin and not tapes:  # a captured program keeps nothing of a run
        origin.lend(tensor._layout.mesh.comm.values(local))
    return local.detach() if type(local) is not RankTensor else other_side(tensor._layout.mesh.comm, local)


def _alias(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value) if is_recorded(value) else value.detach()


def _with_own_memory(comm: Comm, local: LocalValue) -> LocalValue:
    """`local` with a copy for each simulated rank whose memory another rank has too: ranks that hold different things
    each run an op, and in shared memory an in-place op would take effect once per rank."""
    own: list[torch.Tensor | None] = []
    taken: set[object] = set()
    for value in comm.values(local):
        place = storage_id(value), value.storage_offset()
        own.append(value.clone() if place in taken else value)
        taken.add(place)
    return local if len(taken) == len(own) else comm.rebuild(local, own)


def checked_grad_layout(layout: Layout, grad_placements: Placements) -> Layout:
    """The layout that the user says the gradient of a local tensor has; LayoutError if it has another local shape."""
    said = layout.replace(placements=as_placements(grad_placements))
    for coords in layout.mesh.comm.coords_here():
        if said.local_shape_at(coords) != layout.local_shape_at(coords):
            raise LayoutError(
                f"grad_placements = {list(said.placements)}: the rank at {coords} would have a gradient of shape "
                f"{said.local_shape_at(coords)} for its local tensor of shape {layout.local_shape_at(coords)} under "
                f"{list(layout.placements)}; use the same Shard, or Replicate() or Partial() where there is none"
            )
    return said
