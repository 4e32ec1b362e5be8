"""Reductions. A cut factor that is reduced leaves a Partial result; where parts do not simply add up, two stages do:
reduce what each rank holds, gather those few values (of extremes with their indices), reduce again."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise, product
from typing import Any

import torch

from shardwise.layout import Partial, Placement, Shard
from shardwise.layout.layout import Layout, parent_sets, shards_from_table
from shardwise.layout.split import Intervals, count, normalize
from shardwise.protocols import Ctx
from shardwise.rules.order import of_the_same, rising
from shardwise.rules.pointwise import broadcast
from shardwise.strategy import Algorithm, Answer, Factors, Named, Operand, Order, factors, line
from shardwise.strategy.program import Tensor, needs_grad, reduced, run_local, sum_dtype, whole
from shardwise.strategy.registry import rule
from shardwise.wrapper import wrap


def reduced_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """The reduced dims: all of them for None or (). Raises as torch does, since a program asks no meta kernel."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    torch.empty((1,) * ndim, device="cpu").sum(dim)
    return tuple(d % ndim for d in ((dim,) if isinstance(dim, int) else dim)) if ndim else ()


_REDUCED = "x dim=None keepdim=False"
line("sum", "*d -> *d-dim", "joint", takes=_REDUCED)
line("nansum count_nonzero", "*d -> *d-dim", takes=_REDUCED)
line("any", "*d -> *d-dim", takes=_REDUCED, reduce="bor")
line("all", "*d -> *d-dim", takes=_REDUCED, reduce="band")


