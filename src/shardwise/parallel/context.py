"""Context parallelism: the sequence cut over a mesh axis, and attention exact all the same.

Attention itself needs nothing from here: scaled_dot_product_attention of DTensors whose sequence is cut, in whatever
pieces, leaves the queries where they are (`shardwise.attention`). Here is the split that gives all ranks the same work
under a causal mask, with ways into it and back, and PyTorch's context manager, which cuts buffers and makes attention
that of the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardwise.api import distribute_tensor
from shardwise.attention.sequence import set_sequence_exchange
from shardwise.context import relaxed
from shardwise.errors import LayoutError, MeshError, RuleError, check_type
from shardwise.layout import Placement, Shard
from shardwise.layout.nesting import shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, normalize
from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh, as_mesh
from shardwise.move.pack import take
from shardwise.tensor import DTensor
from shardwise.wrapper import rebind, wrap


@overload
def zigzag(dim: int, length: int, ranks: int) -> Shard: ...
@overload
def zigzag(dim: int, length: int, ranks: Sequence[int]) -> tuple[Shard, ...]: ...
def zigzag(dim: int, length: int, ranks: int | Sequence[int]) -> Shard | tuple[Shard, ...]:
    """The Shard that gives rank i of n the chunks i and 2n-1-i of 2n: the same work for all under a causal mask.

    Args:
        dim: the dim that is the sequence.
        length: of the sequence.
        ranks: how many ranks are along the mesh axis; or along each of several, to all of which it is dealt.

    Returns:
        The Shard; a tuple of one for each axis where `ranks` is a sequence.

    Raises:
        LayoutError: `length` or `ranks` is not a number of positions or ranks.

    Example:
        >>> zigzag(1, 16, 4).pieces[0][1]
        ((2, 4), (12, 14))
    """
    check_type(ranks, (int, list, tuple), "zigzag: ranks", "give the number of ranks, or one for each axis")
    sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise LayoutError(f"zigzag: ranks must be an int > 0, or one for each axis, got {ranks!r}")
    if not isinstance(length, int) or length < 0:
        raise LayoutError(f"zigzag: length must be an int >= 0, got {length!r}")
    chunks = 2 * math.prod(sizes)

    def held(coords: tuple[int, ...]) -> Intervals:
        rank = 0
        for coord, n in zip(coords, sizes, strict=True):
            rank = rank * n + coord
        return normalize((length * j // chunks, length * (j + 1) // chunks) for j in (rank, chunks - 1 - rank))

    shards = shards_from_table(sizes, length, held, dim)
    return shards[0] if isinstance(ranks, int) else shards


def context_parallel_shard(
    mesh: DeviceMesh | SimulatedMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> list[DTensor]:
    """Cut the sequences of some tensors by `zigzag`; differentiable.

    Args:
        mesh: the axis or axes to cut over.
        buffers: DTensors, cut over these axes alone, or plain tensors, taken to be the same on all ranks.
        seq_dims: for each tensor, the dim that is the sequence.

    Returns:
        The tensors as DTensors.

    Raises:
        LayoutError: a dim is out of range, or another axis cuts it already.
        MeshError: a DTensor lies on a mesh without these axes.
    """
    cp, found = as_mesh(mesh), []
    for x, dim in zip(buffers, checked_dims(buffers, seq_dims, "context_parallel_shard", "seq_dims"), strict=True):
        if not isinstance(x, DTensor):
            x = distribute_tensor(x, cp.source, [REPLICATE] * len(cp.shape), src_data_rank=None)
        found.append(x.redistribute(placements=balanced_placements(x, dim, cp)))
    return found


def context_parallel_unshard(
    mesh: DeviceMesh | SimulatedMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> list[torch.Tensor]:
    """Make the sequences of some tensors whole; differentiable.

    Args:
        mesh: the axis or axes that the sequences are cut over.
        buffers: a DTensor stays one. A plain tensor is each rank's zig-zag part of the whole.
        seq_dims: for each tensor, the dim that is the sequence.

    Returns:
        DTensors whose sequence is whole on these axes; whole plain tensors where parts were plain.

    Raises:
        LayoutError: a dim is out of range.
        MeshError: a DTensor lies on a mesh without these axes, or `mesh` has several and a tensor is plain.
    """
    cp, found = as_mesh(mesh), list[torch.Tensor]()
    for x, dim in zip(buffers, checked_dims(buffers, seq_dims, "context_parallel_unshard", "seq_dims"), strict=True):
        if isinstance(x, DTensor):
            axes = _axes_in(x, cp)
            places = [REPLICATE if a in axes and p.is_shard(dim) else p for a, p in enumerate(x.placements)]
            found.append(x.redistribute(placements=places))
        else:
            found.append(from_parts(x, cp, dim, None).full_tensor())
    return found


def balanced_placements(x: DTensor, dim: int, cp: Mesh) -> list[Placement]:
    axes = _axes_in(x, cp)
    other = [a for a in x._layout.axes_of(dim) if a not in axes]
    if other:
        names = ", ".join(repr(x._layout.mesh.axis_names[a]) for a in other)
        raise LayoutError(
            f"context_parallel: dim {dim} of a tensor of shape {tuple(x.shape)} is cut on axis {names} already; "
            f"redistribute it, or give a mesh that has that axis too"
        )
    places = list(x.placements)
    for axis, shard in zip(axes, zigzag(dim, x.shape[dim], [x._layout.mesh.shape[a] for a in axes]), strict=True):
        places[axis] = shard
    return places


def _axes_in(x: DTensor, cp: Mesh) -> list[int]:
    """The axes of the mesh of `x` that the context-parallel mesh is made of."""
    mesh = x._layout.mesh
    if mesh is cp:
        return list(range(len(cp.shape)))
    if not set(cp.axis_names) <= set(mesh.axis_names):
        raise MeshError(
            f"context_parallel: mesh {cp!r} and the mesh {mesh!r} of a tensor have no axes in common by name; give the "
            f"tensor's own mesh, or a sub-mesh of it such as mesh['cp']"
        )
    return sorted(mesh.axis(name) for name in cp.axis_names)


def from_parts(local: torch.Tensor, cp: Mesh, dim: int, length: int | None) -> DTensor:
    """The tensor of whose sequence each rank holds its zig-zag part. Without `length`, sizes are exchanged."""
    if len(cp.shape) != 1:
        raise MeshError(
            f"context_parallel: plain tensors are cut over a mesh of one axis, got {cp!r}; give mesh[axis], or DTensors"
        )
    if length is None:
        length = DTensor.from_local(local, cp, [Shard(dim)]).shape[dim]
    shape = (*local.shape[:dim], length, *local.shape[dim + 1 :])
    return DTensor.from_local(local, cp, [zigzag(dim, length, cp.shape[0])], shape=shape)


def checked_dims(buffers: Sequence[object], dims: Sequence[int], what: str, name: str) -> list[int]:
    check_type(buffers, (list, tuple), f"{what}: buffers", "give a list of tensors")
    check_type(dims, (list, tuple), f"{what}: {name}", "give a list of dims")
    if len(buffers) != len(dims):
        raise LayoutError(f"{what}: {len(buffers)} buffers and {len(dims)} {name}; give one for each")
    found = []
    for i, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(x, torch.Tensor):
            raise LayoutError(f"{what}: {name}[{i}]: its buffer must be a tensor, got {type(x).__name__}")
        if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
            raise LayoutError(f"{what}: {name}[{i}] = {dim!r} is out of range for a tensor of {x.dim()} dims")
        found.append(dim % x.dim())
    return found


@contextmanager
def context_parallel(
    mesh: DeviceMesh | SimulatedMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Inside, buffers hold their zig-zag part of the sequence, and scaled_dot_product_attention is that of the whole.

    Args:
        mesh: the axis or axes to cut the sequences over.
        buffers: changed in place. A DTensor gets the axes of `mesh` cut. A plain tensor, the same on all ranks, becomes
            this rank's part; gradients of plain parameters are then this rank's share, for the program to add up.
        buffer_seq_dims: for each buffer, the dim that is the sequence.
        no_restore_buffers: those that do not get their old values back afterwards.

    Raises:
        LayoutError: the arguments do not fit each other, or a buffer requires grad.
        MeshError: a plain buffer cannot be cut over this mesh.
    """
    cp, every = as_mesh(mesh), list(buffers or ())
    dims = checked_dims(every, list(buffer_seq_dims or ()), "context_parallel", "buffer_seq_dims")
    kept = {id(x) for x in no_restore_buffers or ()}
    if not kept <= {id(x) for x in every}:
        raise LayoutError("context_parallel: no_restore_buffers has a tensor that is not among buffers; add it there")
    changes = [_change(x, d, cp, f"context_parallel: buffers[{i}]") for i, (x, d) in enumerate(zip(every, dims))]
    lengths = {x.shape[d] for x, d in zip(every, dims)}
    with ExitStack() as stack:
        for x, (put_part, restore) in zip(every, changes):
            put_part()
            if id(x) not in kept:
                stack.callback(restore)
        stack.enter_context(_no_fast_path())
        stack.enter_context(_WholeAttention(cp, lengths.pop() if len(lengths) == 1 else None))
        yield


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Inside, nn.MultiheadAttention calls functions that a mode sees; its fast path would attend to one part only."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _change(x: torch.Tensor, dim: int, cp: Mesh, what: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Functions that put a buffer's part in its place, and the whole back. All checks are made before."""
    if x.requires_grad:
        raise LayoutError(
            f"{what} requires grad, so it cannot be changed in place; detach it, and call requires_grad_() inside"
        )
    if isinstance(x, DTensor):
        whole, part = wrap(x._local, x._layout), x.redistribute(placements=balanced_placements(x, dim, cp))
        return functools.partial(rebind, x, part), functools.partial(rebind, x, whole)
    if cp.comm.simulated:
        raise MeshError(
            f"{what} is a plain tensor, which cannot hold one part for each rank of {cp!r}; give a DTensor: "
            f"distribute_tensor(x, mesh, [Replicate()])"
        )
    if len(cp.shape) != 1:
        raise MeshError(f"{what} is a plain tensor and mesh {cp!r} has {len(cp.shape)} axes; give mesh[axis]")
    shard = zigzag(dim, x.shape[dim], cp.shape[0])
    held = shard.part(x.shape[dim], cp.shape[0], 0, cp.comm.coords_here()[0][0])
    return functools.partial(setattr, x, "data", take(x.data, dim, held)), functools.partial(setattr, x, "data", x.data)


