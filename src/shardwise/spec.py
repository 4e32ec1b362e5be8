"""A layout under the private names that programs written for torch's DTensor read: `DTensor._spec`, and the shape and
offset of what a rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.errors import LayoutError
from shardwise.layout import Layout, Placement, as_placements
from shardwise.mesh import DeviceMesh, Mesh, as_mesh


class TensorMeta(NamedTuple):
    """The global tensor, without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Spec(NamedTuple):
    """A layout under the names of torch's: the user's mesh, a placement per axis, the global tensor."""

    mesh: DeviceMesh | Mesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta = None  # type: ignore[assignment]

    @classmethod
    def of(cls, layout: Layout) -> Spec:
        meta = TensorMeta(torch.Size(layout.shape), layout.stride, layout.dtype)
        return cls(layout.mesh.source, layout.placements, meta)

    @property
    def device_mesh(self) -> DeviceMesh | Mesh:
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


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh | Mesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of what this rank holds, and where in the tensor it starts.

    Of a simulated mesh that is the first rank. An empty part starts at the end of the dim. A rank outside of the mesh
    holds shape (0,) and has no offset.
    """
    grid = as_mesh(mesh, outside=True)
    if grid.comm.outside:
        return (0,), ()
    layout = Layout.make(grid, as_placements(placements), tuple(global_shape), torch.get_default_dtype())
    coords = next(iter(grid.comm.coords_here()))
    held = [layout.held(dim, coords) for dim in range(layout.ndim)]
    if any(len(pieces) > 1 for pieces in held):
        raise LayoutError(
            f"placements = {list(layout.placements)}: the rank at {coords} holds several pieces of a dim, which "
            f"have no one offset; ask the layout for its tiles"
        )
    starts = [pieces[0][0] if pieces else n for pieces, n in zip(held, layout.shape, strict=True)]
    return layout.local_shape_at(coords), tuple(starts)
