"""Elementwise ops: one mechanism for all. Output dims are the factors, aligned at the right, broadcast dims free."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from shardwise.errors import dim_from_front
from shardwise.layout.placement import Partial
from shardwise.layout.shapes import dense_stride
from shardwise.strategy import Algorithm, Factors, Operand, Order, Result, factors, line, operands_in, unfinished
from shardwise.strategy.memory import as_first_suggests, contiguous, like_a_clone, like_a_sum, stored
from shardwise.strategy.order import (
    added,
    falling,
    is_endless,
    rising,
    rising_alone,
    rising_by,
    rising_threshold,
    scaled,
)
from shardwise.strategy.registry import program, rule


def broadcast(values: Iterable[object], outputs: int = 1, **more: Any) -> Factors:
    """The answer for a broadcasting elementwise call: of the operands among these values."""
    return factors("*d, .. -> *d", list(operands_in(values)), outputs=outputs, **more)


def pointwise(
    names: str,
    *,
    keeps_float: bool = False,
    outputs: int = 1,
    numbers: tuple[str, ...] = (),
    order: Order | None = None,
) -> None:
    """Ops that are linear in nothing. With `keeps_float`, one float operand without holes gives a result like it; the
    strides of dims of size 1 follow rules of their own, which torch's meta kernels know."""

    @rule(names, any_float=True, numbers=numbers)
    def elementwise(*args: object, **kwargs: object) -> Factors:
        x, *others = operands_in((*args, *kwargs.values()))
        alone, stride = keeps_float and not others and x.dtype.is_floating_point, x.layout.stride
        dense = stride == dense_stride(x.shape, stride) and 1 not in x.shape
        like_x = Result(x.shape, x.dtype, stride) if alone and dense else None
        return broadcast([x, *others], outputs, result=like_x, order=order)


pointwise(
    "abs acos acosh asin atanh arccos arccosh arcsin arctanh cos cosh digamma erfinv frac gelu hardswish i0 i0e "
    "i1 i1e lgamma log log10 log1p log2 logit mish ndtri nan_to_num reciprocal rsqrt sgn sign silu sin sinc "
    "softplus softsign sqrt square tan tanhshrink bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx log_ndtr entr "
    "psi gammaln airy_ai modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 "
    "scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0",
    keeps_float=True,
)
pointwise(
    "asinh atan arcsinh arctan ceil erf exp exp2 expm1 fix floor hardshrink hardsigmoid hardtanh "
    "relu relu6 selu sigmoid sinh softshrink tanh trunc ndtr expit clip clamp clamp_min "
    "clamp_max",
    keeps_float=True,
    order=Order(rising),
)
pointwise("log_sigmoid logsigmoid", order=Order(rising))
pointwise("round", keeps_float=True, order=Order(rising_alone))
pointwise("leaky_relu elu celu", keeps_float=True, order=Order(rising_by))
pointwise("threshold", keeps_float=True, order=Order(rising_threshold))
pointwise("erfc", keeps_float=True, order=Order(falling))
pointwise(
    "angle bitwise_not isfinite isinf isnan isneginf isposinf isreal logical_not signbit polygamma multigammaln "
    "mvlgamma atan2 arctan2 bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift copysign eq ne "
    "lt le gt ge floor_divide fmod remainder fmax fmin gcd lcm heaviside hypot igamma igammac ldexp "
    "logaddexp logaddexp2 logical_and logical_or logical_xor nextafter rdiv pow float_power xlogy xlog1py zeta "
    "isclose polar gammainc gammaincc sigmoid_backward tanh_backward gelu_backward silu_backward threshold_backward "
    "softplus_backward _prelu_kernel chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v "
    "chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p "
    "shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u masked_fill fill shifted_chebyshev_polynomial_v "
    "shifted_chebyshev_polynomial_w native_dropout_backward"
)
_LIKE_A_SUM = "copysign div divide floor_divide heaviside logaddexp logaddexp2 logical_and logical_or logical_xor "
stored(_LIKE_A_SUM + "native_dropout_backward true_divide xlog1py xlogy")(like_a_sum)
stored("native_dropout_backward", device="cuda")(as_first_suggests)
pointwise("maximum", order=Order(rising, in_each=True, together=Partial("max")))
pointwise("minimum", order=Order(rising, in_each=True, together=Partial("min")))
pointwise("addcmul addcdiv", numbers=("value",))
pointwise("frexp log_sigmoid_forward", outputs=2)
stored("logsigmoid log_sigmoid log_sigmoid_forward", device="cpu")(contiguous)
stored("angle", "cpu", when=lambda x: x.dtype.is_complex)(contiguous)
# powers of one number lie row by row
stored("pow float_power", when=lambda base, exponent: not isinstance(base, torch.Tensor))(contiguous)
stored("__rpow__", when=lambda exponent, base: not isinstance(base, torch.Tensor))(contiguous)

