"""Variances, norms, comparisons and counts over cut dims: from a few numbers of what each rank holds. Sorting, ranks
within a dim, and finding places in sorted values: what is sorted is whole, the rest passes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.protocols import Ctx
from shardwise.strategy import Algorithm, Answer, Factors, Named, Operand, factors, line, operands_in
from shardwise.strategy.memory import contiguous, meta_like, stored
from shardwise.strategy.program import Tensor, constant, needs_grad, reduced, run_local, sum_dtype, whole, without_dims
from shardwise.strategy.registry import program, rule
from shardwise.strategy.two_stages import Dims, gather_parts, reduced_dims, shared_extreme, staged, whole_along
from shardwise.torch_private.tensors import are_transforms_active, is_abstract


# -- variances ---------------------------------------------------------------------------------------------
def _deviation(name: str) -> None:
    """var or std, alone or with the mean: those of each rank's part, put together around the global mean."""
    means = name.endswith("mean")

    def own(v: torch.Tensor, dims: Dims, keepdim: bool) -> tuple[torch.Tensor, ...]:
        var, mean = torch.var_mean(v.to(sum_dtype(v.dtype)), dims, correction=0, keepdim=True)
        return var, mean, torch.full_like(var, math.prod(v.shape[d] for d in dims), requires_grad=False)

    @rule(name)
    def over_dims(
        x: Operand, dim: Named = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
    ) -> Answer:
        dim, unbiased = (None, dim) if isinstance(dim, bool) else (dim, unbiased)
        dims = reduced_dims(dim, x.ndim)
        less = correction if correction is not None else 1 if unbiased is None else int(unbiased)
        size = math.prod(x.shape[d] for d in dims)
        if size <= less or not (x.dtype.is_floating_point or x.dtype.is_complex):
            return whole_along(x, dims, keepdim, outputs=1 + means)

        def run(x: Tensor) -> Tensor:
            var, mean, n = gather_parts(own, x, dims)
            centre = (mean * n).sum(dims, True) / size
            distance = mean - centre
            total = ((var + (distance * distance.conj()).real) * n).sum(dims, True) / (size - less)
            if name.startswith("std"):  # torch has no gradient where it is 0
                total = total.masked_fill(total == 0, 1).sqrt().masked_fill(total == 0, 0)
            found = total.to(x.dtype.to_real()), centre.to(x.dtype, copy=True)  # no part of the variance's graph
            found = found if keepdim else tuple(part.squeeze(dims) for part in found)
            return found if means else found[0]

        return staged(x, dims, keepdim, run, outputs=1 + means)


for _name in ["var", "std", "var_mean", "std_mean"]:
    _deviation(_name)


def _correlation(name: str) -> None:
    """Torch takes it apart. Deviations from the mean of parts of a sum would not be zero where those of the sum are."""

    @rule(name)
    def of_rows(x: Operand, *args: object, **kwargs: object) -> Answer:
        if not x.layout.is_partial:
            return None
        return Algorithm(lambda x, *args, **kwargs: getattr(torch, name)(reduced(x), *args, **kwargs))


for _name in ["cov", "corrcoef"]:
    _correlation(_name)


def _quantile(name: str) -> None:
    """Torch takes it apart, but does not look at `q` if that is of a class of its own, as it does on a CPU."""

    @rule(name)
    def at(x: Operand, q: object, *args: object, **kwargs: object) -> Answer:
        if not isinstance(q, Operand) or q.layout.device.type != "cpu":
            return None

        def run(x: Tensor, q: Tensor, *args: object, **kwargs: object) -> Tensor:
            q = whole(q)
            run_local(_must_be_shares, [q.detach()], q._layout)
            return getattr(torch.ops.aten, name)(x, q, *args, **kwargs)

        return Algorithm(run, is_checked=False)

    rule(f"aten::{name}")(lambda *args, **kwargs: None)  # taken apart


def _must_be_shares(q: torch.Tensor) -> torch.Tensor:
    if not are_transforms_active() and not is_abstract(q) and not bool(((q >= 0) & (q <= 1)).all()):
        raise RuntimeError(f"quantile() q values must be in the range [0, 1], got {q.tolist()}; give shares of one")
    return q


for _name in ["quantile", "nanquantile"]:
    _quantile(_name)


