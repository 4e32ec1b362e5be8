"""`DTensor._spec`: what programs written for torch's DTensor read there, though its name is a private one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from shardwise.layout import Layout, Placement


class TensorMeta(NamedTuple):
    """The global tensor, without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Spec(NamedTuple):
    """A layout under the names of torch's: the user's mesh, a placement an axis, the global tensor."""

    mesh: Any
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta = None  # type: ignore[assignment]

    @classmethod
    def of(cls, layout: Layout) -> Spec:
        meta = TensorMeta(torch.Size(layout.shape), layout.stride, layout.dtype)
        return cls(layout.mesh.source, layout.placements, meta)

    @property
    def device_mesh(self) -> Any:
        return self.mesh

    @property
    def shape(self) -> torch.Size:
        return self.tensor_meta.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self.tensor_meta.stride

    @property
    def ndim(self) -> int:
        return len(self.tensor_meta.shape)

    @property
    def num_shards(self) -> int:
        """Into how many parts the axes cut the tensor."""
        return math.prod(k for k, p in zip(self.mesh.shape, self.placements, strict=True) if p.is_shard())

    @property
    def num_shards_map(self) -> list[int]:
        """For each tensor dim into how many parts the axes cut it."""
        cuts = [(p.dim, k) for k, p in zip(self.mesh.shape, self.placements, strict=True) if p.is_shard()]  # type: ignore[attr-defined]
        return [math.prod(k for cut, k in cuts if cut == dim) for dim in range(self.ndim)]

    @property
    def sums(self) -> list[int]:
        """The axes along which parts are pending."""
        return [axis for axis, p in enumerate(self.placements) if p.is_partial()]

    @property
    def dim_map(self) -> list[int]:
        """For each tensor dim the first axis that cuts it, or -1."""
        cut = {p.dim: axis for axis, p in reversed([*enumerate(self.placements)]) if p.is_shard()}  # type: ignore[attr-defined]
        return [cut.get(dim, -1) for dim in range(self.ndim)]

    def is_replicated(self) -> bool:
        return all(p.is_replicate() for p in self.placements)

    def is_sharded(self) -> bool:
        return any(p.is_shard() for p in self.placements)
