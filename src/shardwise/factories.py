"""Tensors born distributed: zeros, ones, empty, full, rand, randn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.api import check_strided, lay_out
from shardwise.errors import LayoutError
from shardwise.layout import Layout, as_placements
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import as_mesh
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

Make = Callable[[Layout], Any]  # the local value of a layout


def _factory(name: str, make_local: Make, doc: str) -> Callable[..., DTensor]:
    def make(
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
    ) -> DTensor:
        target = _layout_for(size, dtype or torch.get_default_dtype(), layout, device_mesh, placements)
        result = wrap(make_local(target), target)
        return result.requires_grad_() if requires_grad else result

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"Like torch.{name}{doc}"
    return make


def _layout_for(size: Any, dtype: torch.dtype, layout: torch.layout, device_mesh: Any, placements: Any) -> Layout:
    check_strided(layout)
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(size)
    for n in shape:
        if not isinstance(n, int) or n < 0:
            raise LayoutError(f"size: must be ints >= 0, got {shape}")
    mesh = as_mesh(device_mesh)
    places = as_placements(placements) if placements is not None else (REPLICATE,) * len(mesh.shape)
    if any(p.is_partial() for p in places):
        raise LayoutError(f"placements: a factory makes whole values, not parts; got {list(places)}")
    return Layout.make(mesh, places, shape, dtype)


def _filled(fill: Callable[..., torch.Tensor], *values: Any) -> Make:
    """Each rank fills a tensor of its own local shape."""

    def make_local(layout: Layout) -> Any:
        comm = layout.mesh.comm
        split = tuple(a for a, p in enumerate(layout.placements) if not p.is_replicate())
        fill_local = comm.bind(lambda shape: fill(shape, *values, dtype=layout.dtype, device=layout.device), split)
        return fill_local(comm.per_rank(layout.local_shape_at))

    return make_local


def _drawn(draw: Callable[..., torch.Tensor]) -> Make:
    """Each rank draws what one device would draw, and keeps its part."""
    return lambda layout: lay_out(draw(layout.shape, dtype=layout.dtype, device=layout.device), layout, None)


_ITS_PART = ", born distributed: each rank makes only its part."
_ONE_DEVICE = """: the same numbers as on one device, whatever the layout.

    Every rank draws from torch's default generator, which must be seeded alike on all ranks."""

zeros = _factory("zeros", _filled(torch.zeros), _ITS_PART)
ones = _factory("ones", _filled(torch.ones), _ITS_PART)
empty = _factory("empty", _filled(torch.empty), _ITS_PART)
rand = _factory("rand", _drawn(torch.rand), _ONE_DEVICE)
randn = _factory("randn", _drawn(torch.randn), _ONE_DEVICE)


def full(size: int | Sequence[int], fill_value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """Like torch.full, born distributed: each rank makes only its part. Options as for zeros."""
    dtype = dtype or torch.full((), fill_value).dtype
    return _factory("full", _filled(torch.full, fill_value), _ITS_PART)(size, dtype=dtype, **options)