# -- norms -------------------------------------------------------------------------------------------------
@rule("vector_norm linalg_vector_norm")
def vector_norm(x: Operand, ord: Any = 2, dim: Named = None, keepdim: bool = False, *, dtype: Any = None) -> Answer:
    """Norms of norms; the largest or smallest magnitude as an extreme; and a count."""
    dims = reduced_dims(dim, x.ndim)
    named = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if min(named, default=0) < 0 and _dims_must_be_positive():
        return Algorithm(lambda x, *args, **named: torch.linalg.vector_norm(x, ord, dims, keepdim, dtype=dtype))
    if ord == 0:
        return factors("*d -> *d-dim", [x], dim=dims, keepdim=keepdim)
    if -math.inf < ord < 0:
        return whole_along(x, dims, keepdim)

    def norm_of(v: torch.Tensor, dims: Dims, keepdim: bool) -> torch.Tensor:
        return torch.linalg.vector_norm(v, ord, dims, keepdim, dtype=dtype if v.dtype == x.dtype else None)

    if math.isinf(ord):
        return staged(x, dims, keepdim, lambda x: shared_extreme(norm_of, x, dims, keepdim, magnitude=True))

    def run(x: Tensor) -> Tensor:
        x = x if dtype is None else x.to(dtype)
        if needs_grad(x) and not are_transforms_active():
            return _Norm.apply(x, ord, dims, keepdim)
        (parts,) = gather_parts(lambda *args: (norm_of(*args),), x, dims)
        return norm_of(parts, dims, keepdim)

    return staged(x, dims, keepdim, run)


@functools.cache
def _dims_must_be_positive() -> bool:
    """Whether this torch (2.11) tells a wrong shape where a dim of one element is counted from the end."""
    return torch.linalg.vector_norm(torch.empty(1, 1, device="meta"), 1, -1).ndim != 1


class _Norm(torch.autograd.Function):
    """A norm of the parts' norms. Its gradient is torch's, with the norm of all: that of a norm of norms has no
    derivative where one rank holds zeros only."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, ord: float, dims: Dims, keepdim: bool) -> Tensor:
        out = torch.linalg.vector_norm(x, ord, dims, keepdim)
        ctx.save_for_backward(x, out)
        ctx.ord, ctx.dims = ord, () if keepdim else sorted(dims)
        return out

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, norm = ctx.saved_tensors
        for dim in ctx.dims:
            grad, norm = grad.unsqueeze(dim), norm.unsqueeze(dim)
        return _norm_gradient(x, norm, grad, ctx.ord), None, None, None


def _norm_gradient(x: Tensor, norm: Tensor, grad: Tensor, ord: float) -> Tensor:
    """The gradient of a norm, in the form that torch gives it: its own derivative has NaNs where torch's has."""
    if ord == 1:
        return grad * x.sgn()
    if ord == 2:
        return grad * (x / norm).masked_fill(norm == 0, 0)
    if ord < 1:
        return x.sgn() * x.abs().pow(ord - 1).masked_fill(x == 0, 0) * grad * norm.pow(1 - ord)
    direction = x.sgn() * x.abs().pow(ord - 1) if ord < 2 else x * x.abs().pow(ord - 2)
    return direction * (grad / norm.pow(ord - 1)).masked_fill(norm == 0, 0)


@rule("norm")
def norm(x: Operand, p: object = "fro", dim: Named = None, keepdim: bool = False, *, dtype: object = None) -> Answer:
    """torch.norm of a vector-like kind is linalg.vector_norm; a nuclear norm goes by its parts."""
    order = 2 if p is None or p == "fro" else p
    if isinstance(order, (str, Operand)):
        return None
    return Algorithm(lambda x, *args, **named: torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype))


@rule("renorm")
def renorm(x: Operand, p: float, dim: int, maxnorm: float) -> Answer:
    """Slices along `dim` whose norm is too large are scaled down."""
    rest = tuple(d for d in range(x.ndim) if d not in reduced_dims(dim, x.ndim))
    if p <= 0 or maxnorm < 0:
        return whole_along(x, rest, True)

    def run(x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, p, rest, True, dtype=sum_dtype(x.dtype))
        return x * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0).to(x.dtype)

    return staged(x, rest, True, run)


# -- comparisons: every rank gets the same answer ----------------------------------------------------------
program("dist")(lambda x, other, p=2: torch.linalg.vector_norm(x - other, p))
program("equal")(lambda x, other: x.shape == other.shape and bool((x == other).all()))
program("allclose")(lambda *args, **kwargs: bool(torch.isclose(*args, **kwargs).all()))


