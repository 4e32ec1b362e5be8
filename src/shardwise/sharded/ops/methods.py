"""Attributes and methods of the class, copies, comparisons, memory: answered tile by tile, or by the class itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note
from shardwise.sharded.groups import Group, communication_device, same_ranks
from shardwise.sharded.ops.registry import own
from shardwise.sharded.shard import Shard
from shardwise.sharded.tensor import ShardedTensor
from shardwise.torch_private import has_same_memory_kind, typed_storage

_T = torch.Tensor
Scalar = bool | int | float | complex


# -- what the class answers itself ---------------------------------------------------------------------------------
def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)


for _name in (
    "__repr__ __deepcopy__ __reduce_ex__ __len__ backward requires_grad_ retain_grad register_hook detach_ dim numel "
    "size to cpu cuda is_pinned"
).split():
    own(getattr(_T, _name))(_method(_name))
own(_T.ndimension)(_method("dim"))
own(_T.nelement, torch.numel)(_method("numel"))
for _name in (
    "requires_grad grad grad_fn is_leaf retains_grad data _version device is_meta shape dtype layout ndim"
).split():
    own(getattr(_T, _name).__get__)(lambda self, _name=_name: getattr(self, _name))
for _name in ("requires_grad", "grad", "data"):
    own(getattr(_T, _name).__set__)(lambda self, value, _name=_name: setattr(self, _name, value))
own(has_same_memory_kind)(lambda *args: False)


@own(_T.__format__)
def format_(tensor: ShardedTensor, format_spec: str) -> str:
    value = tensor.item() if format_spec and tensor.dim() == 0 else repr(tensor)
    return format(value, format_spec)


@own(_T.is_floating_point, torch.is_floating_point)
def is_floating_point(tensor: ShardedTensor) -> bool:
    return tensor.dtype.is_floating_point


@own(_T.is_complex, torch.is_complex)
def is_complex(tensor: ShardedTensor) -> bool:
    return tensor.dtype.is_complex


# -- copies --------------------------------------------------------------------------------------------------------
@own(_T.detach, torch.detach)
def detach(tensor: ShardedTensor) -> ShardedTensor:
    return tensor._with_parts([part.detach() for part in tensor._parts])


@own(_T.clone, torch.clone)
def clone(tensor: ShardedTensor, *, memory_format: torch.memory_format = torch.preserve_format) -> ShardedTensor:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only support torch.preserve_format or torch.contiguous_format for cloning, got "
            f"memory_format={memory_format}"
        )
    return tensor._with_parts([part.clone(memory_format=memory_format) for part in tensor._parts])


@own(_T.copy_)
def copy_(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> ShardedTensor:
    """Write the values of another tensor of this size: sharded in any tiles, or plain and the same on all ranks."""
    if not isinstance(tensor, ShardedTensor):
        raise TypeError("copy_: a plain tensor cannot take a ShardedTensor's values; use gather(dst, out)")
    if isinstance(source, ShardedTensor):
        if source.size() != tensor.size():
            raise RuntimeError(f"copy_: sizes {list(tensor.size())} and {list(source.size())} differ")
        parts = source._in_tiles_of(tensor)._parts
    else:
        whole = source.expand(tensor.size())
        parts = [whole[_slices(shard)] for shard in tensor.local_shards()]
    for part, new in zip(tensor._parts, parts):
        part.copy_(new, non_blocking)
    return tensor


def _slices(shard: Shard) -> tuple[slice, ...]:
    """Return the indices of a tile."""
    return tuple(slice(a, a + n) for a, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes))


# -- the whole value -----------------------------------------------------------------------------------------------
def _whole(tensor: ShardedTensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.full_tensor()


@own(_T.item)
def item(tensor: ShardedTensor) -> Scalar:
    return _whole(tensor).item()


@own(_T.tolist)
def tolist(tensor: ShardedTensor) -> list[Any] | Scalar:
    return _whole(tensor).tolist()


for _name in ("__bool__", "__int__", "__float__", "__index__", "__complex__"):
    own(getattr(_T, _name))(lambda self, _name=_name: getattr(_whole(self), _name)())


@own(torch.equal, torch.Tensor.equal)
def equal(input: ShardedTensor, other: ShardedTensor) -> bool:
    """Whether two tensors have the same size and values, whatever their tiles; the same answer on every rank."""
    return _compare("equal", torch.equal, input, other)


@own(torch.allclose, torch.Tensor.allclose)
def allclose(
    input: ShardedTensor, other: ShardedTensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Whether two tensors of one size are close everywhere, whatever their tiles; the same answer on every rank."""
    return _compare("allclose", lambda a, b: torch.allclose(a, b, rtol, atol, equal_nan), input, other)


def _compare(
    name: str, compare: Callable[[torch.Tensor, torch.Tensor], bool], input: ShardedTensor, other: ShardedTensor
) -> bool:
    """Whether a comparison holds for all tiles of all ranks."""
    if not isinstance(input, ShardedTensor) or not isinstance(other, ShardedTensor):
        raise TypeError(f"Both arguments to torch.{name} need to be of type ShardedTensor")
    group = input._process_group
    if input.size() != other.size() or not same_ranks(group, other._process_group):
        return False
    with torch.no_grad():
        theirs = other._in_tiles_of(input, Note(name, "operands in different tiles"))._parts
        answer = all(compare(a, b) for a, b in zip(input._parts, theirs))
    return true_on_all_ranks(answer, group)


def true_on_all_ranks(answer: bool, group: Group) -> bool:
    """Whether an answer is true on every rank of a group; a collective."""
    flag = torch.tensor([int(answer)], device=communication_device(group))
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


# -- memory --------------------------------------------------------------------------------------------------------
@own(_T.share_memory_)
def share_memory_(tensor: ShardedTensor) -> ShardedTensor:
    """Put the tiles of this rank into shared memory."""
    for part in tensor._parts:
        part.share_memory_()
    return tensor


@own(_T.is_shared)
def is_shared(tensor: ShardedTensor) -> bool:
    return all(part.is_shared() for part in tensor._parts)


@own(_T.apply_)
def apply_(tensor: ShardedTensor, callable: Callable[[Any], Any]) -> ShardedTensor:
    """Replace every element by a Python function of it; each rank does its own tiles."""
    for part in tensor._parts:
        part.apply_(callable)
    return tensor


@own(_T.untyped_storage, _T.storage, typed_storage)
def storage(tensor: ShardedTensor) -> None:
    raise RuntimeError(
        f"a ShardedTensor of size {list(tensor.size())} has no memory of its own: ask the tensors of local_shards(), "
        f"or gather it"
    )


@own(_T.__dlpack__)
def dlpack(tensor: ShardedTensor, **options: Any) -> Any:
    """Return the capsule of the whole value, as `numpy()` does."""
    return _whole(tensor).__dlpack__(**options)


@own(_T.__dlpack_device__)
def dlpack_device(tensor: ShardedTensor) -> Any:
    return torch.empty(0, device=tensor.device).__dlpack_device__()
