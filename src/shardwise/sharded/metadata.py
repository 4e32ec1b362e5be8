"""What every rank knows of a sharded tensor: its tiles with their owners, its size, its properties."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import torch

from shardwise.errors import check_type
from shardwise.torch_private.distributed import remote_device

_INTS = frozenset({int})
as_remote_device = functools.lru_cache(maxsize=65536)(remote_device)  # equal texts give the same object


def state_of(value: object, state: object) -> dict[str, Any]:
    """The fields of a pickled object, from a file that may say anything; an error if it has others."""
    kind = type(value)
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # of a class with slots
        state = state[1]
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(state, dict) or set(state) != names:
        raise ValueError(f"{kind.__name__} from a pickle: expected the fields {sorted(names)}, got {state!r}")
    return state


@dataclass(slots=True, init=False, repr=False)
class ShardMetadata:
    """One tile.

    Args:
        shard_offsets: Where it starts in each dim.
        shard_sizes: How long it is in each dim.
        placement: Where it lives, such as "rank:1/cuda:0".

    Raises:
        ValueError: If there are not as many offsets as sizes, or one is negative.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: remote_device | None

    def __init__(
        self, shard_offsets: list[int], shard_sizes: list[int], placement: str | remote_device | None = None
    ) -> None:
        self.shard_offsets, self.shard_sizes = shard_offsets, shard_sizes
        self.placement = as_remote_device(placement) if type(placement) is str else placement  # type: ignore[assignment]
        for name, numbers in (("shard_offsets", shard_offsets), ("shard_sizes", shard_sizes)):
            if not isinstance(numbers, (list, tuple)) or not _INTS.issuperset(map(type, numbers)):
                raise TypeError(f"{name}: expected a list of ints, got {numbers!r}")
        if self.placement is not None and not isinstance(self.placement, remote_device):
            raise TypeError(f"placement: expected a string such as 'rank:0/cpu', got {placement!r}")
        if len(shard_offsets) != len(shard_sizes):
            raise ValueError(
                f"shard_offsets and shard_sizes should have the same number of elements, found {len(shard_offsets)} "
                f"and {shard_sizes} respectively"
            )
        if shard_offsets and (min(shard_offsets) < 0 or min(shard_sizes) < 0):
            if min(shard_offsets) < 0:
                raise ValueError(f"shard_offsets should be >=0, found {list(shard_offsets)}")
            raise ValueError(f"shard_sizes should be >= 0, found {list(shard_sizes)}")

    def __repr__(self) -> str:
        return (
            f"ShardMetadata(shard_offsets={self.shard_offsets}, shard_sizes={self.shard_sizes}, "
            f"placement={self.placement})"
        )

    def __setstate__(self, state: object) -> None:
        self.__init__(**state_of(self, state))  # type: ignore[misc]

    def __hash__(self) -> int:
        return hash((*self.shard_offsets, *self.shard_sizes, self.placement))


def device_of(shard: ShardMetadata) -> torch.device:
    return shard.placement.device()  # type: ignore[union-attr]


class MEM_FORMAT_ENCODING(Enum):
    """The memory formats of torch as values that can be pickled."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_FORMATS = dict(zip(MEM_FORMAT_ENCODING, (torch.contiguous_format, torch.channels_last, torch.preserve_format)))
_ENCODINGS = {kind: encoding for encoding, kind in _FORMATS.items()}


@dataclass
class TensorProperties:
    """What all tiles of a tensor have in common.

    Args:
        dtype: The default is `torch.get_default_dtype()` at import.
        layout: Only `torch.strided` is supported.
        requires_grad: Whether autograd records operations.
        memory_format: Only `torch.contiguous_format` is supported.
        pin_memory: Whether tiles in CPU memory are pinned.
    """

    dtype: torch.dtype = field(default=torch.get_default_dtype())
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False

    def __getstate__(self) -> tuple[Any, ...]:
        if self.memory_format not in _ENCODINGS:
            raise RuntimeError(
                f"Invalid torch.memory_format: {self.memory_format}; only {[str(f) for f in _ENCODINGS]} can be pickled"
            )
        return self.dtype, self.layout, self.requires_grad, _ENCODINGS[self.memory_format], self.pin_memory

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError(f"TensorProperties from a pickle: expected five values, got {state!r}")
        kinds = (torch.dtype, torch.layout, bool, MEM_FORMAT_ENCODING, bool)
        names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
        for value, kind, name in zip(state, kinds, names, strict=True):
            check_type(value, kind, f"TensorProperties.{name}")
        self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory = state
        self.memory_format = _FORMATS[encoding]

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Return the properties of a tensor.

        Args:
            tensor: The tensor, which counts as contiguous.
        """
        pinned = tensor.is_pinned()
        return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad, pin_memory=pinned)


_SHOWN = 64  # tiles that a repr lists


@dataclass
class ShardedTensorMetadata:
    """A tensor as every rank knows it.

    Args:
        shards_metadata: The tiles of all ranks.
        size: The global size.
        tensor_properties: What all tiles have in common.
    """

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default=torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    def __setstate__(self, state: object) -> None:
        values = state_of(self, state)
        check_type(values["shards_metadata"], list, "ShardedTensorMetadata.shards_metadata")
        for i, shard in enumerate(values["shards_metadata"]):
            check_type(shard, ShardMetadata, f"ShardedTensorMetadata.shards_metadata[{i}]")
        check_type(values["size"], (torch.Size, tuple, list), "ShardedTensorMetadata.size")
        check_type(values["tensor_properties"], TensorProperties, "ShardedTensorMetadata.tensor_properties")
        self.shards_metadata, self.tensor_properties = values["shards_metadata"], values["tensor_properties"]
        self.size = as_size(values["size"])

    def __repr__(self) -> str:
        tiles = ", ".join(map(repr, self.shards_metadata[:_SHOWN]))
        if len(self.shards_metadata) > _SHOWN:
            tiles += f", ... {len(self.shards_metadata) - _SHOWN} more"
        return (
            f"ShardedTensorMetadata(shards_metadata=[{tiles}], size={self.size}, "
            f"tensor_properties={self.tensor_properties})"
        )


def as_size(size: Sequence[Any]) -> torch.Size:
    """Return a global size that was passed as ints or as one sequence of ints."""
    check_type(size, (tuple, list), "size", "give a sequence of ints")
    sizes = size[0] if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
    for n in sizes:
        if not isinstance(n, int) or isinstance(n, bool):
            raise TypeError(f"size has to be a sequence of ints, found: {list(sizes)}")
    if any(n < 0 for n in sizes):
        raise ValueError(f"size: {list(sizes)} has a negative entry")
    return torch.Size(sizes)
