"""The parameters of modules become DTensors over the data mesh."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm.rank_tensor import RankTensor
from shardwise.errors import LayoutError
from shardwise.parallel.data.layouts import Cut, DataMesh, ParameterLayouts, layouts_of
from shardwise.parallel.data.parameter import ManagedParameter, Owners, has_hooks
from shardwise.parallel.data.rows import Rows
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap


@dataclass
class Making:
    """How parameters are laid out.

    Attributes:
        data: the data mesh.
        cut: which dim of a parameter is cut into parts; asked of its layout where that is not said by `dims`.
        compute_dtype: in which the modules compute; None: that of the parameter.
        kept_dtype: the dtype of the parameter that the optimizer sees, from that of before.
        kept_device: the same for the device.
        device: where the modules compute, from where the parameter was.
        dims: which dim of a parameter is cut, by id.
        pins_memory: whether kept parameters lie in memory that a device can read by itself.
    """

    data: DataMesh
    cut: Cut
    compute_dtype: torch.dtype | None
    kept_dtype: Callable[[torch.Tensor], torch.dtype] = lambda param: param.dtype
    kept_device: Callable[[torch.Tensor], torch.device] = lambda param: param.device
    device: Callable[[torch.Tensor], torch.device] = lambda param: param.device
    dims: Mapping[int, int] | None = None
    pins_memory: bool = False


def owners_in(
    modules: Iterable[nn.Module], managed: Container[tuple[int, str]] = (), ignored: Container[int] = ()
) -> dict[nn.Parameter, Owners]:
    """Who has which parameter, of all modules inside of these; without those that are `managed` already (by id of a
    module, and name) or `ignored` (by id)."""
    owners: dict[nn.Parameter, Owners] = {}
    for module in dict.fromkeys(inner for outer in modules for inner in outer.modules()):
        for name, param in module._parameters.items():
            if param is not None and (id(module), name) not in managed and id(param) not in ignored:
                owners.setdefault(param, []).append((module, name))
    return owners


def lay_out(
    owners: Mapping[nn.Parameter, Owners], how: Making, beside: Iterable[nn.Parameter] = ()
) -> list[ManagedParameter]:
    """Replace parameters by DTensors over the data mesh; plain ones go to the mesh of all, those `beside` too."""
    data = how.data
    common = data.mesh_for_plain([*owners, *beside])
    made = []
    for param, users in owners.items():
        if has_hooks(param):
            raise LayoutError(
                f"{data.caller}: parameter {users[0][1]!r} of shape {tuple(param.shape)} has hooks that wait for its "
                f"gradient, and is about to be replaced; register them afterwards, on the new parameter"
            )
        dtype = how.kept_dtype(param) if param.dtype.is_floating_point else param.dtype
        dim = None if how.dims is None else how.dims.get(id(param))
        cut = how.cut if dim is None else lambda whole, parts, dim=dim: dim
        layouts = layouts_of(param, data, cut, dtype, how.kept_device(param), common)
        value = _kept_value(param, layouts, data, how.pins_memory and not param.is_meta)
        new = nn.Parameter(value, requires_grad=param.requires_grad)
        for user, name in users:
            user._parameters[name] = new
        made.append(ManagedParameter(new, layouts, users, how.compute_dtype, how.device(param)))  # type: ignore[arg-type]
    return made


@torch.no_grad()
def _kept_value(param: torch.Tensor, layouts: ParameterLayouts, data: DataMesh, pins_memory: bool) -> DTensor:
    """The parameter as it is kept, with the values of the first rank along the data axes."""
    kept, comm = layouts.kept, layouts.kept.mesh.comm
    local = param._local if isinstance(param, DTensor) else data.mesh.comm.shared(param.detach())
    local = local if isinstance(local, RankTensor) else local.detach()
    if comm.simulated or not param.is_meta:
        local = data.mesh.comm.first_of_replicas(local, range(len(data.mesh.shape)))
    values = local.ranks if isinstance(local, RankTensor) else (local,)
    pieces = []
    for value, coords, place in zip(values, layouts.whole.mesh.comm.coords_here(), data.coords, strict=True):
        rows = Rows([layouts.whole.local_shape_at(coords)], [layouts.dim], data.parts)
        piece = rows.piece(0, value.detach(), place)
        piece = piece.to(kept.device, kept.dtype).clone(memory_format=torch.contiguous_format)
        pieces.append(piece.pin_memory() if pins_memory else piece)
    if not comm.simulated:
        return wrap(pieces[0], kept)
    replicas = [axis for axis, p in enumerate(kept.placements) if p.is_replicate()]
    return wrap(comm.first_of_replicas(RankTensor(pieces), replicas), kept)
