"""Laying out what exists: distribute_tensor and distribute_module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from shardwise.argument_types import MeshArgument, Placements
from shardwise.boundary import check_dense
from shardwise.comm.rank_tensor import RankTensor
from shardwise.errors import AutogradError, LayoutError, check_type
from shardwise.interop import from_torch, is_torchs
from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.placement import check_reductions, placements_on
from shardwise.layout.shapes import contiguous_stride, dense_stride
from shardwise.layout.split import count
from shardwise.mesh import Mesh, as_mesh
from shardwise.modules import unchanged_on_error
from shardwise.move import plan_steps
from shardwise.move.pack import take
from shardwise.protocols import LocalValue
from shardwise.tensor import DTensor
from shardwise.torch_private.autograd import is_transforming
from shardwise.torch_private.tensors import are_transforms_active, storage_id
from shardwise.wrapper import wrap


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lay out a tensor over a mesh.

    Args:
        tensor: The whole tensor, on every rank. A DTensor of torch's own class that has this layout is converted
            without a copy.
        device_mesh: The mesh; by default that of the enclosing `with mesh:`.
        placements: One per mesh axis; by default Replicate.
        src_data_rank: The rank (its coordinate on every axis) whose values are used; it sends them to the others. With
            None, nothing is sent, and all ranks must pass the same values.

    Returns:
        Inside of a transform of torch.func, a function of `tensor` that is differentiable, and of this rank's values.
        Elsewhere a leaf tensor in memory of its own; a Parameter, and one that requires grad, if `tensor` is.

    Raises:
        LayoutError: The tensor cannot be laid out like that.
        AutogradError: The tensor is not a leaf, so its gradient would be lost.

    >>> import torch, shardwise
    >>> x = shardwise.distribute_tensor(torch.arange(8), shardwise.simulate(4), [shardwise.Shard(0)])
    >>> x.to_local().ranks[1]
    tensor([2, 3])
    """
    if not isinstance(tensor, torch.Tensor):
        got = type(tensor).__name__
        raise LayoutError(
            f"distribute_tensor: tensor must be a torch.Tensor, got {got}; torch.as_tensor(...) makes one"
        )
    mesh = as_mesh(device_mesh, outside=True)
    places = placements_on(mesh, placements)
    if is_torchs(tensor):
        tensor = from_torch(tensor)
    if isinstance(tensor, DTensor):
        return _already(tensor, mesh, places)
    if are_transforms_active() or (is_transforming() and forward_ad.unpack_dual(tensor).tangent is not None):
        return DTensor.from_local(tensor, mesh).redistribute(placements=places)
    _check_plain(tensor)
    stride = torch.empty_like(tensor, device="meta").stride()  # a clone's: no holes, channels_last stays so
    device = tensor.device if tensor.device.type in ("meta", mesh.device.type) else mesh.device
    layout = Layout.make(mesh, places, tuple(tensor.shape), tensor.dtype, stride, device)
    check_reductions(layout.placements, tensor.dtype)
    _check_source(mesh, src_data_rank)
    outside = mesh.comm.outside
    local = mesh.comm.shared(tensor.detach()) if outside else lay_out(tensor.detach(), layout, src_data_rank)
    if not outside and stride != contiguous_stride(layout.shape):
        local = mesh.comm.rebuild(local, [_stored(v, stride) for v in mesh.comm.values(local)])
    result = wrap(local, layout)
    if tensor.requires_grad:
        result.requires_grad_()
    if isinstance(tensor, torch.nn.Parameter):
        result._is_param = True
    return result


def _already(tensor: DTensor, mesh: Mesh, places: tuple[Placement, ...]) -> DTensor:
    """A tensor that is distributed, if it is laid out so."""
    if tensor._layout.mesh is mesh and tensor._layout.replace(placements=places) is tensor._layout:
        return tensor
    same = tensor._layout.mesh is mesh
    what = "placements" if same else "device mesh"
    here, there = (tensor.placements, list(places)) if same else (tensor._layout.mesh, mesh)
    raise LayoutError(
        f"Cannot distribute a DTensor with {what} {here} to a different {what} {there}; use tensor.redistribute("
        f"{'' if same else 'mesh, '}placements={list(places)}) instead"
    )


