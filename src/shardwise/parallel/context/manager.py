"""PyTorch's way of context parallelism: a context manager that cuts buffers and makes attention that of the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardwise.attention.sequence import set_sequence_exchange
from shardwise.context import relaxed
from shardwise.errors import LayoutError, MeshError, RuleError, check_type
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh, as_mesh
from shardwise.move.pack import take
from shardwise.parallel.context.buffers import balanced_placements, checked_dims, from_parts, zigzag
from shardwise.tensor import DTensor
from shardwise.wrapper import rebind, wrap


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
        LayoutError: it is none of these.
    """
    ways = {"allgather": "gather", "alltoall": "ring", "auto": "auto"}
    check_type(rotate_method, str, "set_rotate_method: rotate_method", f"use one of {', '.join(ways)}")
    if rotate_method not in ways:
        raise LayoutError(f"set_rotate_method: rotate_method must be one of {', '.join(ways)}, got {rotate_method!r}")
    set_sequence_exchange(ways[rotate_method])
