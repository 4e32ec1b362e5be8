"""Elementwise ops: one mechanism for all. Output dims are the factors, aligned at the right, broadcast dims free."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.layout.layout import dense_stride
from shardwise.rules.reduce import whole_along
from shardwise.rules.view import dim_of
from shardwise.strategy.notation import operands_in
from shardwise.strategy.program import unfinished
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Operand, Result


def broadcast(operands: list[Operand], outputs: int = 1, **more: Any) -> Factors:
    """Factors of a broadcasting elementwise call."""
    ndim = max(op.ndim for op in operands)
    sizes = [1] * ndim
    for op in operands:
        for i, size in enumerate(op.shape, ndim - op.ndim):
            if size != 1:
                sizes[i] = size
    names = [f"d{i}" for i in range(ndim)]
    inputs = [
        tuple(names[i] if size == sizes[i] else None for i, size in enumerate(op.shape, ndim - op.ndim))
        for op in operands
    ]
    return Factors(inputs, [tuple(names)] * outputs, **more)


def pointwise(names: str, *, keeps_float: bool = False, outputs: int = 1) -> None:
    """Ops that are linear in nothing. With `keeps_float`, one float operand gives a result of its dtype."""

    @rule(names, any_float=True)
    def elementwise(*args: Any, **kwargs: Any) -> Factors:
        operands = list(operands_in((*args, *kwargs.values())))
        return broadcast(
            operands, outputs, result=as_operand(operands[0]) if keeps_float and len(operands) == 1 else None
        )


def as_operand(x: Operand) -> Result | None:
    """A result as torch makes it for a float operand without holes in its memory."""
    stride = x.layout.stride
    if x.dtype.is_floating_point and stride == dense_stride(x.shape, stride):
        return Result(x.shape, x.dtype, stride)
    return None


pointwise(
    "abs acos acosh asin asinh atan atanh arccos arccosh arcsin arcsinh arctan arctanh ceil cos cosh digamma "
    "erf erfc erfinv exp exp2 expm1 fix floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 i0e i1 i1e "
    "leaky_relu lgamma log log10 log1p log2 log_sigmoid logit logsigmoid mish ndtri nan_to_num reciprocal relu relu6 "
    "round rsqrt selu elu celu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square tan "
    "tanh tanhshrink threshold trunc bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx log_ndtr ndtr entr expit psi "
    "gammaln clip clamp clamp_min clamp_max airy_ai modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 "
    "modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0",
    keeps_float=True,
)
pointwise(
    "angle bitwise_not isfinite isinf isnan isneginf isposinf isreal logical_not signbit polygamma multigammaln "
    "mvlgamma"
)
pointwise(
    "atan2 arctan2 bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift copysign eq ne lt le "
    "gt ge floor_divide fmod remainder fmax fmin maximum minimum gcd lcm heaviside hypot igamma igammac ldexp "
    "logaddexp logaddexp2 logical_and logical_or logical_xor nextafter rdiv pow float_power xlogy xlog1py zeta "
    "isclose polar gammainc gammaincc sigmoid_backward tanh_backward gelu_backward silu_backward "
    "threshold_backward softplus_backward _prelu_kernel chebyshev_polynomial_t chebyshev_polynomial_u "
    "chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l "
    "legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u "
    "shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w native_dropout_backward"
)
pointwise("frexp log_sigmoid_forward", outputs=2)


@rule("neg real imag conj conj_physical resolve_conj resolve_neg deg2rad rad2deg", any_float=True)
@rule("_conj _conj_copy _conj_physical _neg_view _neg_view_copy")
def unary_linear(x: Operand, *args: Any, **kwargs: Any) -> Factors:
    """Linear in its one operand: a Partial sum stays one."""
    return broadcast([x], linear="joint")


@rule("contiguous")
def contiguous(x: Operand, *args: Any, **kwargs: Any) -> Factors:
    return broadcast([x], linear="joint", any_partial=True, may_alias=True)


@rule("positive clone detach alias zero alias_copy detach_copy lift lift_fresh lift_fresh_copy", any_float=True)
def copied(x: Operand, *args: Any, **kwargs: Any) -> Factors:
    """Parts of any reduction are copied as they are; and any reduction of zeros is zero."""
    return broadcast([x], linear="joint", any_partial=True)


def like(name: str) -> None:
    func = getattr(torch, name)

    @rule(name, any_float=True)
    def filled_like(x: Operand, *args: Any, **kwargs: Any) -> Factors | Algorithm:
        """Of the operand only the shape counts: what it has pending need not be finished."""
        if x.layout.is_partial:
            return Algorithm(lambda x, *args, **kwargs: func(unfinished(x), *args, **kwargs))
        return broadcast([x])


for _name in "zeros_like ones_like full_like empty_like".split():
    like(_name)


@rule("add sub subtract lerp complex", any_float=True, numbers=("alpha",))
def add(x: Any, other: Any, *args: Any, **kwargs: Any) -> Factors:
    """Linear in both together; a number counts as a constant, so it is not. A weight that is a tensor is a factor."""
    operands = list(operands_in((x, other, *args, *kwargs.values())))
    return broadcast(operands, linear="joint" if len(operands) == 2 else "none")


@rule("mul multiply", any_float=True)
def mul(x: Any, other: Any, *args: Any, **kwargs: Any) -> Factors:
    """Linear in each. A number is one more factor that does not depend on the rank."""
    return broadcast(list(operands_in((x, other))), linear="each")


@rule("div divide true_divide", any_float=True)
def div(x: Any, other: Any, *, rounding_mode: Any = None, **kwargs: Any) -> Factors:
    """Linear in what a number divides. A tensor may hold zeros, and parts of both signs over zero have no sum."""
    over = rounding_mode is None and not isinstance(other, Operand) and x.dtype.is_floating_point
    return broadcast(list(operands_in((x, other))), linear="joint" if over else "none")


@rule("glu")
def glu(x: Operand, dim: int = -1) -> Factors | Algorithm:
    """Of a dim that is cut, the second half goes to where the first is."""
    if x.ndim and x.shape[dim] % 2 == 0 and x.layout.is_cut(dim_of(dim, x.ndim)):
        return Algorithm(lambda x, dim=-1: x.chunk(2, dim)[0] * x.chunk(2, dim)[1].sigmoid())
    return whole_along(x, (dim_of(dim, x.ndim),), True)


@rule("addcmul addcdiv", any_float=True, numbers=("value",))
@rule("masked_fill fill", any_float=True)
def several(*args: Any, **kwargs: Any) -> Factors:
    return broadcast(list(operands_in((*args, *kwargs.values()))))


@rule("where", any_float=True)
def where(condition: Any, *args: Any, **kwargs: Any) -> Factors | None:
    """torch.where(condition) alone is nonzero."""
    return several(condition, *args, **kwargs) if args or kwargs else None


@rule("copy", any_float=True)
def copy(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Factors | Algorithm:
    """The target takes the source's values: a Partial target takes a Partial source of its dtype."""
    if x.layout.is_partial and x.dtype != y.dtype:
        return Algorithm(lambda x, y, *args, **kwargs: x.copy_(y.to(x.dtype)), writes=True)
    return broadcast([x, y], linear="joint" if x.dtype == y.dtype else "none", any_partial=True)
