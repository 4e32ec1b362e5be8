"""The base of sharded tensors: a wrapper that knows metadata and local shards, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.sharded.checks import check_strided, checked_properties
from shardwise.sharded.metadata import ShardedTensorMetadata, TensorProperties, as_size
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ShardingSpec, spec_of
from shardwise.torch_private import ignore_torch_function, make_wrapper


def new_tile(size: Sequence[int], device: torch.device, properties: TensorProperties) -> torch.Tensor:
    """A tile with undefined values."""
    tile = torch.empty(size, dtype=properties.dtype, device=device, pin_memory=properties.pin_memory)
    return tile.requires_grad_() if properties.requires_grad else tile


class ShardedTensorBase(torch.Tensor):
    """Metadata and local shards, nothing else: no process group, no ops."""

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]

    @staticmethod
    def __new__(cls: type, sharding_spec: ShardingSpec, *size: Any, **kwargs: Any) -> Any:
        if not isinstance(sharding_spec, ShardingSpec):
            raise ValueError(f"Expecting ShardingSpec but got: {type(sharding_spec)}")
        properties = checked_properties(
            kwargs.get("dtype"),
            kwargs.get("layout", torch.strided),
            kwargs.get("requires_grad", False),
            kwargs.get("pin_memory", False),
            kwargs.get("memory_format", torch.contiguous_format),
        )
        metadata = sharding_spec.build_metadata(as_size(size), properties)
        return blank(cls, sharding_spec, metadata)

    def metadata(self) -> ShardedTensorMetadata:
        """What every rank knows: tiles, size, properties."""
        return self._metadata

    def local_shards(self) -> list[Shard]:
        """The shards this rank holds; none where it holds none."""
        return self._local_shards

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls, local_shards: list[Shard], sharded_tensor_metadata: ShardedTensorMetadata, sharding_spec: Any = None
    ) -> Any:
        """From what this rank holds and what everyone knows. No communication: the metadata is taken on trust."""
        metadata = sharded_tensor_metadata
        if not metadata.shards_metadata:
            raise ValueError("shards_metadata must not be empty!")
        check_strided(metadata.tensor_properties)
        spec = spec_of(metadata.shards_metadata) if sharding_spec is None else sharding_spec
        base = blank(cls, spec, metadata)
        base._local_shards = local_shards
        return base

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"A {cls.__name__} object is being used from c++ while calling {func.__module__}.{func.__name__} but there "
            f"is no custom __torch_dispatch__ implementation for it; use a ShardedTensor"
        )

    __torch_function__: Any = ignore_torch_function

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._metadata})"

    def __hash__(self) -> int:
        return id(self)


def blank(cls: type, spec: ShardingSpec, metadata: ShardedTensorMetadata) -> Any:
    """The wrapper without any shards."""
    made: Any = make_wrapper(cls, metadata.size, dtype=metadata.tensor_properties.dtype, device=device_of(metadata))
    made._sharding_spec, made._metadata, made._local_shards = spec, metadata, []
    return made


def device_of(metadata: ShardedTensorMetadata) -> torch.device:
    """The kind of device the tiles are on; the wrapper itself has no memory."""
    first = metadata.shards_metadata[0].placement if metadata.shards_metadata else None
    return first.device() if first is not None else torch.device("cpu")
