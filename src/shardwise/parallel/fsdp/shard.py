"""fully_shard: a module, without what was sharded inside of it before, becomes one more unit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import LayoutError, MeshError, MismatchError, check_type
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh, SimulatedMesh, as_mesh, init_device_mesh
from shardwise.modules import unchanged_on_error
from shardwise.parallel.data.lay_out import Making, lay_out, owners_in
from shardwise.parallel.data.layouts import DataMesh, cut_nothing
from shardwise.parallel.data.parameter import ManagedParameter, Owners
from shardwise.parallel.data.passes import DataParallel
from shardwise.parallel.data.policy import Policy
from shardwise.parallel.data.unit import Unit
from shardwise.parallel.fsdp.module import STATE, ShardedState, sharded_class, state_of, states_in
from shardwise.parallel.fsdp.pipeline import pipeline_state
from shardwise.parallel.fsdp.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

_made = WeakIdKeyDictionary()  # parameter of before -> its ManagedParameter: other modules may still have the former
_OFFLOADS = {kind.__name__ for kind in (OffloadPolicy, CPUOffloadPolicy)}  # torch's classes of these names are as good
_managed = WeakIdKeyDictionary()  # parameters that are sharded -> True


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | SimulatedMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (it is frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> nn.Module | Sequence[nn.Module]:
    """Cut a module's parameters, gradients and optimizer state over the ranks; parameters are gathered while the module
    computes.

    Call it for inner modules first: on the blocks of a model, then on the model. Each call makes one unit of the
    parameters that are not in a unit yet; they are gathered and reduced together. Make the optimizer afterwards. If
    each rank calls the module on its own plain tensors, gradients are averaged over the ranks; with DTensors that are
    cut over the mesh, the results are those of one device. If the call fails, the module is unchanged.

    Args:
        module: changed in place: its parameters become DTensors, and its class derives from `FSDPModule`. Or several
            modules, which become one unit.
        mesh: one axis, over which parameters are cut; or two, with copies along the first and parts along the second.
            Default: the mesh of the enclosing ``with mesh:``, else all ranks.
        reshard_after_forward: whether whole parameters are freed after the forward, and gathered again for the
            backward. None: yes, except for the outermost module. A number of ranks, which torch takes to free only a
            part, is as True.
        shard_placement_fn: gives ``Shard(dim)`` for a parameter that is to be cut along that dim, and None for others,
            which are cut along the first.
        mp_policy: in which dtypes to compute.
        offload_policy: `CPUOffloadPolicy()` keeps everything that lies still on the CPU.
        ignored_params: parameters that stay as they are; their gradients are not reduced.
        dp_mesh_dims: which axes of `mesh` are meant above, where it has others besides; parameters may be DTensors on
            all of `mesh`.

    Returns:
        The module itself, or the list of them.

    Raises:
        LayoutError: an argument or the layout of a parameter is not possible, or the module is sharded already.
        MeshError: there is no mesh, or it has more than two axes.

    Example:
        >>> from shardwise import simulate
        >>> mesh = simulate(2)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> for layer in model:
        ...     _ = fully_shard(layer, mesh=mesh)
        >>> model = fully_shard(model, mesh=mesh)
        >>> model[0].weight.placements
        (Shard(dim=0),)
    """
    modules = _as_list(module)
    _check_modules(modules)
    data, is_cut = _data_mesh(_data_axes(mesh, dp_mesh_dims)), dp_mesh_dims is None or dp_mesh_dims.shard is not None
    policy = _policy(data, mp_policy, reshard_after_forward, is_cut)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise LayoutError(f"fully_shard: shard_placement_fn must be a function, got {shard_placement_fn!r}")
    if not isinstance(offload_policy, OffloadPolicy) and type(offload_policy).__name__ not in _OFFLOADS:
        raise LayoutError(
            f"fully_shard: offload_policy must be an OffloadPolicy, as CPUOffloadPolicy(), got {offload_policy!r}"
        )
    inner = list(dict.fromkeys(state.passes for m in modules for state in states_in(m)))
    units = [unit for passes in inner for unit in passes.units]
    taken = {(id(owner), name) for unit in units for p in unit.parameters for owner, name in p.owners}
    ignored = _ids("ignored_params", ignored_params)
    with ExitStack() as stack:
        for m in modules:
            stack.enter_context(unchanged_on_error(m, "fully_shard"))
        owners = owners_in(modules, taken, ignored)
        _check_not_managed(owners)
        tied = {param: users for param, users in owners.items() if param in _made}
        mine = {param: users for param, users in owners.items() if param not in _made}
        beside = [param for m in modules for param in m.parameters()]
        parameters = lay_out(mine, _making(data, policy, offload_policy, mine, shard_placement_fn, is_cut), beside)
        _move_buffers(modules, units, data)
    for param, p in zip(mine, parameters, strict=True):
        _made[param], _managed[p.param] = p, True
    for param, users in tied.items():
        _made[param].add_owners(users)
    unit = Unit(modules, [*parameters, *_taken_from(units, modules)], data, policy)
    for passes in inner:
        passes.dissolve()
    merged = DataParallel([*units, unit], one_at_a_time=True)
    for state in [state for m in modules for state in states_in(m)]:
        state.passes = merged
    own = ShardedState(unit, merged)
    for m in modules:
        m.__dict__[STATE] = own
        m.__class__ = sharded_class(type(m))
    return module


fully_shard.state = pipeline_state  # type: ignore[attr-defined]  # torch.distributed.pipelining calls it


# -- arguments ---------------------------------------------------------------------------------------------
def _as_list(module: object) -> list[nn.Module]:
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    if not given:
        raise LayoutError("fully_shard: module is an empty list; give at least one module")
    found = [m for m in given if isinstance(m, nn.Module)]
    for m in given:
        if not isinstance(m, nn.Module):
            raise LayoutError(f"fully_shard: module must be a torch.nn.Module, or a list of them, got {m!r}")
    return found


def _check_modules(modules: Sequence[nn.Module]) -> None:
    for m in modules:
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            raise LayoutError(
                f"fully_shard does not support containers that do not implement forward: before the forward of a "
                f"{type(m).__name__} its parameters would be gathered; call fully_shard on its elements"
            )
        if state_of(m) is not None:
            raise MismatchError(
                f"Each distinct composable distributed API can only be applied to a module once. fully_shard has "
                f"already been applied to the following module: ({type(m).__name__}) is sharded already"
            )
        for part in m.modules():
            if "_data_parallel" in part.__dict__:
                raise LayoutError(f"fully_shard: {type(part).__name__} in the module is data parallel already")
    inside = {id(part) for m in modules for part in m.modules() if part is not m}
    if len({id(m) for m in modules}) < len(modules) or any(id(m) in inside for m in modules):
        raise LayoutError("fully_shard: module lists a module twice, or one that is inside of another")


def _ids(name: str, params: Iterable[nn.Parameter] | None) -> set[int]:
    if params is None:
        return set()
    check_type(params, (set, frozenset, list, tuple, dict), f"fully_shard: {name}", "give a set of parameters")
    for param in params:
        check_type(param, torch.Tensor, f"fully_shard: an element of {name}", "give parameters of the module")
    return {id(param) for param in params}


def _check_not_managed(owners: Iterable[nn.Parameter]) -> None:
    for param in owners:
        if param in _managed:
            raise LayoutError(
                f"fully_shard: a parameter of shape {tuple(param.shape)} belongs to a module that is sharded already; "
                f"call fully_shard bottom-up, on a module before those that contain it"
            )


def _data_mesh(mesh: DeviceMesh | SimulatedMesh | None) -> DataMesh:
    try:
        data = DataMesh(mesh, "fully_shard")  # type: ignore[arg-type]
    except MeshError:
        if mesh is not None or not dist.is_initialized():
            raise
        device_type = "cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend()) else "cpu"
        data = DataMesh(init_device_mesh(device_type, (dist.get_world_size(),)), "fully_shard")
    if len(data.mesh.shape) > 2:
        raise MeshError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {data.mesh!r}: one axis (of parts) or two (of copies "
            f"and of parts); give those of the data, as in mesh['replicate', 'shard']"
        )
    return data


def _data_axes(
    mesh: DeviceMesh | SimulatedMesh | None, dims: DataParallelMeshDims | None
) -> DeviceMesh | SimulatedMesh | None:
    """Those axes of the mesh that the program names."""
    if dims is None:
        return mesh
    if not hasattr(dims, "shard") or not hasattr(dims, "replicate"):
        raise LayoutError(f"fully_shard: dp_mesh_dims must be a DataParallelMeshDims, got {dims!r}")
    given = [(axis,) if isinstance(axis, str) else tuple(axis) for axis in (dims.replicate, dims.shard) if axis]
    names = tuple(itertools.chain(*given))
    if any(len(axes) > 1 for axes in given):
        raise LayoutError(
            f"fully_shard: dp_mesh_dims names several axes as one, {dims!r}; make them one axis of the mesh: "
            f"mesh[{names!r}]._flatten('data')"
        )
    if mesh is None or not set(names) <= set(as_mesh(mesh).axis_names):
        raise MeshError(f"fully_shard: dp_mesh_dims names axes {names} that mesh={mesh!r} does not have")
    return mesh[names if len(names) > 1 else names[0]]


def _policy(data: DataMesh, mixed: MixedPrecisionPolicy, reshard: bool | int | None, is_cut: bool) -> Policy:
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(mixed, name) for name in names):
        raise LayoutError(f"fully_shard: mp_policy must be a MixedPrecisionPolicy, got {mixed!r}")
    for name in names[:3]:
        dtype = getattr(mixed, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise LayoutError(f"fully_shard: mp_policy.{name} must be a floating-point torch.dtype, got {dtype!r}")
    if reshard is not None and not isinstance(reshard, int):
        raise LayoutError(
            f"fully_shard: reshard_after_forward should be a bool or an int representing the group size to reshard to, "
            f"not {reshard}; None lets the library choose"
        )
    if reshard is not None and not isinstance(reshard, bool) and (reshard < 1 or data.parts % reshard):
        raise LayoutError(
            f"fully_shard: If passing reshard_after_forward as an int, it should be a factor of {data.parts}, not "
            f"{reshard}: so many ranks have parts"
        )
    return Policy(
        mixed.param_dtype,
        mixed.reduce_dtype,
        mixed.output_dtype,
        casts_inputs="always" if mixed.cast_forward_inputs else "never",
        frees=data.parts > 1 and is_cut,
        frees_after_forward=None if reshard is None else bool(reshard),
    )


def _making(
    data: DataMesh,
    policy: Policy,
    offload: OffloadPolicy,
    owners: Iterable[nn.Parameter],
    placement_of: Callable[[nn.Parameter], object] | None,
    is_cut: bool,
) -> Making:
    here = data.mesh.device
    if here.type == "cuda" and here.index is None:
        here = torch.device("cuda", torch.cuda.current_device())
    on_cpu = isinstance(offload, CPUOffloadPolicy) or type(offload).__name__ == CPUOffloadPolicy.__name__

    def device(param: torch.Tensor) -> torch.device:
        return param.device if param.device.type == here.type else here

    def kept_device(param: torch.Tensor) -> torch.device:
        if param.is_meta:
            return param.device
        return torch.device("cpu") if on_cpu else device(param)

    wanted = None if placement_of is None else {id(param): _chosen_dim(param, placement_of(param)) for param in owners}
    chosen = None if wanted is None else {key: dim for key, dim in wanted.items() if dim is not None}
    pins = on_cpu and getattr(offload, "pin_memory", False) and data.mesh.device.type != "cpu"
    cut, dims = (_cut_first, chosen) if is_cut else (cut_nothing, None)
    return Making(data, cut, policy.compute_dtype, kept_device=kept_device, device=device, dims=dims, pins_memory=pins)


def _cut_first(whole: Layout, parts: int) -> int | None:
    return 0 if whole.ndim else None


def _chosen_dim(param: nn.Parameter, placement: object) -> int | None:
    if placement is None:
        return None
    dim = getattr(placement, "dim", None)
    given = f"shard_placement_fn gave {placement!r} for a parameter of shape {tuple(param.shape)}"
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise LayoutError(
            f"Invalid shard_placement_fn result: {placement}. fully_shard: {given}; give Shard(dim) with one of its "
            f"dims, or None"
        )
    if not -param.ndim <= dim < param.ndim:
        raise MismatchError(
            f"Shard dim {dim} is invalid for {param.ndim}D tensor: {param.shape}. fully_shard: {given}; give "
            f"Shard(dim) with one of its dims, or None"
        )
    return dim % param.ndim


# -- several units -----------------------------------------------------------------------------------------
def _taken_from(units: Sequence[Unit], modules: Sequence[nn.Module]) -> list[ManagedParameter]:
    """Parameters that several units inside of these modules share: the new unit, which contains them, takes them."""
    inside = {id(part) for m in modules for part in m.modules()}
    found = []
    for unit in units:
        own = {id(part) for m in unit.modules for part in m.modules()}
        for p in list(unit.parameters):
            if _are_in(p.owners, inside) and not _are_in(p.owners, own):
                unit.give_away(p)
                found.append(p)
    return found


def _are_in(owners: Owners, modules: set[int]) -> bool:
    return all(id(owner) in modules for owner, _ in owners)


def _move_buffers(modules: Sequence[nn.Module], units: Sequence[Unit], data: DataMesh) -> None:
    """Buffers that are elsewhere go to the device of the mesh, as parameters do."""
    done = {id(part) for unit in units for m in unit.modules for part in m.modules()}
    for part in (part for m in modules for part in m.modules() if id(part) not in done):
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", data.mesh.device.type):
                part._buffers[name] = buffer.to(data.mesh.device)
