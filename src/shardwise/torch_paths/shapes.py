"""The functions that torch has about sizes: of what ranks hold, of what their tensors are together, of shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from shardwise.comm.group_calls import group_call
from shardwise.context import of_thread, strict
from shardwise.errors import LayoutError, MismatchError
from shardwise.layout import Layout, Partial, Placement, Shard, as_placements
from shardwise.layout.placement import REPLICATE
from shardwise.layout.shapes import dense_stride
from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.spec import Spec
from shardwise.tensor import DTensor
from shardwise.torch_paths.placements import size_and_offset


# -- torch.distributed.tensor._utils -------------------------------------------------------------------------------
def _compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    my_coordinate: Sequence[int] | Callable[[int], int] | None,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of what the rank at a coordinate holds, and where in the tensor it starts. None, a rank outside
    of the mesh, holds shape (0,) and has no offset."""
    if my_coordinate is None:
        return (0,), ()
    shape, offset = list(global_shape), [0] * len(global_shape)
    for axis, placement in enumerate(as_placements(placements)):
        if placement.is_shard():
            dim = placement.dim % len(shape)  # type: ignore[attr-defined]
            at = my_coordinate(axis) if callable(my_coordinate) else my_coordinate[axis]
            size, start = size_and_offset(placement, shape[dim], mesh_shape[axis], at)  # type: ignore[arg-type]
            offset[dim] = offset[dim] + (start or 0) if size else global_shape[dim]
            shape[dim] = size
    return tuple(shape), () if skip_offset else tuple(offset)


