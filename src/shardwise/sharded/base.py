"""The base of sharded tensors: a wrapper that knows metadata and local shards, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch

from shardwise.drawing import figure, markup
from shardwise.errors import DimError, out_of_range
from shardwise.sharded.checks import check_strided, checked_properties
from shardwise.sharded.groups import Group
from shardwise.sharded.metadata import ShardedTensorMetadata, TensorProperties, as_size
from shardwise.sharded.shard import Shard
from shardwise.sharded.showing import picture_of, text_of
from shardwise.sharded.spec import ShardingSpec, spec_of
from shardwise.torch_private.tensors import ignore_torch_function, make_wrapper


class ShardedTensorBase(torch.Tensor):
    """Metadata and local shards, nothing else: no process group, no ops.

    Args:
        sharding_spec: Which tiles the tensor is cut into, and who owns them.
        *size: The global size, as ints or as one sequence of ints.
        **kwargs: `dtype`, `layout`, `requires_grad`, `pin_memory` and `memory_format`, as of ShardedTensor.
    """

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]

    @staticmethod
    def __new__(cls: type, sharding_spec: ShardingSpec, *size: int | Sequence[int], **kwargs: Any) -> Any:
        if not isinstance(sharding_spec, ShardingSpec):
            raise ValueError(f"Expecting ShardingSpec but got: {type(sharding_spec)}")
        metadata = sharding_spec.build_metadata(as_size(size), checked_properties(**kwargs))
        return blank(cls, sharding_spec, metadata)

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> Any:
        """Make a tensor from this rank's shards and the metadata of all, without communication or checks.

        Raises:
            ValueError: If the metadata has no tiles, or its layout is not strided.
        """
        metadata = sharded_tensor_metadata
        if not metadata.shards_metadata:
            raise ValueError("shards_metadata must not be empty!")
        check_strided(metadata.tensor_properties.layout)
        spec = spec_of(metadata.shards_metadata) if sharding_spec is None else sharding_spec
        base = blank(cls, spec, metadata)
        base._local_shards = local_shards
        return base

    # -- what every rank knows ----------------------------------------------------------------------------------
    def metadata(self) -> ShardedTensorMetadata:
        """Return what every rank knows: tiles, size, properties."""
        return self._metadata

    def local_shards(self) -> list[Shard]:
        """Return the shards this rank holds; an empty list where it holds none."""
        return self._local_shards

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._metadata.size

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._metadata.tensor_properties.dtype

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return self._metadata.tensor_properties.layout

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._metadata.size)

    def size(self, dim: int | None = None) -> Any:
        """Return the global size, or that of one dim.

        Args:
            dim: The dim; by default the sizes of all are returned.

        Raises:
            DimError: If the tensor has no such dim.
        """
        size = self._metadata.size
        if dim is None:
            return size
        if not -len(size) <= dim < len(size):
            raise DimError(
                f"Argument ``dim`` must be within the range of tensor dimensions [{-len(size)}, {len(size)}). "
                f"{out_of_range(dim, len(size))}"
            )
        return size[dim]

    def dim(self) -> int:
        return len(self._metadata.size)

    def numel(self) -> int:
        return self._metadata.size.numel()

    def __len__(self) -> int:
        if not self._metadata.size:
            raise TypeError("len() of a 0-d tensor")
        return self._metadata.size[0]

    def is_pinned(self, device: torch.device | str | None = None) -> bool:
        return self._metadata.tensor_properties.pin_memory

    # -- calls of torch's functions -----------------------------------------------------------------------------
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: tuple[type, ...], args: object = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"A {cls.__name__} object is being used from c++ while calling {func.__module__}.{func.__name__} but there "
            f"is no custom __torch_dispatch__ implementation for it; use a ShardedTensor"
        )

    __torch_function__: Any = ignore_torch_function

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return text_of(type(self).__name__, self._metadata, self._local_shards)

    def _repr_html_(self) -> str:
        return figure(picture_of(self._metadata))

    def __rich__(self) -> str:
        return markup(picture_of(self._metadata))

    def __hash__(self) -> int:
        return id(self)


class Options(TypedDict, total=False):
    """The options of every function that makes a tensor from a spec."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: Group | None
    init_rrefs: bool


def blank(cls: type, spec: ShardingSpec, metadata: ShardedTensorMetadata) -> Any:
    """Return the wrapper without any shards."""
    made: Any = make_wrapper(cls, metadata.size, dtype=metadata.tensor_properties.dtype, device=_device_of(metadata))
    made._sharding_spec, made._metadata, made._local_shards = spec, metadata, []
    return made


def _device_of(metadata: ShardedTensorMetadata) -> torch.device:
    """Return the kind of device the tiles are on; the wrapper itself has no memory."""
    first = metadata.shards_metadata[0].placement if metadata.shards_metadata else None
    return first.device() if first is not None else torch.device("cpu")


def new_tile(size: Sequence[int], device: torch.device, properties: TensorProperties) -> torch.Tensor:
    """Return a tile with undefined values."""
    tile = torch.empty(size, dtype=properties.dtype, device=device, pin_memory=properties.pin_memory)
    return tile.requires_grad_() if properties.requires_grad else tile


def empty_tile(metadata: ShardedTensorMetadata) -> torch.Tensor:
    """Return the tensor without elements of a rank that owns no tile, without grad."""
    device = _device_of(metadata)
    if device.type == "cuda" and not torch.cuda.is_available():
        device = torch.device("cpu")  # the tiles are on other ranks: nothing is computed here
    elif device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return new_tile([0], device, metadata.tensor_properties).detach()
