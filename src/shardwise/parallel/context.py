"""Context parallel: the sequence cut over a mesh axis, attention exact all the same.

Attention itself needs nothing from here: scaled_dot_product_attention of DTensors whose sequence is cut, in whatever
pieces, leaves the queries where they are (rules/sequence.py). This is the split that gives all ranks the same work
under a causal mask, ways into it and back, and PyTorch's context manager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardwise.api import distribute_tensor
from shardwise.attention.sequence import sequence_exchange, set_sequence_exchange
from shardwise.context import relaxed
from shardwise.errors import LayoutError, MeshError, RuleError
from shardwise.layout import Shard
from shardwise.layout.layout import shards_from_table
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, normalize
from shardwise.mesh import Mesh, as_mesh
from shardwise.move.pack import take
from shardwise.tensor import DTensor
from shardwise.wrapper import rebind, wrap

__all__ = [
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "sequence_exchange",
    "set_rotate_method",
    "zigzag",
]


# -- the balanced split ------------------------------------------------------------------------------------
def zigzag(dim: int, length: int, ranks: int | Sequence[int]) -> Any:
    """The Shard that gives rank i of n the chunks i and 2n-1-i of 2n: the same work for all under a causal mask.

    Of several numbers of ranks, one Shard an axis: the sequence is dealt to all ranks along these axes, in mesh order.

    >>> zigzag(1, 16, 4).pieces[0][1]
    ((2, 4), (12, 14))
    """
    sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise LayoutError(f"zigzag: ranks must be an int > 0, or one for each axis, got {ranks!r}")
    if not isinstance(length, int) or length < 0:
        raise LayoutError(f"zigzag: length must be an int >= 0, got {length!r}")
    total = 1
    for n in sizes:
        total *= n

    def held(spot: tuple[int, ...]) -> Intervals:
        i = 0
        for c, n in zip(spot, sizes, strict=True):
            i = i * n + c
        return normalize(_chunk(length, 2 * total, j) for j in (i, 2 * total - 1 - i))

    shards = shards_from_table(sizes, length, held, dim)
    return shards[0] if isinstance(ranks, int) else shards


def _chunk(length: int, parts: int, i: int) -> tuple[int, int]:
    """Part `i` where sizes differ by one at most."""
    return length * i // parts, length * (i + 1) // parts


# -- into it, and back -------------------------------------------------------------------------------------
def context_parallel_shard(mesh: Any, buffers: Sequence[Any], seq_dims: Sequence[int]) -> list[DTensor]:
    """The tensors as DTensors whose dim `seq_dims[i]` is cut by `zigzag`; differentiable.

    Of a DTensor the axis (or axes) of `mesh` is cut and the others stay as they are. A plain tensor is taken to be the
    same on all ranks."""
    cp = as_mesh(mesh)
    _one_each("context_parallel_shard", "seq_dims", buffers, seq_dims)
    found = []
    for i, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        dim = _checked_dim(x, dim, f"context_parallel_shard: seq_dims[{i}]")
        if not isinstance(x, DTensor):
            x = distribute_tensor(x, cp.source, [REPLICATE] * len(cp.shape), src_data_rank=None)
        found.append(x.redistribute(placements=_balanced(x, dim, cp)))
    return found


def context_parallel_unshard(mesh: Any, buffers: Sequence[Any], seq_dims: Sequence[int]) -> list[Any]:
    """The tensors with their sequences whole on the axes of `mesh`: DTensors stay DTensors; of plain ones, each rank's
    zig-zag part makes the whole plain tensor. Differentiable."""
    cp = as_mesh(mesh)
    _one_each("context_parallel_unshard", "seq_dims", buffers, seq_dims)
    found: list[Any] = []
    for i, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        dim = _checked_dim(x, dim, f"context_parallel_unshard: seq_dims[{i}]")
        if isinstance(x, DTensor):
            axes = _axes_in(x, cp)
            places = [REPLICATE if a in axes and p.is_shard(dim) else p for a, p in enumerate(x.placements)]
            found.append(x.redistribute(placements=places))
        else:
            found.append(_from_parts(x, cp, dim, None).full_tensor())
    return found


def _balanced(x: DTensor, dim: int, cp: Mesh) -> list[Any]:
    """The placements of `x` with `dim` cut by zigzag on the axes of the mesh `cp`."""
    axes = _axes_in(x, cp)
    other = [a for a in x._layout.axes_of(dim) if a not in axes]
    if other:
        names = ", ".join(repr(x._layout.mesh.axis_names[a]) for a in other)
        raise LayoutError(
            f"context_parallel: dim {dim} of a tensor of shape {tuple(x.shape)} is cut on axis {names} already; "
            f"redistribute it, or give a mesh that has that axis too"
        )
    places: list[Any] = list(x.placements)
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


def _from_parts(local: torch.Tensor, cp: Mesh, dim: int, length: int | None) -> DTensor:
    """What the ranks hold of a sequence in zig-zag parts, as one tensor. Without `length`, sizes are exchanged."""
    if len(cp.shape) != 1:
        raise MeshError(
            f"context_parallel: plain tensors are cut over a mesh of one axis, got {cp!r}; give mesh[axis], or DTensors"
        )
    if length is None:
        length = DTensor.from_local(local, cp, [Shard(dim)]).shape[dim]
    shape = (*local.shape[:dim], length, *local.shape[dim + 1 :])
    return DTensor.from_local(local, cp, [zigzag(dim, length, cp.shape[0])], shape=shape)


def _checked_dim(x: Any, dim: int, what: str) -> int:
    if not isinstance(x, torch.Tensor):
        raise LayoutError(f"{what}: its buffer must be a tensor, got {type(x).__name__}")
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise LayoutError(f"{what} = {dim!r} is out of range for a tensor of {x.dim()} dims")
    return dim % x.dim()


def _one_each(what: str, name: str, buffers: Sequence[Any], dims: Sequence[int]) -> None:
    if len(buffers) != len(dims):
        raise LayoutError(f"{what}: {len(buffers)} buffers and {len(dims)} {name}; give one for each")


# -- PyTorch's way -----------------------------------------------------------------------------------------
@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Inside, buffers hold their zig-zag part of the sequence, and scaled_dot_product_attention is that of the whole.

    The buffers are changed in place and get their old values back afterwards, except those in `no_restore_buffers`.
    A DTensor gets the axes of `mesh` cut and its gradients are right without further ado. A plain tensor, the same on
    all ranks, becomes this rank's part; attention of plain tensors in there takes them for parts of whole sequences,
    and gradients of plain parameters are this rank's share, for the program to add up.
    """
    cp, every, dims = as_mesh(mesh), list(buffers or ()), list(buffer_seq_dims or ())
    _one_each("context_parallel", "buffer_seq_dims", every, dims)
    kept = {id(x) for x in no_restore_buffers or ()}
    if not kept <= {id(x) for x in every}:
        raise LayoutError("context_parallel: no_restore_buffers has a tensor that is not among buffers; add it there")
    dims = [_checked_dim(x, d, f"context_parallel: buffer_seq_dims[{i}]") for i, (x, d) in enumerate(zip(every, dims))]
    changes = [_change(x, d, cp, f"context_parallel: buffers[{i}]") for i, (x, d) in enumerate(zip(every, dims))]
    lengths = {x.shape[d] for x, d in zip(every, dims)}
    with ExitStack() as stack:
        for x, change in zip(every, changes):
            restore = change()
            if id(x) not in kept:
                stack.callback(restore)
        stack.enter_context(_no_fast_path())
        stack.enter_context(_WholeAttention(cp, lengths.pop() if len(lengths) == 1 else None))
        yield


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Inside, nn.MultiheadAttention comes by as a function: its fast path would see one part of the sequence only."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _change(x: torch.Tensor, dim: int, cp: Mesh, what: str) -> Callable[[], Callable[[], None]]:
    """What puts a buffer's part in its place and gives what puts the whole back; checked before anything changes."""
    if x.requires_grad:
        raise LayoutError(
            f"{what} requires grad, so it cannot be changed in place; detach it, and call requires_grad_() inside"
        )
    if isinstance(x, DTensor):
        whole, part = wrap(x._local, x._layout), x.redistribute(placements=_balanced(x, dim, cp))

        def put_part() -> Callable[[], None]:
            rebind(x, part)
            return lambda: rebind(x, whole)

        return put_part
    if cp.comm.simulated:
        raise MeshError(
            f"{what} is a plain tensor, which cannot hold one part for each rank of {cp!r}; give a DTensor: "
            f"distribute_tensor(x, mesh, [Replicate()])"
        )
    if len(cp.shape) != 1:
        raise MeshError(f"{what} is a plain tensor and mesh {cp!r} has {len(cp.shape)} axes; give mesh[axis]")
    shard = zigzag(dim, x.shape[dim], cp.shape[0])
    held = shard.part(x.shape[dim], cp.shape[0], 0, cp.comm.played()[0][0])
    plain_whole, plain_part = x.data, take(x.data, dim, held)

    def put() -> Callable[[], None]:
        x.data = plain_part
        return lambda: setattr(x, "data", plain_whole)

    return put


class _WholeAttention(TorchFunctionMode):
    """Attention of plain tensors, each rank's zig-zag part of a sequence, is that of the whole sequences. Of DTensors
    it is so anyway; here its communication counts as asked for."""

    def __init__(self, cp: Mesh, length: int | None) -> None:
        super().__init__()
        self.cp, self.length = cp, length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        q, k, v = (self._whole(x, x.dim() - 2) for x in (query, key, value))
        if attn_mask is not None:
            attn_mask = self._mask(attn_mask, q, k)
        out: Any = F.scaled_dot_product_attention(q, k, v, attn_mask, *args, **kwargs)
        return out.to_local()

    def _whole(self, x: torch.Tensor, dim: int) -> DTensor:
        return _from_parts(x, self.cp, dim, self.length)

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
    """How keys and values come to the queries, from here on: "allgather", "alltoall" (round the ring) or "auto"."""
    ways = {"allgather": "gather", "alltoall": "ring", "auto": "auto"}
    if rotate_method not in ways:
        raise LayoutError(f"set_rotate_method: rotate_method must be one of {', '.join(ways)}, got {rotate_method!r}")
    set_sequence_exchange(ways[rotate_method])
