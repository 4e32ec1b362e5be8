"""A layout under the private names that programs written for torch's DTensor read: `DTensor._spec`, and the shape and
offset of what a rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.errors import LayoutError, MismatchError
from shardwise.layout import Layout, Partial, Placement, Shard, as_placements
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import DeviceMesh, Mesh, as_mesh


class TensorMeta(NamedTuple):
    """The global tensor, without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ShardOrderEntry(NamedTuple):
    """The mesh axes that cut one tensor dim, the first cut first."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


ShardOrder = tuple[ShardOrderEntry, ...]


@dataclass(unsafe_hash=True, repr=False)
class Spec:
    """A layout under the names of torch's: the user's mesh, a placement per axis, the global tensor."""

    mesh: DeviceMesh | Mesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta | None = None

    def __post_init__(self) -> None:
        self.placements = as_placements(self.placements)

    @classmethod
    def of(cls, layout: Layout) -> Spec:
        meta = TensorMeta(torch.Size(layout.shape), layout.stride, layout.dtype)
        return cls(layout.mesh.source, layout.placements, meta)

    @classmethod
    def from_dim_map(
        cls,
        mesh: DeviceMesh | Mesh,
        dim_map: Sequence[int],
        sums: Sequence[int],
        tensor_meta: TensorMeta | None = None,
    ) -> Spec:
        """The layout of which `dim_map` and `sums` are the properties of these names."""
        places: list[Placement] = [REPLICATE] * len(mesh.shape)
        for axis in sums:
            places[axis] = Partial()
        for dim, axis in enumerate(dim_map):
            if axis >= 0:
                if not places[axis].is_replicate():
                    raise RuntimeError(f"from_dim_map: mesh axis {axis} is used twice, by dim_map {list(dim_map)}, "
                                       f"sums {list(sums)}")  # fmt: skip
                places[axis] = Shard(dim)
        return cls(mesh, tuple(places), tensor_meta)

    def shallow_copy_with_tensor_meta(self, tensor_meta: TensorMeta | None) -> Spec:
        """The same placements for another tensor."""
        if tensor_meta is None:
            raise MismatchError("shallow copy with no tensor_meta!")
        return Spec(self.mesh, self.placements, tensor_meta)

    def __repr__(self) -> str:
        return f"DTensorSpec(mesh={self.mesh!r}, placements={self.placements!r}, tensor_meta={self.tensor_meta!r})"

    def __str__(self) -> str:
        meta = self.tensor_meta
        what = "unknown dtypeunknown shape" if meta is None else f"{_short(meta.dtype)}{list(meta.shape)}"
        cuts = [p.dim if p.is_shard() else None for p in self.placements]  # type: ignore[attr-defined]
        shown = [
            f"{p}[{cuts[:axis].count(p.dim)}]" if p.is_shard() and cuts.count(p.dim) > 1 else str(p)  # type: ignore[attr-defined]
            for axis, p in enumerate(self.placements)
        ]
        return f"Spec({what}({''.join(shown)}))"

    @property
    def device_mesh(self) -> DeviceMesh | Mesh:
        return self.mesh

    @property
    def _meta(self) -> TensorMeta:
        if self.tensor_meta is None:
            raise ValueError("tensor_meta is not set")
        return self.tensor_meta

    @property
    def shape(self) -> torch.Size:
        return self._meta.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self._meta.stride

    @property
    def ndim(self) -> int:
        return len(self._meta.shape)

    @property
    def shard_order(self) -> ShardOrder:
        """For each cut dim the axes that cut it, in the order of the mesh."""
        cuts: dict[int, tuple[int, ...]] = {}
        for axis, p in enumerate(self.placements):
            if p.is_shard():
                cuts[p.dim] = (*cuts.get(p.dim, ()), axis)  # type: ignore[attr-defined]
        return tuple(ShardOrderEntry(dim, cuts[dim]) for dim in sorted(cuts))

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


def _short(dtype: torch.dtype) -> str:
    """A dtype in a few letters, as "f32"."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bool", "b8"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        name = name.replace(long, short, 1)
    return name


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
