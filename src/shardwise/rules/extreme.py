"""Extremes and where they are. Over a cut dim each rank finds its own, those few values (and their indices in the
whole tensor) are gathered, and the extreme of them is the one: of equal ones the first, as on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.layout.split import Intervals
from shardwise.rules.pointwise import broadcast
from shardwise.rules.reduce import dims_of, gather_parts, staged, whole_along
from shardwise.strategy import Answer, Named, Operand, Tensor, needs_grad, run_local
from shardwise.strategy.registry import rule

Dims = tuple[int, ...]


def shared_extreme(func: Callable[..., Any], x: Tensor, dims: Dims, keepdim: bool, magnitude: bool = False) -> Tensor:
    """func(value, dims, keepdim), an extreme (of magnitudes) whose gradient all elements equal to it share.

    In two stages torch shares it among ranks, then within each: a rank's part is weighed by how many elements it has.
    """
    if not needs_grad(x):
        return func(*gather_parts(lambda *args: (func(*args),), x, dims), dims, keepdim)
    equal = lambda v, top: (v == top) | v.isnan()  # noqa: E731 (NaN wins)

    def counted(v: torch.Tensor, dims: Dims, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
        top, seen = func(v, dims, True), v.detach()
        return top, equal(seen.abs() if magnitude else seen, top.detach()).sum(dims, True)

    def weigh(tops: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        best = equal(tops.detach(), func(tops.detach(), dims, True))
        counts = (counts * best).double()
        weight = (counts * best.sum(dims, True) / counts.sum(dims, True)).to(tops.dtype)
        tops = tops.view_as(tops)
        tops.register_hook(lambda grad: grad * weight)
        return tops

    tops, counts = gather_parts(counted, x, dims)
    return func(run_local(weigh, [tops, counts], tops._layout), dims, keepdim)


def selected(pick: Callable[[Any, int], Any], x: Tensor, dims: Dims, keepdim: bool, rows: int = 1) -> Tensor:
    """Values and indices of the `rows` elements whose places pick(value, dim) gives; several dims count as one."""
    layout, several = x._layout, len(dims) > 1
    dim = 0 if several else dims[0]
    line: Callable[[Any], Any] = torch.flatten if several else lambda v: v
    kept: Callable[[Any], Any] = (lambda v: v.reshape((1,) * layout.ndim)) if several else lambda v: v

    def local(v: torch.Tensor, over: Dims, keepdim: bool, held: tuple[Intervals, ...]) -> Any:
        if over != dims:
            return v, v.long()  # this rank holds nothing
        at = pick(line(v), dim)
        index = torch.zeros_like(at)
        for d, place, sets in zip(dims, torch.unravel_index(at, [v.shape[d] for d in dims]), held, strict=True):
            own = torch.cat([torch.arange(a, b, device=v.device) for a, b in sets])
            index = index * layout.shape[d] + own[place]
        return kept(line(v).gather(dim, at)), kept(index)

    def merge(values: torch.Tensor, indices: torch.Tensor) -> Any:
        order = line(indices).argsort(dim)
        at = order.gather(dim, pick(line(values).gather(dim, order), dim))
        return kept(line(values).gather(dim, at)), kept(line(indices).gather(dim, at))

    parts = gather_parts(local, x, dims, rows, lambda coords: tuple(layout.held(d, coords) for d in dims))
    shape = tuple(rows if d in dims else n for d, n in enumerate(layout.shape))
    found = run_local(merge, parts, [part._layout.replace(shape=shape) for part in parts])
    return [part if keepdim else part.squeeze(dims) for part in found]


def _extremes(name: str) -> None:
    """The rules of all ops named after max or min."""
    func, along, place = (getattr(torch, f"{prefix}{name}") for prefix in ("", "a", "arg"))

    @rule(f"a{name}")
    def over_dims(x: Operand, dim: Named = (), keepdim: bool = False) -> Answer:
        dims = dims_of(dim, x.ndim)
        return staged(x, dims, keepdim, lambda x: shared_extreme(along, x, dims, keepdim))

    @rule(f"arg{name}")
    def places(x: Operand, dim: Named = None, keepdim: bool = False) -> Answer:
        dims, pick = dims_of(dim, x.ndim), lambda v, d: place(v, d, True)
        return staged(x, dims, keepdim, lambda x: selected(pick, x.detach(), dims, keepdim)[1])

    @rule(name)
    def either(x: Operand, dim: Named = None, keepdim: bool = False, *, other: Any = None) -> Answer:
        """Of all elements one value; along a dim values and indices; of two tensors elementwise."""
        if isinstance(dim, Operand) or other is not None:
            return broadcast([x, dim if other is None else other])
        dims, kind, pick = dims_of(dim, x.ndim), getattr(torch.return_types, name), lambda v, d: func(v, d, True)[1]
        if dim is None:
            return staged(x, dims, keepdim, lambda x: shared_extreme(of_all, x, dims, False))
        return staged(x, dims, keepdim, lambda x: kind(selected(pick, x, dims, keepdim)), outputs=2)

    def of_all(v: Any, dims: Dims, keepdim: bool) -> Any:
        return func(v).reshape((1,) * v.dim() if keepdim else ()) if v.numel() else along(v, dims, keepdim)


_extremes("max")
_extremes("min")


@rule("aminmax")
def aminmax(x: Operand, *, dim: Named = None, keepdim: bool = False) -> Answer:
    dims, kind = dims_of(dim, x.ndim), torch.return_types.aminmax
    return staged(x, dims, keepdim, lambda x: kind((x.amin(dims, keepdim), x.amax(dims, keepdim))), outputs=2)


@rule("topk")
def topk(x: Operand, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Answer:
    """The k of each rank's k, where those are fewer than the dim has. Which of equal ones come, torch leaves open."""
    dims = dims_of(dim, x.ndim)
    ranks = math.prod(x.mesh.shape[axis] for d in dims for axis in x.layout.axes_of(d))
    if not dims or k * ranks >= x.shape[dims[0]]:
        return whole_along(x, dims, True, outputs=2)
    best = lambda v, d: v.topk(min(k, v.shape[d]), d, largest, sorted).indices  # noqa: E731
    return staged(x, dims, True, lambda x: torch.return_types.topk(selected(best, x, dims, True, k)), outputs=2)