def compute_local_tensor_info(
    global_tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Return the shape and the strides of what this rank holds of a tensor."""
    grid = as_mesh(mesh)
    layout = Layout.make(
        grid, as_placements(placements), tuple(global_tensor.shape), global_tensor.dtype, global_tensor.stride()
    )
    shape = list(layout.local_shape_at(next(iter(grid.comm.coords_here()))))
    return shape, list(compute_local_stride(global_tensor.stride(), shape))


def compute_global_tensor_info(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Return the shape and the strides of the tensor of which every rank holds an equal part, as `tensor` is one."""
    shape, stride = list(tensor.shape), list(tensor.stride())
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            if dim < 0:
                raise LayoutError(
                    f"Shard placements should have negative dims normalized in the user-facing APIs: {placement}"
                )
            if dim >= len(shape):
                raise LayoutError(
                    f"Sharding dim {dim} greater than tensor ndim {len(shape)} for placement number {axis}"
                )
            k = mesh.size(axis)
            stride = [s * k if d != dim and s >= stride[dim] else s for d, s in enumerate(stride)]
            shape[dim] *= k
    return shape, stride


def compute_global_tensor_shape(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Size:
    """Return the shape of the tensor of which this rank holds a part of `shape`, others perhaps parts of other sizes.
    All ranks of a mesh of one axis call it."""
    if len(placements) != 1:
        raise NotImplementedError("compute_global_tensor_shape only supports 1 placement for now.")
    placement = placements[0]
    if placement.is_replicate():
        return shape
    if not isinstance(placement, Shard):
        raise NotImplementedError(f"Placement type {type(placement)} not supported.")
    everyone: list[tuple[int, ...]] = [()] * mesh.size()
    with group_call(mesh.get_group(), "compute_global_tensor_shape", "all_gather"):
        dist.all_gather_object(everyone, tuple(shape), group=mesh.get_group())
    dim = placement.dim % len(shape)
    if any(theirs[:dim] + theirs[dim + 1 :] != (*shape[:dim], *shape[dim + 1 :]) for theirs in everyone):
        raise LayoutError("Non-sharded dimensions should have identical size across ranks.")
    return torch.Size((*shape[:dim], sum(theirs[dim] for theirs in everyone), *shape[dim + 1 :]))


def compute_local_stride(global_stride: Sequence[int], local_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of memory without holes whose dims lie in the order that these strides say."""
    return dense_stride(local_shape, like=global_stride)


def normalize_to_torch_size(size: int | Sequence[int | Sequence[int]]) -> torch.Size:
    """Return a size that is given as ints, as one int, or as a sequence of them."""
    if isinstance(size, torch.Size):
        return size
    values = [size] if isinstance(size, int) else list(size)
    return torch.Size(values[0] if len(values) == 1 and isinstance(values[0], Sequence) else values)  # type: ignore[arg-type]


def try_find_mesh_from_args(op_call: object, args: Iterable[object]) -> DeviceMesh:
    """Return the mesh of the first DTensor among the arguments of an op, or among those of its lists."""
    for arg in args:
        for value in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(value, (DTensor, Spec)):
                return value.device_mesh  # type: ignore[return-value]
    raise ValueError(f"Cannot find device mesh from args for op : {op_call}.")


def assert_no_mixed_partial_types(placements: Sequence[Placement]) -> None:
    """Raise AssertionError where the pending reductions of a tensor are of different kinds."""
    kinds = {p.reduce_op for p in as_placements(placements) if isinstance(p, Partial)}
    if len(kinds) > 1 and kinds != {"sum", "avg"}:
        raise MismatchError(f"Mixing different Partial reduce_ops is not supported, got {sorted(kinds)}")


class ExplicitRedistributionContext(strict):
    """strict() under torch's name: communication that the program did not ask for raises.

    Args:
        enable: False allows it again inside of a block that does not.
        strict: Not used: everything that is sent counts.
        mode: "raise"; torch's "warn" is what `shardwise.debug.ledger()` shows.
    """

    def __init__(self, enable: bool = True, strict: bool = False, mode: str = "raise") -> None:
        if mode != "raise":
            raise LayoutError(f"Invalid mode {mode}; 'raise' is here, and shardwise.debug.ledger() lists instead")
        self._raises = enable

    def __enter__(self) -> ExplicitRedistributionContext:
        self.saved = of_thread.depth, of_thread.switched
        of_thread.depth, of_thread.switched = int(self._raises), False
        return self

    def __exit__(self, *exc: object) -> None:
        of_thread.depth, of_thread.switched = self.saved


# -- torch.distributed.tensor._ops.utils ---------------------------------------------------------------------------
def as_list(x: object) -> list[object]:
    return x if isinstance(x, list) else [x]


def normalize_dim(dim: int, ndim: int) -> int:
    return dim if dim >= 0 else dim + ndim


def normalize_dims(dims: int | Sequence[int], ndim: int) -> Sequence[int]:
    if isinstance(dims, int):
        return (normalize_dim(dims, ndim),)
    return type(dims)(normalize_dim(dim, ndim) for dim in dims)  # type: ignore[call-arg]


def prod(xs: Iterable[int]) -> int:
    return math.prod(xs)


def is_tensor_dim_sharded(spec: Spec, dim: int) -> bool:
    return any(p.is_shard(dim) for p in spec.placements)


def is_tensor_partial(spec: Spec) -> bool:
    return any(p.is_partial() for p in spec.placements)


def _ranks_by_dim(shape: Sequence[int], spec: Spec) -> dict[int, int]:
    cuts: dict[int, int] = {}
    for axis, p in enumerate(spec.placements):
        if p.is_shard():
            dim = p.dim % len(shape)  # type: ignore[attr-defined]
            cuts[dim] = cuts.get(dim, 1) * spec.mesh.shape[axis]
    return cuts


def is_tensor_shardable(shape: Sequence[int], spec: Spec, allow_unbacked_sharding: bool | None = None) -> bool:
    """Whether every rank would hold something."""
    return all(shape[dim] >= k for dim, k in _ranks_by_dim(shape, spec).items())


def is_tensor_evenly_shardable(shape: Sequence[int], spec: Spec) -> bool:
    """Whether every rank would hold equally much."""
    return all(shape[dim] % k == 0 for dim, k in _ranks_by_dim(shape, spec).items())


def is_tensor_evenly_shardable_on_dim(shape: Sequence[int], spec: Spec, dim: int) -> bool:
    dim = normalize_dim(dim, len(shape))
    return shape[dim] % _ranks_by_dim(shape, spec).get(dim, 1) == 0


def infer_broadcast_dims_map(common_shape: Sequence[int], input_shape: Sequence[int]) -> list[int]:
    """For each dim of a result the dim of an operand that it comes from, or -1 where the operand is stretched."""
    extra = len(common_shape) - len(input_shape)
    return [
        d - extra if d >= extra and input_shape[d - extra] == common_shape[d] else -1 for d in range(len(common_shape))
    ]


def map_placements_after_broadcast(
    placements: Sequence[Placement],
    shape: Sequence[int],
    broadcast_dims_map: Sequence[int],
    partial_to_replicate: bool = False,
) -> tuple[Placement, ...]:
    """The placements of an operand, given for the dims of the result, for its own dims: Replicate where a dim that is
    cut is stretched."""
    made: list[Placement] = []
    for p in as_placements(placements):
        if isinstance(p, Partial):
            made.append(REPLICATE if partial_to_replicate else p)
        elif isinstance(p, Shard):
            dim = broadcast_dims_map[normalize_dim(p.dim, len(shape))]
            made.append(p.at(dim) if dim >= 0 else REPLICATE)
        else:
            made.append(p)
    return tuple(made)


def shift_shard_dims_after_insert(placements: Sequence[Placement], insert_dim: int = 0) -> Sequence[Placement]:
    """The placements of a tensor that gets one more dim there."""
    return [
        p.at(p.dim + 1) if isinstance(p, Shard) and p.dim >= insert_dim else p for p in as_placements(placements)
    ]


def shift_shard_dims_after_remove(placements: Sequence[Placement], remove_dim: int = 0) -> Sequence[Placement]:
    """The placements of a tensor that loses that dim."""
    return [p.at(p.dim - 1) if isinstance(p, Shard) and p.dim > remove_dim else p for p in as_placements(placements)]