def _check_plain(tensor: torch.Tensor) -> None:
    """Raise for a plain tensor that cannot be distributed."""
    if isinstance(tensor, RankTensor):
        raise LayoutError(
            "distribute_tensor: a RankTensor holds local values; use DTensor.from_local(x, mesh, placements)"
        )
    check_dense(tensor)
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        raise AutogradError(
            "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf tensor! Its gradient "
            "would end here; use DTensor.from_local(tensor, mesh, [Replicate(), ...]).redistribute(placements=...), or "
            "tensor.detach()"
        )


def _stored(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The value with its dims in memory in the order that these strides say."""
    there = torch.empty_strided(value.shape, dense_stride(value.shape, stride), dtype=value.dtype, device=value.device)
    return there.copy_(value)


def check_strided(layout: torch.layout) -> None:
    """Raise LayoutError for sparse and other layouts of memory."""
    if layout is not torch.strided:
        raise LayoutError(f"layout: only torch.strided tensors can be distributed, got {layout}")


def _check_source(mesh: Mesh, source: int | None) -> None:
    for axis, k in enumerate(mesh.shape):
        if source is not None and k > 1 and not 0 <= source < k:
            raise LayoutError(f"src_data_rank={source} is not a coordinate of mesh axis {axis} of {k} ranks")


def lay_out(value: torch.Tensor, layout: Layout, source: int | None) -> LocalValue:
    """The local value under `layout` of a tensor that every rank holds; with `source`, that rank's values count."""
    comm = layout.mesh.comm
    if not comm.simulated and source is not None and value.device.type != "meta":
        return _send_parts(value, layout, source)
    value = value if value.device.type == layout.device.type else value.to(layout.device)
    whole = layout.replicated()
    local = comm.shared(value)
    for step in plan_steps(whole, layout):
        local = step.run(comm, local)
    own = storage_id(value)  # the result has memory of its own
    copies = [v.clone(memory_format=torch.contiguous_format) if storage_id(v) == own else v for v in comm.values(local)]
    return comm.rebuild(local, copies)


def _send_parts(value: torch.Tensor, layout: Layout, source: int) -> torch.Tensor:
    """This rank's part of a value that the coordinate `source` of every axis sends, axis by axis. Of the value on other
    ranks only shape and dtype are read. It comes to the layout's device where it is sent."""
    comm = layout.mesh.comm
    device = value.device if value.device.type == layout.device.type else layout.device
    like, shape, is_sent = torch.empty(0, dtype=value.dtype, device=device), tuple(value.shape), False
    for axis, placement in enumerate(layout.placements):
        if layout.mesh.shape[axis] == 1:
            continue
        sends = comm.coords[axis] == source
        value = value.to(device) if sends else value
        if isinstance(placement, Shard):
            dim, row = placement.dim, layout.row(axis, comm.coords)
            shapes = [(*shape[:dim], count(part), *shape[dim + 1 :]) for part in row]
            cut = lambda i, value=value, dim=dim, row=row: take(value, dim, row[i])
            value = comm.scatter(cut, shapes, axis, source, like)
        else:
            value = comm.broadcast(value if value.device == device else like.new_empty(shape), axis, source)
            if isinstance(placement, Partial):
                value = _as_partial(value, layout, axis)
        shape, is_sent = tuple(value.shape), True
    # what came may be a view of a buffer: as a leaf it would lose the gradients of its own views once it is written
    return value.detach() if is_sent else value.to(device, copy=True, memory_format=torch.contiguous_format)


def _as_partial(value: torch.Tensor, layout: Layout, axis: int) -> torch.Tensor:
    """This rank's part of a pending reduction along one axis, of a value that all ranks hold."""
    whole = layout.replicated()
    one = whole.placed({axis: layout.placements[axis]})
    for step in plan_steps(whole, one):
        value = step.run(layout.mesh.comm, value)
    return value


def distribute_module(
    module: torch.nn.Module,
    device_mesh: MeshArgument | None = None,
    partition_fn: Callable[[str, torch.nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> torch.nn.Module:
    """Turn a module's parameters and buffers into DTensors, in place. If it fails, the module is as it was.

    Args:
        module: The module; tied parameters stay tied.
        device_mesh: The mesh; by default that of the enclosing `with mesh:`.
        partition_fn: Called as partition_fn(name, submodule, mesh) for every submodule, to replace parameters and
            buffers by DTensors. All that it does not replace is replicated.
        input_fn: Called as input_fn(module, inputs, mesh) before the module's forward; it returns other inputs.
        output_fn: Called as output_fn(module, outputs, mesh) after it; it returns another output. The older form of
            both functions, without the module, works too.

    Returns:
        The module itself.

    Raises:
        LayoutError: `module` is not a module or was given before, or a function takes other arguments.
    """
    if not isinstance(module, torch.nn.Module):
        raise LayoutError(f"distribute_module: module must be a torch.nn.Module, got {type(module).__name__}")
    if getattr(module, "_has_been_distributed", False):
        raise LayoutError(
            f"distribute_module should only be called once on a module, but it has already been called on this module! "
            f"The functions of the first call are hooks of this {type(module).__name__}"
        )
    if partition_fn is not None:
        _check_function(partition_fn, "partition_fn", "(name, submodule, mesh)")
    prepare_inputs = _with_module("input_fn", input_fn)
    prepare_outputs = _with_module("output_fn", output_fn)
    mesh = as_mesh(device_mesh, outside=True)
    made: dict[int, torch.nn.Parameter] = {}  # tied parameters stay tied

    def replicate(owner: torch.nn.Module) -> None:
        for name, param in owner._parameters.items():
            if param is not None and not isinstance(param, DTensor):
                if id(param) not in made:
                    made[id(param)] = torch.nn.Parameter(distribute_tensor(param.detach(), mesh), param.requires_grad)
                owner.register_parameter(name, made[id(param)])
        for name, buffer in owner._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                owner._buffers[name] = distribute_tensor(buffer, mesh)

    with unchanged_on_error(module, "distribute_module"):
        for name, submodule in module.named_modules():
            if partition_fn is not None:
                partition_fn(name, submodule, mesh.source)
            replicate(submodule)
    if prepare_inputs is not None:
        module.register_forward_pre_hook(lambda mod, inputs: prepare_inputs(mod, inputs, mesh.source))
    if prepare_outputs is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: prepare_outputs(mod, outputs, mesh.source))
    module.__dict__["_has_been_distributed"] = True  # copies of the module have its hooks, and this
    return module


def _check_function(value: object, name: str, takes: str) -> None:
    check_type(value, Callable, f"distribute_module: {name}", f"give a function of {takes}")  # type: ignore[arg-type]


def _with_module(name: str, function: Callable[..., Any] | None) -> Callable[[Any, Any, Any], Any] | None:
    """A function that takes (module, values, mesh), from one that does or from the older form (values, mesh)."""
    if function is None:
        return None
    _check_function(function, name, "(module, values, mesh)")
    for arguments in (3, 2):
        try:
            inspect.signature(function).bind(*range(arguments))
        except TypeError:
            continue
        return function if arguments == 3 else lambda module, values, mesh: function(values, mesh)
    taken = len(inspect.signature(function).parameters)
    raise LayoutError(
        f"distribute_module: {name} should take in 3 arguments, but got {taken} arguments! It is called as "
        f"{name}(module, {name[:-3]}s, device_mesh)"
    )
