"""A shard: one tile of a sharded tensor, with its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.sharded.metadata import ShardMetadata, state_of


@dataclass(slots=True)
class Shard:
    """The values of one tile, and which tile it is.

    Args:
        tensor: The values.
        metadata: Offsets, sizes and placement of the tile.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the tensor has another size than the tile, or is on another device.
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            raise TypeError(f"tensor: a shard holds a torch.Tensor, got {type(self.tensor).__name__}")
        if not isinstance(self.metadata, ShardMetadata):
            raise TypeError(f"metadata: expected a ShardMetadata, got {type(self.metadata).__name__}")
        sizes = list(self.tensor.size())
        if sizes != list(self.metadata.shard_sizes):
            raise ValueError(
                f"Shard tensor size does not match with metadata.shard_lengths! Found shard tensor size: {sizes}, "
                f"metadata.shard_lengths: {list(self.metadata.shard_sizes)}, "
            )
        if self.metadata.placement is not None:
            check_device(self.tensor, self.metadata.placement.device())

    def __setstate__(self, state: object) -> None:
        values = state_of(self, state)
        self.tensor, self.metadata = values["tensor"], values["metadata"]
        self.__post_init__()

    @property
    def box(self) -> tuple[Sequence[int], Sequence[int]]:
        """Offsets and sizes."""
        return self.metadata.shard_offsets, self.metadata.shard_sizes

    @classmethod
    def unchecked(cls, tensor: torch.Tensor, metadata: ShardMetadata) -> Shard:
        """Return a shard without checking that its tensor fits its metadata.

        Args:
            tensor: The values, which were made for the metadata.
            metadata: Where they are in the whole tensor, and who owns them.
        """
        made = object.__new__(cls)
        made.tensor, made.metadata = tensor, metadata
        return made

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: list[int], rank: int) -> Shard:
        """Return the shard of a rank, made from its values.

        Args:
            tensor: The values; size and device of the tile are the tensor's.
            shard_offsets: Where the tile starts in each dim.
            rank: The global rank that owns it.
        """
        metadata = ShardMetadata(shard_offsets, list(tensor.size()), f"rank:{rank}/{tensor.device}")
        return cls(tensor, metadata)


def cut(tensor: torch.Tensor, box: tuple[Sequence[int], Sequence[int]]) -> torch.Tensor:
    """Return a view of the box at these offsets, of these sizes."""
    return tensor[tuple(slice(start, start + length) for start, length in zip(*box))]


def check_device(tensor: torch.Tensor, device: torch.device) -> None:
    """Raise where the tensor of a shard is not on the device that its placement names."""
    if tensor.device != device:
        raise ValueError(
            f"Local shard tensor device does not match with local Shard's placement! Found local shard tensor device: "
            f"{tensor.device}, local shard metadata placement device: {device}"
        )
