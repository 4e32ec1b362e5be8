"""Ops of sharded tensors in the form in which ops are registered: `op(types, args, kwargs, process_group)`.

Each calls the function that does the work. A function with `args, kwargs, pg` only returns local shards and metadata.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.sharded.metadata import ShardedTensorMetadata
from shardwise.sharded.ops import embedding, fills, methods
from shardwise.sharded.shard import Shard
from shardwise.sharded.tensor import ShardedTensor

Types = Sequence[type]
Args = Sequence[Any]
Kwargs = Mapping[str, Any] | None
Group = dist.ProcessGroup | None
Parts = tuple[list[Shard], ShardedTensorMetadata]


# -- comparisons ---------------------------------------------------------------------------------------------------
_COMPARE: dict[Callable[..., bool], Callable[..., bool]] = {
    torch.equal: methods.equal,
    torch.allclose: methods.allclose,
}


def _communicate_result(result: object, pg: dist.ProcessGroup) -> bool:
    """Whether the result is true on every rank of the group."""
    return methods.true_on_all_ranks(bool(result), pg)


def binary_cmp(
    cmp_fun: Callable[..., bool], types: Types, args: Args, kwargs: Kwargs = None, process_group: Group = None
) -> bool:
    """`torch.equal` or `torch.allclose` of two sharded tensors in any tiles."""
    if len(args) != 2:
        raise ValueError(f"Expected two arguments for torch.{cmp_fun.__name__}, got {len(args)}")
    return _COMPARE[cmp_fun](*args, **(kwargs or {}))


def equal(types: Types, args: Args, kwargs: Kwargs, process_group: Group) -> bool:
    return binary_cmp(torch.equal, types, args, kwargs, process_group)


def allclose(types: Types, args: Args, kwargs: Kwargs, process_group: Group) -> bool:
    return binary_cmp(torch.allclose, types, args, kwargs, process_group)


# -- initial values ------------------------------------------------------------------------------------------------
def uniform_(types: Types, args: Args = (), kwargs: Kwargs = None, pg: Group = None) -> ShardedTensor:
    return fills.uniform_(*args, **(kwargs or {}))


def normal_(types: Types, args: Args = (), kwargs: Kwargs = None, pg: Group = None) -> ShardedTensor:
    return fills.normal_(*args, **(kwargs or {}))


def kaiming_uniform_(types: Types, args: Args = (), kwargs: Kwargs = None, pg: Group = None) -> ShardedTensor:
    return fills.kaiming_uniform_(*args, **(kwargs or {}))


def constant_(types: Types, args: Args = (), kwargs: Kwargs = None, pg: Group = None) -> ShardedTensor:
    return fills.constant_(*args, **(kwargs or {}))


# -- look-ups ------------------------------------------------------------------------------------------------------
def sharded_embedding(types: Types, args: Args, kwargs: Kwargs, pg: Group) -> torch.Tensor:
    """`F.embedding` of a table in any tiles."""
    return embedding.embedding(*args, **(kwargs or {}))


def sharded_embedding_bag(types: Types, args: Args, kwargs: Kwargs, pg: Group) -> torch.Tensor:
    """`F.embedding_bag` of a table in any tiles."""
    return embedding.embedding_bag(*args, **(kwargs or {}))


# -- copies, casts, questions --------------------------------------------------------------------------------------
def tensor_device(types: Types, args: Args = (), kwargs: Kwargs = None, pg: Group = None) -> torch.device:
    return args[0].device


def st_is_meta(types: Types, args: Args = (), kwargs: Kwargs = None, pg: Group = None) -> bool:
    return args[0].is_meta


def sharded_type_as_check(*args: Any, **kwargs: Any) -> None:
    """Raise where `type_as` is called without a tensor to take the type of."""
    if len(args) < 2:
        raise ValueError("Needs to give a tensor to cast type as!")
    if not isinstance(args[1], torch.Tensor):
        raise ValueError(f"Needs to give a Tensor or ShardedTensor to cast type as, got {type(args[1]).__name__}")


def same_dtype(*args: Any, **kwargs: Any) -> bool:
    """Whether the first two arguments have the same dtype."""
    return args[0].dtype == args[1].dtype


def sharded_type_as(args: Args, kwargs: Kwargs, pg: Group) -> Parts:
    return _parts(args[0].to(args[1].dtype))


def sharded_deepcopy(args: Args, kwargs: Kwargs, pg: Group) -> Parts:
    return _parts(copy.deepcopy(args[0]))


def sharded_clone(args: Args, kwargs: Kwargs, pg: Group) -> Parts:
    return _parts(args[0].clone(**(kwargs or {})))


def sharded_detach(args: Args, kwargs: Kwargs, pg: Group) -> Parts:
    return _parts(args[0].detach())


def sharded_inplace_copy(types: Types, args: Args, kwargs: Kwargs, pg: Group) -> ShardedTensor:
    return args[0].copy_(*args[1:], **(kwargs or {}))


def tensor_requires_grad_set(types: Types, args: Args = (), kwargs: Kwargs = None, pg: Group = None) -> ShardedTensor:
    return args[0].requires_grad_(*args[1:], **(kwargs or {}))


def tensor_has_compatible_shallow_copy_type(
    types: Types, args: Args = (), kwargs: Kwargs = None, pg: Group = None
) -> bool:
    """False: a sharded tensor cannot take over another tensor's memory."""
    return False


def _parts(tensor: ShardedTensor) -> Parts:
    return tensor.local_shards(), tensor.metadata()