@rule("prod")
def prod(x: Operand, dim: Named = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Answer:
    """The products of parts are factors. Where a gradient is needed they are multiplied at once: what comes back to the
    factors would not tell a hook the gradient of the product."""
    dims = reduced_dims(dim, x.ndim)
    if not any(map(x.layout.is_cut, dims)):
        return factors("*d -> *d-dim", [x], dim=dims, keepdim=keepdim, reduce="product")
    kind = dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    left = [d for d in range(x.ndim) if keepdim or d not in dims]
    shape = tuple(1 if d in dims else x.shape[d] for d in left)

    def of_part(v: torch.Tensor) -> torch.Tensor:
        return v.prod(dtype=dtype) if dim is None else v.prod(dim, keepdim, dtype=dtype)  # type: ignore[arg-type]

    def placed(p: Placement) -> Placement:
        if not isinstance(p, Shard):
            return p
        return Partial("product") if p.dim in dims else p.at(left.index(p.dim))

    def run(x: Tensor, *args: object, **named: object) -> Tensor:
        x = reduced(x)
        places = tuple(map(placed, x._layout.placements))
        layout = x._layout.replace(shape=shape, stride=None, dtype=kind, placements=places)
        found = run_local(of_part, [x], layout)
        return reduced(found) if needs_grad(x) else found

    return Algorithm(run)


@rule("mean")
def mean(x: Operand, dim: Named = None, keepdim: bool = False, **kwargs: object) -> Factors:
    """The parts are sums over the global count, so uneven shards weigh what they should."""
    dims = reduced_dims(dim, x.ndim)
    n = math.prod(x.shape[d] for d in dims)

    def local(inputs: list[Layout], outputs: list[Layout]) -> Callable[..., Any]:
        dtype = outputs[0].dtype
        if not any(inputs[0].is_cut(d) for d in dims):
            return lambda v: torch.mean(v, dims, keepdim, dtype=dtype)
        return lambda v: (v.sum(dims, keepdim, dtype=sum_dtype(dtype)) / n).to(dtype)

    return factors("*d -> *d-dim", [x], "joint", dim=dims, keepdim=keepdim, local=local)


# -- two stages --------------------------------------------------------------------------------------------
def gather_parts(
    func: Callable[..., Any], x: Tensor, dims: tuple[int, ...], rows: int = 1, value_at: object = None
) -> list[Tensor]:
    """The results of reducing what each rank holds, side by side along `dims` and gathered.

    func(value, dims, True[, value_at(coords)]) gives a tuple; it leaves `rows` rows of a reduced dim, or as many as a
    rank holds. One that holds nothing adds nothing, so no reduction needs a neutral element: there `func` reduces a new
    dim of size 1, to build the same graph as on other ranks."""
    layout, comm = x._layout, x._layout.mesh.comm
    shape, places = list(layout.shape), list(layout.placements)

    def local(v: torch.Tensor, *more: Any) -> list[torch.Tensor]:
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
    return [whole(wrap(part, stage.replace(dtype=comm.first(part).dtype)), dims) for part in results]


def staged(
    x: Operand,
    dims: tuple[int, ...],
    keepdim: bool,
    run: Callable[[Any], Any],
    outputs: int = 1,
    order: Order | None = None,
) -> Answer:
    """run(x), nothing pending in it, where there is something to reduce and it is cut; else the op as it is."""
    if any(x.layout.is_cut(d) for d in dims) and all(x.shape[d] for d in dims):
        return Algorithm(lambda x, *args, **kwargs: run(reduced(x)))
    return whole_along(x, dims, keepdim, outputs, order=order)


def whole_along(x: Operand, dims: tuple[int, ...], keepdim: bool, outputs: int = 1, **more: Any) -> Factors:
    """The reduced dims are gathered, the others pass."""
    return factors("*d!dim -> *d-dim", [x], dim=dims, keepdim=keepdim, outputs=outputs, **more)


# -- extremes, and where they are: of equal ones the first, as on one device -------------------------------
Dims = tuple[int, ...]


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
    order = Order(of_the_same(name))

    @rule(f"a{name}")
    def over_dims(x: Operand, dim: Named = (), keepdim: bool = False) -> Answer:
        dims = reduced_dims(dim, x.ndim)
        return staged(x, dims, keepdim, lambda x: shared_extreme(along, x, dims, keepdim), order=order)

    @rule(f"arg{name}")
    def places(x: Operand, dim: Named = None, keepdim: bool = False) -> Answer:
        dims, pick = reduced_dims(dim, x.ndim), lambda v, d: place(v, d, True)
        return staged(x, dims, keepdim, lambda x: selected(pick, x.detach(), dims, keepdim)[1])

    @rule(name)
    def either(x: Operand, dim: Named = None, keepdim: bool = False, *, other: object = None) -> Answer:
        """Of all elements one value; along a dim values and indices; of two tensors elementwise."""
        if isinstance(dim, Operand) or other is not None:
            return broadcast(
                [x, dim if other is None else other], order=Order(rising, in_each=True, together=Partial(name))
            )
        dims, kind = reduced_dims(dim, x.ndim), getattr(torch.return_types, name)
        if dim is None:
            return staged(x, dims, keepdim, lambda x: shared_extreme(of_all, x, dims, False), order=order)
        pick = lambda v, d: func(v, d, True)[1]
        return staged(x, dims, keepdim, lambda x: kind(selected(pick, x, dims, keepdim)), outputs=2)

    def of_all(v: Any, dims: Dims, keepdim: bool) -> Any:
        return func(v).reshape((1,) * v.dim() if keepdim else ()) if v.numel() else along(v, dims, keepdim)


_extremes("max")
_extremes("min")


@rule("aminmax")
def aminmax(x: Operand, *, dim: Named = None, keepdim: bool = False) -> Answer:
    dims, kind = reduced_dims(dim, x.ndim), torch.return_types.aminmax
    return staged(x, dims, keepdim, lambda x: kind((x.amin(dims, keepdim), x.amax(dims, keepdim))), outputs=2)


@rule("topk")
def topk(x: Operand, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Answer:
    """The k of each rank's k, where those are fewer than the dim has. Which of equal ones come, torch leaves open."""
    dims = reduced_dims(dim, x.ndim)
    ranks = math.prod(x.mesh.shape[axis] for d in dims for axis in x.layout.axes_of(d))
    if not dims or k * ranks >= x.shape[dims[0]]:
        return whole_along(x, dims, True, outputs=2)
    best = lambda v, d: v.topk(min(k, v.shape[d]), d, largest, sorted).indices  # noqa: E731
    return staged(x, dims, True, lambda x: torch.return_types.topk(selected(best, x, dims, True, k)), outputs=2)
