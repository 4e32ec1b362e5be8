"""Reductions over dims that are cut, in two stages: reduce what each rank holds, gather those few values (of extremes
with their indices), reduce again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise, product
from typing import Any

import torch

from shardwise.layout.nesting import parent_sets, shards_from_table
from shardwise.layout.split import Intervals, count, normalize
from shardwise.protocols import Ctx
from shardwise.strategy.program import Tensor, indices, needs_grad, reduced, run_local, whole
from shardwise.strategy.reading import factors
from shardwise.strategy.spec import Algorithm, Answer, Factors, Operand, Order
from shardwise.strategy.unsaved import gathered
from shardwise.wrapper import wrap

Dims = tuple[int, ...]


def reduced_dims(dim: Any, ndim: int) -> Dims:
    """The reduced dims: all of them for None or (). Raises as torch does, since a program asks no meta kernel."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    torch.empty((1,) * ndim, device="cpu").sum(dim)
    return tuple(d % ndim for d in ((dim,) if isinstance(dim, int) else dim)) if ndim else ()


def gather_parts(
    func: Callable[..., Any], x: Tensor, dims: Dims, rows: int = 1, value_at: object = None
) -> list[Tensor]:
    """The results of reducing what each rank holds, side by side along `dims` and gathered.

    func(value, dims, True[, value_at(coords)]) gives a tuple; it leaves `rows` rows of a reduced dim, or as many as a
    rank holds. One that holds nothing adds nothing, so no reduction needs a neutral element: there `func` reduces a new
    dim of size 1, to build the same graph as on other ranks."""
    layout, comm = x._layout, x._layout.mesh.comm
    shape, places = list(layout.shape), list(layout.placements)

    def local(v: torch.Tensor, *more: object) -> list[torch.Tensor]:
        found = each(v, *more)
        alike = len({part.dtype for part in found}) == 1 < len(found)
        return [torch.stack(found, -1)] if alike else found  # what is of one dtype goes in one exchange

    def each(v: torch.Tensor, *more: object) -> list[torch.Tensor]:
        if all(v.shape[d] for d in dims):
            return list(func(v, dims, True, *more))
        for d in dims:
            v = v.narrow(d, 0, min(1, v.shape[d]))
        return [part.squeeze(-1) for part in func(v.unsqueeze(-1), (v.dim(),), True, *more)]

    for dim in dims:
        left = [min(rows, count(held)) for held in parent_sets(layout.mesh, layout.placements, dim, layout.shape[dim])]
        ends = list(accumulate(left, initial=0))
        sizes = [layout.mesh.shape[axis] for axis in layout.axes_of(dim)]
        table = {at: normalize([part]) for at, part in zip(product(*map(range, sizes)), pairwise(ends), strict=True)}
        shape[dim], shards = ends[-1], shards_from_table(sizes, ends[-1], table.__getitem__, dim)
        for axis, shard in zip(layout.axes_of(dim), shards, strict=True):
            places[axis] = shard
    split = tuple(axis for axis, p in enumerate(places) if not p.is_replicate())
    results = comm.bind(local, split)(x._local, *([] if value_at is None else [comm.per_rank(value_at)]))
    stage = layout.replace(shape=tuple(shape), placements=tuple(places))
    if comm.first(results[0]).dim() > layout.ndim:
        (packed,), width = results, comm.first(results[0]).shape[-1]
        packing = stage.replace(shape=(*shape, width), stride=None, dtype=comm.first(packed).dtype)
        return list(whole(wrap(packed, packing), dims).unbind(-1))
    return [whole(wrap(part, stage.replace(dtype=comm.first(part).dtype)), dims) for part in results]


def staged(
    x: Operand,
    dims: Dims,
    keepdim: bool,
    run: Callable[[Any], Any],
    outputs: int = 1,
    order: Order | None = None,
) -> Answer:
    """run(x), nothing pending in it, where there is something to reduce and it is cut; else the op as it is."""
    if any(x.layout.is_cut(d) for d in dims) and all(x.shape[d] for d in dims):
        return Algorithm(lambda x, *args, **kwargs: run(reduced(x)))
    return whole_along(x, dims, keepdim, outputs, order=order)


def whole_along(x: Operand, dims: Dims, keepdim: bool, outputs: int = 1, **more: Any) -> Factors:
    """The reduced dims are gathered, the others pass."""
    return factors("*d!dim -> *d-dim", [x], dim=dims, keepdim=keepdim, outputs=outputs, **more)


# -- extremes, and where they are: of equal ones the first, as on one device -------------------------------
def shared_extreme(func: Callable[..., Any], x: Tensor, dims: Dims, keepdim: bool, magnitude: bool = False) -> Tensor:
    """func(value, dims, keepdim), an extreme (of magnitudes) whose gradient all elements equal to it share: torch
    shares it among ranks, then within each, so a rank's part is weighed by how many elements it has."""
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
        return _Weighted.apply(tops, weight)

    tops, counts = gather_parts(counted, x, dims)
    return func(run_local(weigh, [tops, counts], tops._layout), dims, keepdim)


class _Weighted(torch.autograd.Function):
    """A value whose derivative is multiplied by a weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx: Ctx, tangent: torch.Tensor, _: object) -> torch.Tensor:
        return tangent * ctx.saved_tensors[0]


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
            index = index * layout.shape[d] + indices(sets, v.device)[place]
        return kept(gathered(line(v), dim, at)), kept(index)

    def merge(values: torch.Tensor, indices: torch.Tensor) -> Any:
        order = line(indices).argsort(dim)
        at = order.gather(dim, pick(line(values).gather(dim, order), dim))
        return kept(line(values).gather(dim, at)), kept(line(indices).gather(dim, at))

    parts = gather_parts(local, x, dims, rows, lambda coords: tuple(layout.held(d, coords) for d in dims))
    shape = tuple(rows if d in dims else n for d, n in enumerate(layout.shape))
    found = run_local(merge, parts, [part._layout.replace(shape=shape) for part in parts])
    return [part if keepdim else part.squeeze(dims) for part in found]
