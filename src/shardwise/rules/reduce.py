"""Reductions. A cut factor that is reduced leaves a Partial result; where parts do not simply add up, two stages do
(`strategy/two_stages.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.layout import Layout, Partial
from shardwise.rules.pointwise import broadcast
from shardwise.strategy import Algorithm, Answer, Factors, Named, Operand, Order, factors, line
from shardwise.strategy.order import of_the_same, rising
from shardwise.strategy.program import Tensor, needs_grad, reduced, run_local, sum_dtype, without_dims
from shardwise.strategy.registry import rule
from shardwise.strategy.two_stages import Dims, reduced_dims, selected, shared_extreme, staged, whole_along

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
    if 0 in [x.shape[d] for d in dims]:  # a product of nothing has no factors, and nothing moves
        return factors("*d!dim -> *d-dim", [x], dim=dims, keepdim=keepdim)
    kind = dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)

    def of_part(v: torch.Tensor) -> torch.Tensor:
        return v.prod(dtype=dtype) if dim is None else v.prod(dim, keepdim, dtype=dtype)  # type: ignore[arg-type]

    def run(x: Tensor, *args: object, **named: object) -> Tensor:
        x = reduced(x)
        found = run_local(of_part, [x], without_dims(x._layout, dims, keepdim, "product").replace(dtype=kind))
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
        by = torch.ops.aten.div.Scalar  # `/` keeps the count as a tensor, which a second backward pass would miss
        return lambda v: by(v.sum(dims, keepdim, dtype=sum_dtype(dtype)), n).to(dtype)

    return factors("*d -> *d-dim", [x], "joint", dim=dims, keepdim=keepdim, local=local)


# -- extremes, and where they are: of equal ones the first, as on one device -------------------------------
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
            return broadcast([x, dim, other], order=Order(rising, in_each=True, together=Partial(name)))
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
