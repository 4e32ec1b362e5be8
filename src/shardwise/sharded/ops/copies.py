"""Copies, detached views and questions about the whole tensor: answered by the class, tile by tile."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.sharded.registry import own
from shardwise.sharded.tensor import ShardedTensor
from shardwise.torch_private import has_same_memory_kind, typed_storage

_T = torch.Tensor


def _method(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)


for _name in (
    "__repr__ __deepcopy__ __reduce_ex__ __len__ backward requires_grad_ retain_grad register_hook detach_ dim numel "
    "size to cpu cuda is_pinned ndimension nelement"
).split():
    target = {"ndimension": "dim", "nelement": "numel"}.get(_name, _name)
    own(getattr(_T, _name))(_method(target))
for (
    _name
) in "requires_grad grad grad_fn is_leaf retains_grad data _version device is_meta shape dtype layout ndim".split():
    own(getattr(_T, _name).__get__)(lambda self, _name=_name: getattr(self, _name))
for _name in ("requires_grad", "grad", "data"):
    own(getattr(_T, _name).__set__)(lambda self, value, _name=_name: setattr(self, _name, value))
own(torch.numel)(_method("numel"))


@own(_T.__format__)
def formatted(tensor: ShardedTensor, format_spec: str) -> str:
    return (
        format(tensor.item(), format_spec) if format_spec and tensor.dim() == 0 else format(repr(tensor), format_spec)
    )


own(has_same_memory_kind)(lambda *args: False)


@own(_T.is_floating_point, torch.is_floating_point)
def is_floating_point(tensor: ShardedTensor) -> bool:
    return tensor.dtype.is_floating_point


@own(_T.is_complex, torch.is_complex)
def is_complex(tensor: ShardedTensor) -> bool:
    return tensor.dtype.is_complex


@own(_T.detach, torch.detach)
def detach(tensor: ShardedTensor) -> ShardedTensor:
    return tensor._with_parts([part.detach() for part in tensor._parts])


@own(_T.clone, torch.clone)
def clone(tensor: ShardedTensor, *, memory_format: Any = torch.preserve_format) -> ShardedTensor:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only support torch.preserve_format or torch.contiguous_format for cloning, got "
            f"memory_format={memory_format}"
        )
    return tensor._with_parts([part.clone(memory_format=memory_format) for part in tensor._parts])


@own(_T.copy_)
def copy_(tensor: Any, source: Any, non_blocking: bool = False) -> Any:
    """Values of another tensor of this size: sharded in any tiles, or plain, the same on all ranks."""
    if not isinstance(tensor, ShardedTensor):
        raise TypeError("copy_: a plain tensor cannot take a ShardedTensor's values; use gather(dst, out)")
    if isinstance(source, ShardedTensor):
        if source.size() != tensor.size():
            raise RuntimeError(f"copy_: sizes {list(tensor.size())} and {list(source.size())} differ")
        parts = source._like(tensor)._parts
    else:
        whole = source.expand(tensor.size())
        parts = [whole[tuple(map(slice, s.metadata.shard_offsets, _ends(s)))] for s in tensor.local_shards()]
    for part, new in zip(tensor._parts, parts):
        part.copy_(new, non_blocking)
    return tensor


def _ends(shard: Any) -> list[int]:
    return [a + n for a, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)]


@own(_T.item)
def item(tensor: ShardedTensor) -> Any:
    return _whole(tensor).item()


@own(_T.tolist)
def tolist(tensor: ShardedTensor) -> Any:
    return _whole(tensor).tolist()


def _whole(tensor: Any) -> torch.Tensor:
    with torch.no_grad():
        return tensor.full_tensor()


# -- memory --------------------------------------------------------------------------------------------------------
@own(_T.share_memory_)
def share_memory_(tensor: ShardedTensor) -> ShardedTensor:
    """The tiles of this rank are put into shared memory."""
    for part in tensor._parts:
        part.share_memory_()
    return tensor


@own(_T.is_shared)
def is_shared(tensor: ShardedTensor) -> bool:
    return all(part.is_shared() for part in tensor._parts)


@own(_T.apply_)
def apply_(tensor: ShardedTensor, callable: Any) -> ShardedTensor:
    """Every element by a Python function, each rank its own."""
    for part in tensor._parts:
        part.apply_(callable)
    return tensor


@own(_T.untyped_storage, _T.storage, typed_storage)
def storage(tensor: ShardedTensor) -> Any:
    raise RuntimeError(
        f"a ShardedTensor of size {list(tensor.size())} has no memory of its own: ask the tensors of local_shards(), "
        f"or gather it"
    )


@own(_T.__dlpack__)
def dlpack(tensor: ShardedTensor, **options: Any) -> Any:
    """The whole value, as `numpy()` gives it."""
    return _whole(tensor).__dlpack__(**options)


@own(_T.__dlpack_device__)
def dlpack_device(tensor: ShardedTensor) -> Any:
    return torch.empty(0, device=tensor.device).__dlpack_device__()


for _name in ("__bool__", "__int__", "__float__", "__index__", "__complex__"):
    own(getattr(_T, _name))(lambda self, _name=_name: getattr(_whole(self), _name)())