# of one operand: a Partial sum stays one
line("imag _conj _conj_copy _conj_physical _neg_view _neg_view_copy", "*d -> *d", "joint")
line("deg2rad rad2deg", "*d -> *d", "joint", order=Order(rising))
line("neg", "*d -> *d", "joint", order=Order(falling, one_to_one=True))
line("contiguous", "*d -> *d", "joint", any_partial=True, may_alias=True)
# parts of any reduction are copied as they are; and any reduction of zeros is zero
_COPIES = "positive clone detach alias zero alias_copy detach_copy lift lift_fresh lift_fresh_copy"
line(_COPIES, "*d -> *d", "joint", any_partial=True)


@rule("real conj conj_physical")
def conjugate(x: Operand) -> Factors | Algorithm:
    """Of real numbers they return the tensor they are given, whatever is pending."""
    return broadcast([x], linear="joint") if x.dtype.is_complex else Algorithm(lambda x: x)


# the tensor itself, unless torch has yet to conjugate it, or to change its sign (of the imaginary part of a conjugate)
_one = lambda x: x._layout.mesh.comm.first(x._local)
program("resolve_conj", knows_memory=True)(lambda x: x.clone() if _one(x).is_conj() else x)
program("resolve_neg", knows_memory=True)(lambda x: x * 1 if _one(x).is_neg() else x)


def filled_like(func: Any, x: Operand, *args: Any, **kwargs: Any) -> Factors | Algorithm:
    """Of the operand only the shape counts: what it has pending need not be finished."""
    if x.layout.is_partial:
        return Algorithm(lambda x, *args, **kwargs: func(unfinished(x), *args, **kwargs))
    return broadcast([x])


@rule("empty_like", any_float=True)
def empty_like(x: Operand, *, dtype: torch.dtype | None = None, **kwargs: object) -> Factors | Algorithm:
    """Memory for a tensor like this one: parts for its parts, where the dtype can be reduced as they are."""
    if x.layout.is_partial and dtype not in (None, x.dtype):
        return filled_like(torch.empty_like, x)
    return broadcast([x], linear="joint", any_partial=True)


_preserves = lambda *args, memory_format=None, **kwargs: memory_format in (None, torch.preserve_format)
_LIKE = "zeros_like ones_like full_like empty_like rand_like randn_like randint_like"
stored(_LIKE, when=_preserves)(like_a_clone)
for _func in (torch.zeros_like, torch.ones_like, torch.full_like):
    rule(_func.__name__, any_float=True)(partial(filled_like, _func))


@rule("add sub subtract lerp complex", any_float=True, numbers=("alpha",))
def add(x: Operand | complex, other: Operand | complex, *args: Any, **kwargs: Any) -> Factors:
    """Linear in both together; a number counts as a constant, so it is not. A weight that is a tensor is a factor."""
    values = (x, other, *args, *kwargs.values())
    operands = list(operands_in(values))
    linear = "joint" if len(operands) == 2 and not is_endless(*values) else "none"
    return broadcast(operands, linear=linear, order=Order(added))


@rule("mul multiply", any_float=True)
def mul(x: Operand | complex, other: Operand | complex, *args: object, **kwargs: object) -> Factors:
    """Linear in each, also by a number."""
    return broadcast([x, other], linear="none" if is_endless(x, other) else "each", order=Order(scaled))


@rule("div divide true_divide", any_float=True)
def div(
    x: Operand | complex, other: Operand | complex, *, rounding_mode: str | None = None, **kwargs: object
) -> Factors:
    """Linear in what a number divides. Parts of both signs over zero have no sum, and a tensor may hold zeros."""
    by_number = rounding_mode is None and not isinstance(other, Operand) and other != 0
    over = by_number and isinstance(x, Operand) and x.dtype.is_floating_point
    return broadcast([x, other], linear="joint" if over else "none", order=Order(scaled))


@rule("glu")
def glu(x: Operand, dim: int = -1) -> Factors | Algorithm:
    """Of a dim that is cut, the second half goes to where the first is."""
    if x.ndim and x.shape[dim] % 2 == 0 and x.layout.is_cut(dim_from_front(dim, x.ndim)):
        return Algorithm(lambda x, dim=-1: x.chunk(2, dim)[0] * x.chunk(2, dim)[1].sigmoid())
    return factors("*d!dim -> *d", [x], dim=dim_from_front(dim, x.ndim))


@rule("where", any_float=True)
def where(condition: Any, *args: Any, **kwargs: Any) -> Factors | None:
    """torch.where(condition) alone is nonzero."""
    return broadcast((condition, *args, *kwargs.values())) if args or kwargs else None


@rule("copy", any_float=True)
def copy(x: Operand, y: Operand, *args: object, **kwargs: object) -> Factors | Algorithm:
    """The target takes the source's values: a Partial target takes a Partial source of its dtype."""
    if x.layout.is_partial and x.dtype != y.dtype:
        return Algorithm(lambda x, y, *args, **kwargs: x.copy_(y.to(x.dtype)), writes=True)
    return broadcast([x, y], linear="joint" if x.dtype == y.dtype else "none", any_partial=True)
