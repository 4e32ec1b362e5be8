"""Copies and pickles of sharded tensors, and the process group that they are loaded with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.errors import check_type
from shardwise.sharded.base import ShardedTensorBase
from shardwise.sharded.checks import checked_parts
from shardwise.sharded.groups import Group, as_group
from shardwise.sharded.metadata import (
    MEM_FORMAT_ENCODING,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    as_size,
    state_of,
)
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec
from shardwise.torch_private.distributed import remote_device
from shardwise.torch_private.tensors import make_wrapper, without_torch_function

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor

_state = threading.local()


def current_process_group() -> Group:
    """Return the group of the enclosing `load_with_process_group`, else the default one."""
    return as_group(getattr(_state, "group", None))


@contextmanager
def load_with_process_group(process_group: Group) -> Iterator[Group]:
    """Inside, pickled sharded tensors are loaded onto this process group.

    Args:
        process_group: The group of the loaded tensors. Each rank of it loads what the same rank saved.

    Raises:
        RuntimeError: Inside of another `load_with_process_group`.
    """
    if getattr(_state, "group", None) is not None:
        raise RuntimeError('ProcessGroup already set by previous "load_with_process_group" context manager')
    _state.group = process_group
    try:
        yield process_group
    finally:
        _state.group = None


@dataclass
class ProcessGroupState:
    """Which rank saved a tensor, in its group and in the world."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    def __setstate__(self, state: object) -> None:
        for name, value in state_of(self, state).items():
            check_type(value, int, f"ProcessGroupState.{name}")
            setattr(self, name, value)

    @staticmethod
    def of(group: Group) -> ProcessGroupState:
        return ProcessGroupState(
            dist.get_rank(group), dist.get_rank(), dist.get_world_size(group), dist.get_world_size()
        )


_STATE = {
    "local_shards": list,
    "metadata": ShardedTensorMetadata,
    "process_group": ProcessGroupState,
    "sharding_spec": ShardingSpec,
    "init_rrefs": bool,
}
State = tuple[list[Shard], ShardedTensorMetadata, ProcessGroupState, ShardingSpec, bool]


def get_state(tensor: ShardedTensor) -> State:
    """Return what is pickled: what this rank holds, and where it was saved."""
    state = ProcessGroupState.of(tensor._process_group)
    shards = [Shard(_with_own_memory(shard.tensor), shard.metadata) for shard in tensor._local_shards]
    return shards, tensor._metadata, state, tensor._sharding_spec, tensor._init_rrefs


def set_state(tensor: ShardedTensor, state: State) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            'Need to initialize default process group using "init_process_group" before loading ShardedTensor'
        )
    if not isinstance(state, tuple) or len(state) != len(_STATE):
        raise ValueError(f"ShardedTensor from a pickle: expected its {', '.join(_STATE)}, got {state!r}")
    for value, (name, kind) in zip(state, _STATE.items(), strict=True):
        check_type(value, kind, f"ShardedTensor from a pickle: {name}")
    shards, metadata, saved, spec, init_rrefs = state
    for i, shard in enumerate(shards):
        check_type(shard, Shard, f"ShardedTensor from a pickle: local_shards[{i}]")
        shard.__post_init__()
    group = current_process_group()
    now = ProcessGroupState.of(group)
    for field in fields(ProcessGroupState):
        then, here = getattr(saved, field.name), getattr(now, field.name)
        if then != here:
            text = field.name.replace("_", " ").capitalize()
            raise RuntimeError(f"{text} at save time was {then}, but at load time was {here}")
    with without_torch_function():
        made = tuple(torch.Tensor.size(tensor)), torch.Tensor.dtype.__get__(tensor)  # type: ignore[attr-defined]
    if made != (tuple(metadata.size), metadata.tensor_properties.dtype):
        raise ValueError(
            f"ShardedTensor from a pickle: it is of size {made[0]} and {made[1]}, its metadata of size "
            f"{tuple(metadata.size)} and {metadata.tensor_properties.dtype}"
        )
    shards, metadata, spec = checked_parts(shards, metadata, spec, group)
    tensor._local_shards, tensor._metadata, tensor._sharding_spec = shards, metadata, spec
    tensor._join(group, init_rrefs)


def reduce(tensor: ShardedTensor, protocol: object) -> tuple[Any, ...]:
    """Return what `__reduce_ex__` does: a function that makes a blank tensor, its arguments, and the state."""
    is_param = bool(getattr(tensor, "_is_param", False))
    return _unpickled, (type(tensor), tensor._metadata.size, tensor.dtype, is_param), get_state(tensor)


def deep_copy(tensor: ShardedTensor, memo: dict[int, Any]) -> ShardedTensor:
    """See `copy.deepcopy`. The copy has no remote shards."""
    if id(tensor) not in memo:
        parts = [part.detach().clone().requires_grad_(part.requires_grad) for part in tensor._parts]
        memo[id(tensor)] = copy = tensor._with_parts(parts)
        if getattr(tensor, "_is_param", False):
            copy._is_param = True  # type: ignore[attr-defined]
    return memo[id(tensor)]


def _with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it is saved: a leaf, and no view of larger memory."""
    requires_grad, tensor = tensor.requires_grad, tensor.detach()
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    return tensor.requires_grad_(requires_grad)


def _unpickled(cls: type, size: torch.Size, dtype: torch.dtype, is_param: bool) -> Any:
    if not isinstance(cls, type) or not issubclass(cls, ShardedTensorBase):
        raise TypeError(f"ShardedTensor from a pickle: its class must be a ShardedTensor's, got {cls!r}")
    check_type(size, (tuple, list), "ShardedTensor from a pickle: size")
    check_type(dtype, torch.dtype, "ShardedTensor from a pickle: dtype")
    check_type(is_param, bool, "ShardedTensor from a pickle: is_param")
    size = as_size(size)
    made: Any = make_wrapper(cls, size, dtype=dtype)
    made._local_shards = []
    if is_param:
        made._is_param = True
    return made


# What a pickled tensor is made of: torch.load(weights_only=True) may build these.
_METADATA = [Shard, ShardMetadata, ShardedTensorMetadata, TensorProperties, MEM_FORMAT_ENCODING]
_SPECS = [ChunkShardingSpec, EnumerableShardingSpec, remote_device]
_OWN: list[Any] = [_unpickled, ProcessGroupState]
_FORMER = [(kind, f"shardwise.sharded.saving.{kind.__name__}") for kind in _OWN]  # where older files have them
torch.serialization.add_safe_globals([*_METADATA, *_SPECS, *_OWN, *_FORMER])