class _WholeAttention(TorchFunctionMode):
    """Inside, attention of plain tensors, each rank's zig-zag part of a sequence, is that of the whole sequences. Of
    DTensors it is so anyway; here its communication counts as asked for."""

    def __init__(self, cp: Mesh, length: int | None) -> None:
        super().__init__()
        self.cp, self.length = cp, length

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            return func(*args, **kwargs)
        with relaxed():
            if any(isinstance(x, DTensor) for x in (*args, *kwargs.values())):
                return func(*args, **kwargs)
            if func is F.multi_head_attention_forward:  # torch runs its body where a mode sees nothing of it
                raise RuleError(
                    "context_parallel: nn.MultiheadAttention of plain tensors would attend to this rank's part of the "
                    "sequence only; give it DTensors, or call scaled_dot_product_attention"
                )
            return self._attend(*args, **kwargs)

    def _attend(self, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        q, k, v = (from_parts(x, self.cp, x.dim() - 2, self.length) for x in (query, key, value))
        if attn_mask is not None:
            attn_mask = self._mask(attn_mask, q, k)
        out: Any = F.scaled_dot_product_attention(q, k, v, attn_mask, *args, **kwargs)
        return out.to_local()

    def _mask(self, mask: torch.Tensor, q: DTensor, k: DTensor) -> DTensor:
        """A mask that is whole, or of which this rank has the rows of its queries."""
        rows, columns = q.shape[-2], k.shape[-2]
        if mask.shape[-1] not in (1, columns):
            raise LayoutError(
                f"context_parallel: attn_mask of shape {tuple(mask.shape)} must have all {columns} keys as columns"
            )
        if mask.dim() < 2 or mask.shape[-2] in (1, rows):
            return DTensor.from_local(mask, self.cp, [REPLICATE])
        shape = (*mask.shape[:-2], rows, mask.shape[-1])
        return DTensor.from_local(mask, self.cp, [zigzag(mask.dim() - 2, rows, self.cp.shape[0])], shape=shape)


def set_rotate_method(rotate_method: str) -> None:
    """Set how keys and values come to the queries, from here on.

    Args:
        rotate_method: "allgather", "alltoall" (from rank to rank round a ring) or "auto" (by their size).

    Raises:
        RuleError: it is none of these.
    """
    ways = {"allgather": "gather", "alltoall": "ring", "auto": "auto"}
    check_type(rotate_method, str, "set_rotate_method: rotate_method", f"use one of {', '.join(ways)}")
    if rotate_method not in ways:
        raise RuleError(
            f"Context Parallel does not support using {rotate_method} for kv shards rotation; use one of "
            f"{', '.join(ways)}"
        )
    set_sequence_exchange(ways[rotate_method])