# -- counts add up -----------------------------------------------------------------------------------------
@rule("histc")
def histc(x: Operand, bins: int = 100, min: float = 0, max: float = 0) -> Answer:
    if min != max or 0 in x.shape:
        return factors("*d -> bin", [x])

    def run(x: Tensor, *args: object, **named: object) -> Tensor:
        low, high = (edge.item() for edge in x.aminmax())
        return torch.histc(x, bins, *((low - 1, high + 1) if low == high else (low, high)))

    return Algorithm(run)


@program("histogram")
def histogram(x: Tensor, bins: Any, *, weight: Tensor = None, density: bool = False, **span: Any) -> Tensor:
    sources = [t for t in (x, bins, weight) if isinstance(t, torch.Tensor)]
    x, n = reduced(x.detach()), bins
    if not isinstance(bins, int):
        bins, n = whole(bins.detach()), bins.shape[0] - 1
    elif span.get("range") is None and x.numel():
        span["range"] = [edge.item() for edge in x.aminmax()]
    weight = weight if weight is None else weight.detach().redistribute(placements=x.placements)
    hist = without_dims(x._layout, range(x.dim()), False).replace(shape=(n,))
    edges = hist.replicated(shape=(n + 1,))
    count = lambda v, bins, weight: torch.histogram(v, bins, weight=weight, **span)
    found, at = run_local(count, [x, bins, weight], [hist, edges])
    found = found / (found.sum() * at.diff()) if density else found
    return torch.return_types.histogram((constant(found, sources, "histogram"), constant(at, sources, "histogram")))


# -- sorting -----------------------------------------------------------------------------------------------
line("sort", "*d!dim -> *d, *d", takes="x dim=-1")
line("argsort", "*d!dim -> *d", takes="x dim=-1")
line("msort", "n! *d -> n *d")
line("kthvalue", "*d!dim -> *d-dim, *d-dim", takes="x k dim=-1 keepdim=False")
line("mode", "*d!dim -> *d-dim, *d-dim", takes="x dim=-1 keepdim=False")


def median(func: Callable[..., Any], x: Operand, dim: int | None = None, keepdim: bool = False) -> Factors:
    """Of all elements one value; along a dim values and indices."""
    dims = reduced_dims(dim, x.ndim)
    if dim is None or 0 not in x.layout.stride:
        return whole_along(x, dims, keepdim, outputs=1 if dim is None else 2)
    # of expanded tensors torch's kernel reads memory that nobody has written
    return whole_along(x, dims, keepdim, 2, call=lambda v: func(v.contiguous(), dim, keepdim))


rule("median")(functools.partial(median, torch.median))
rule("nanmedian")(functools.partial(median, torch.nanmedian))


stored("isin")(contiguous)


@rule("isin")
def isin(elements: Operand | float, test_elements: Operand | float, **kwargs: object) -> Factors:
    """A few others are looked at as a line in memory, and torch raises where that is no view of them."""
    if isinstance(test_elements, Operand):
        x = meta_like(elements.layout) if isinstance(elements, Operand) else torch.as_tensor(elements, device="meta")
        others = meta_like(test_elements.layout)
        if x.numel() and others.numel() < 10 * x.numel() ** 0.145:  # torch's own condition
            others.to(torch.result_type(x, others)).view(-1)
    text = "*d, *s!, .. -> *d" if isinstance(elements, Operand) else "*s! -> "
    return factors(text, list(operands_in((elements, test_elements))))


# elements, or one number, are looked up in other tensors, which are whole
line("bucketize", "*d, *s! -> *d | *s! -> ", takes="x boundaries")


@rule("searchsorted")
def searchsorted(
    sorted_sequence: Operand, input: object, *, sorter: Operand | None = None, **kwargs: object
) -> Factors | None:
    """A row of the input is looked up in the same row of the sorted ones, or all of it in the only one."""
    if not sorted_sequence.ndim:
        return None  # torch says why
    rows = "*r s!, *r i, *r s!? -> *r i" if sorted_sequence.ndim > 1 else "s!, *d, s!? -> *d"
    text = rows if isinstance(input, Operand) else "*s!, .. -> "
    return factors(text, list(operands_in((sorted_sequence, input, sorter))))
