"""Logarithm, sine, cosine and exponential of random numbers, from additions, products, quotients and bits alone.

Every step is rounded as IEEE 754 says, so the results are the same bits on every processor; the kernel for GPUs takes
the same steps. All but the last work on float32 and on float64, with as many terms as either needs: fitted at
Chebyshev nodes, relative errors below one unit in the last place before rounding.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from shardwise.random.philox import SCRATCH


@dataclass(frozen=True)
class Format:
    """The bits of a float format, and the terms of the three series."""

    bits: type[np.int32] | type[np.int64]  # the integer type of the same size
    mantissa: int
    root_half: int  # the bits of sqrt(1/2)
    ln2: float
    log: tuple[float, ...]  # log((1 + s) / (1 - s)) / s, in powers of s^2
    sin: tuple[float, ...]  # sin(pi/2 v) / v, in powers of v^2
    cos: tuple[float, ...]  # cos(pi/2 v) / (1 - v^2), in powers of v^2


# fmt: off
SINGLE = Format(
    np.int32, 23, 0x3F3504F3, 0.6931471824645996,
    (2.0, 0.666668176651001, 0.39974844455718994, 0.29924529790878296),
    (1.5707963705062866, -0.6459637880325317, 0.07968991994857788, -0.004674143623560667, 0.00015167170204222202),
    (1.0, -0.23370049893856049, 0.019968606531620026, -0.0008935354999266565, 2.3600689019076526e-05),
)
DOUBLE = Format(
    np.int64, 52, 0x3FE6A09E667F3BCD, 0.6931471805599453,
    (2.0, 0.6666666666666765, 0.3999999999930191, 0.2857142876073828,
     0.22222197046404274, 0.18183632241617026, 0.153125131147383, 0.14809867572313062),
    (1.5707963267948966, -0.6459640975062462, 0.07969262624616565, -0.004681754135304255, 0.0001604411847130916,
     -3.5988430204672576e-06, 5.6921364280986254e-08, -6.684416831856085e-10, 5.87297574479995e-12),
    (1.0, -0.23370055013616983, 0.019968957764878077, -0.0008945229984736444, 2.473727635883673e-05,
     -4.647659915952978e-07, 6.321440904258357e-09, -6.510529156797684e-11, 5.10846968542241e-13),
)
# fmt: on
EXP = tuple(1 / math.factorial(n) for n in range(15))
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10


def format_of(x: np.ndarray) -> Format:
    return SINGLE if x.dtype == np.float32 else DOUBLE


def log(u: np.ndarray) -> np.ndarray:
    """The natural logarithm of normal numbers > 0, written over them."""
    form, real = format_of(u), u.dtype.type
    bits, exponent, spare = u.view(form.bits), *(SCRATCH.new(u.shape, form.bits) for _ in range(2))
    np.subtract(bits, form.bits(form.root_half), out=exponent)
    exponent >>= form.mantissa
    np.left_shift(exponent, form.mantissa, out=spare)
    np.subtract(bits, spare, out=spare)
    fraction = spare.view(u.dtype)  # in [sqrt(1/2), sqrt(2))
    s = np.subtract(fraction, real(1), out=u)
    fraction += real(1)
    s /= fraction
    square = np.multiply(s, s, out=fraction)
    s *= series(form.log, square)
    square[...] = exponent
    square *= real(form.ln2)
    s += square
    return s


def exp(x: np.ndarray) -> np.ndarray:
    """The exponential of doubles: a power of two times the series of what is left, at most log(2) / 2."""
    x = np.clip(x, -1400.0, 1400.0)  # beyond, it is 0 or infinite
    power = np.rint(x * LOG2_E)
    x -= power * LN2_HIGH  # exactly: the last bits of this part are zero
    x -= power * LN2_LOW
    total = series(EXP, x)
    half = np.floor(power * 0.5)
    for part in (half, power - half):  # one factor alone might be infinite
        with np.errstate(over="ignore"):
            total *= ((part.astype(np.int64) + 1023) << 52).view(np.float64)
    return total


def turn(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos(pi/2 v) and sin(pi/2 v) for v in [-1, 1]."""
    form = format_of(v)
    square = np.multiply(v, v, out=SCRATCH.new(v.shape, v.dtype))
    cos, sin = series(form.cos, square), series(form.sin, square)
    sin *= v
    np.subtract(v.dtype.type(1), square, out=square)
    cos *= square
    return cos, sin


def series(terms: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    """terms[0] + terms[1] x + ..., from the last term down."""
    first, *middle, last = _as_arrays(terms, x.dtype)
    total = np.multiply(x, last, out=SCRATCH.new(x.shape, x.dtype))
    for term in reversed(middle):
        np.add(total, term, out=total)
        np.multiply(total, x, out=total)
    return np.add(total, first, out=total)


@functools.cache
def _as_arrays(terms: tuple[float, ...], dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """The terms as arrays, with which numpy is fastest."""
    return tuple(np.array(term, dtype=dtype) for term in terms)
