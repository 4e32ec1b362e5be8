"""Tensors born distributed: zeros, ones, empty, full, rand, randn, randint, randperm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.api import check_strided
from shardwise.errors import LayoutError
from shardwise.layout import Layout, as_placements
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import as_mesh
from shardwise.random import distributions as draws
from shardwise.random.draw import drawn
from shardwise.random.values import permuted
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

Make = Callable[..., DTensor]  # of a layout, and of a generator if one is given


def _factory(name: str, make_tensor: Make, doc: str) -> Callable[..., DTensor]:
    def make(
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        **generator: Any,
    ) -> DTensor:
        target = _layout_for(size, dtype or torch.get_default_dtype(), layout, device_mesh, placements)
        result = make_tensor(target, **generator)
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

    def make(layout: Layout) -> DTensor:
        comm = layout.mesh.comm
        split = tuple(a for a, p in enumerate(layout.placements) if not p.is_replicate())
        fill_local = comm.bind(lambda shape: fill(shape, *values, dtype=layout.dtype, device=layout.device), split)
        return wrap(fill_local(comm.per_rank(layout.local_shape_at)), layout)

    return make


def _drawn(what: draws.Distribution) -> Make:
    """Each rank draws the numbers of its own elements."""

    def make(layout: Layout, *, generator: torch.Generator | None = None) -> DTensor:
        what.check(layout.dtype)
        return drawn(layout, what, generator)

    return make


_ITS_PART = ", born distributed: each rank makes only its part."
_SAME_NUMBERS = ", born distributed: each rank draws only its part, the same numbers whatever the layout."

zeros = _factory("zeros", _filled(torch.zeros), _ITS_PART)
ones = _factory("ones", _filled(torch.ones), _ITS_PART)
empty = _factory("empty", _filled(torch.empty), _ITS_PART)
rand = _factory("rand", _drawn(draws.uniform()), _SAME_NUMBERS)
randn = _factory("randn", _drawn(draws.normal()), _SAME_NUMBERS)


def randint(*bounds_and_size: Any, dtype: torch.dtype = torch.int64, **options: Any) -> DTensor:
    """randint([low,] high, size): like torch.randint, born distributed. Options as for rand."""
    *bounds, size = bounds_and_size
    return _factory("randint", _drawn(draws.integer(dtype, *bounds)), _SAME_NUMBERS)(size, dtype=dtype, **options)


def randperm(n: int, *, dtype: torch.dtype = torch.int64, **options: Any) -> DTensor:
    """Like torch.randperm, laid out: every rank makes the permutation and keeps its part. Options as for rand."""
    return _factory("randperm", permuted, _SAME_NUMBERS)(n, dtype=dtype, **options)


def full(size: int | Sequence[int], fill_value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """Like torch.full, born distributed: each rank makes only its part. Options as for zeros."""
    dtype = dtype or torch.full((), fill_value).dtype
    return _factory("full", _filled(torch.full, fill_value), _ITS_PART)(size, dtype=dtype, **options)
