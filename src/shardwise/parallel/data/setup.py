"""data_parallel: the parameters of a module laid out over the data axis, and its parts that are gathered as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from shardwise.errors import LayoutError, MeshError, check_type
from shardwise.mesh import DeviceMesh, SimulatedMesh
from shardwise.modules import unchanged_on_error
from shardwise.parallel.data.lay_out import Making, lay_out, owners_in
from shardwise.parallel.data.layouts import DataMesh, cut_best, cut_nothing
from shardwise.parallel.data.parameter import ManagedParameter
from shardwise.parallel.data.passes import DataParallel
from shardwise.parallel.data.policy import Policy
from shardwise.parallel.data.unit import Unit

SHARDS = ("none", "optimizer", "gradients", "parameters")
Units = Sequence[nn.Module] | Callable[[str, nn.Module], bool] | None


def data_parallel(
    module: nn.Module,
    mesh: DeviceMesh | SimulatedMesh,
    shard: str = "none",
    *,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    master_dtype: torch.dtype | None = None,
    units: Units = None,
    unit_bytes: int = 1 << 20,
) -> nn.Module:
    """Make a module data parallel over a mesh axis: DDP and ZeRO 1, 2 and 3. If the call fails, the module is
    unchanged.

    Make the optimizer afterwards, from ``module.parameters()``. If each rank calls the module on its own plain tensors,
    gradients are averaged over the ranks, as with DDP. If it is called on DTensors that are cut over the data axis, the
    results are those of one device with the whole batch. Inside ``with module.no_sync():`` each rank adds up its own
    gradients without communication.

    With "parameters", a unit is a module whose parameters are gathered together: when its forward begins, and again for
    its backward, one unit in advance. They are freed in between and afterwards. Parameters outside of all units belong
    to the module as a whole.

    Args:
        module: changed in place: its parameters become DTensors over the data axis.
        mesh: one axis, as in ``mesh["dp"]``.
        shard: what is cut over the ranks: "none" (DDP); "optimizer", its state (ZeRO 1); "gradients", these too (ZeRO
            2); "parameters", everything (ZeRO 3).
        compute_dtype: the dtype of the forward; floating-point inputs are cast to it.
        reduce_dtype: the dtype in which gradients are summed over the ranks.
        master_dtype: the dtype of the parameters that the optimizer sees.
        units: the units where `shard` is "parameters": modules, or a function of a module's name and itself. Default:
            the elements of Sequential, ModuleList and ModuleDict.
        unit_bytes: how many bytes of parameters an element needs to be a unit by default.

    Returns:
        The module itself.

    Raises:
        LayoutError: an argument or the layout of a parameter is not possible, or the module is data parallel already.
        MeshError: `mesh` does not have exactly one axis.

    Example:
        >>> from shardwise import simulate
        >>> model = data_parallel(torch.nn.Linear(4, 4), simulate(2), "parameters")
        >>> model.weight.placements
        (Shard(dim=0),)
    """
    if not isinstance(module, nn.Module):
        raise LayoutError(f"data_parallel: module must be a torch.nn.Module, got {type(module).__name__}")
    if shard not in SHARDS:
        raise LayoutError(f"data_parallel: shard={shard!r} is not one of {', '.join(map(repr, SHARDS))}")
    for name, dtype in (("compute", compute_dtype), ("reduce", reduce_dtype), ("master", master_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise LayoutError(f"data_parallel: {name}_dtype must be a floating-point torch.dtype, got {dtype!r}")
    if "_data_parallel" in module.__dict__:
        raise LayoutError("data_parallel: the module is data parallel already")
    data = DataMesh(mesh)
    if len(data.mesh.shape) != 1:
        raise MeshError(
            f"data_parallel: mesh must have one axis, got {data.mesh!r}; give the one of the data, as in mesh['dp']. "
            f"For copies along one axis and parts along another, use fully_shard"
        )
    chosen = _chosen_units(module, units, unit_bytes) if data.size > 1 else []  # one rank has nothing to gather
    frees = shard == "parameters" and data.size > 1
    one_at_a_time = shard in ("gradients", "parameters")  # no rank has room for all gradients whole
    with unchanged_on_error(module, "data_parallel"):
        made_as = Making(
            data, cut_nothing if shard == "none" else cut_best, compute_dtype, lambda p: master_dtype or p.dtype
        )
        parameters = lay_out(owners_in([module]), made_as)
        units_found = _group(module, chosen, parameters, data, Policy(compute_dtype, reduce_dtype, frees=frees))
        passes = DataParallel(units_found, one_at_a_time)
        module._data_parallel = passes  # type: ignore[assignment]
        module.no_sync = passes.no_sync  # type: ignore[assignment]
    return module


# -- units -------------------------------------------------------------------------------------------------
def _chosen_units(module: nn.Module, units: Units, unit_bytes: int) -> list[nn.Module]:
    """The modules that are units of their own, in the order of the module tree."""
    if callable(units):
        return [m for name, m in module.named_modules() if m is not module and units(name, m)]
    if units is not None:
        check_type(units, Iterable, "data_parallel: units", "give modules, or a function of a name and a module")
        chosen = {id(m) for m in units}
        found = [m for m in module.modules() if id(m) in chosen and m is not module]
        if len(found) < len(chosen - {id(module)}):
            raise LayoutError("data_parallel: units lists a module that is not part of the module")
        return found
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    found = []

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            elements = list(child.children()) if isinstance(child, containers) else []
            large = [m for m in elements if sum(p.numel() * p.itemsize for p in m.parameters()) >= unit_bytes]
            found.extend(m for m in large if not isinstance(m, (nn.ModuleList, nn.ModuleDict)))
            if not elements:
                visit(child)

    visit(module if not isinstance(module, containers) else nn.ModuleList([module]))
    return found


def _group(
    root: nn.Module, chosen: list[nn.Module], parameters: Sequence[ManagedParameter], data: DataMesh, policy: Policy
) -> list[Unit]:
    """The units with their parameters; last the module as a whole, with those that belong to no unit or to several."""
    unit_of = {id(m): unit for unit in chosen for m in unit.modules()}  # an inner unit comes later and wins
    groups: dict[int, list[ManagedParameter]] = {id(m): [] for m in chosen}
    rest: list[ManagedParameter] = []
    for p in parameters:
        units = {id(unit_of.get(id(owner))) for owner, _ in p.owners}
        group = groups.get(units.pop()) if len(units) == 1 else None
        (rest if group is None else group).append(p)
    found = [Unit([m], groups[id(m)], data, replace(policy)) for m in chosen if groups[id(m)]]
    return [*found, Unit([root], rest, data, policy)]
