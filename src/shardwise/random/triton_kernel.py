"""The same numbers on a GPU: philox.py, elementary.py and distributions.py again, as one Triton kernel.

Integers are the same bits. So are floats, since each step is rounded as there: products and sums are not fused, and
quotients and roots are the exactly rounded ones.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra import libdevice  # type: ignore[import-not-found]

from shardwise.random.distributions import Distribution, unit_bits
from shardwise.random.elementary import DOUBLE, EXP, LN2_HIGH, LN2_LOW, LOG2_E, SINGLE
from shardwise.random.walk import Walk

_BLOCK = 1024
_MOST_DIMS = 4  # of a walk; the dims before them are walked on the host
_INTS = [f"{name}{i}" for name in ("size", "step", "stride") for i in range(_MOST_DIMS)]


def fill(target: torch.Tensor, walk: Walk, what: Distribution, key: int, draw: int = 0) -> None:
    """`target`, a tile of a tensor, filled with its numbers."""
    flat = target.view(torch.uint8) if target.dtype == torch.bool else target
    two_words = what.two_words(target.dtype)
    double = two_words if what.name in ("bernoulli", "geometric") else target.dtype == torch.float64
    form = DOUBLE if double else SINGLE
    for offset, part in _low_dims(walk):
        dims = len(part.sizes)
        n = math.prod(part.sizes)
        padded = [(*values, *[0] * (_MOST_DIMS - dims)) for values in part[1:]]
        with torch.cuda.device(target.device):
            _fill[(triton.cdiv(n, _BLOCK),)](
                flat.as_strided((1,), (1,), flat.storage_offset() + offset),
                n, part.start, _signed(key), draw, *_parameters(what), *(x for values in padded for x in values),
                NAME=what.name, WIDE=two_words, DOUBLE=double, BITS=unit_bits(target.dtype), DIMS=dims, BLOCK=_BLOCK,
                MANTISSA=form.mantissa, ROOT_HALF=form.root_half, LN2=form.ln2,
                LOG=form.log, SIN=form.sin, COS=form.cos, LN2_HIGH=LN2_HIGH, LN2_LOW=LN2_LOW, LOG2_E=LOG2_E, EXP=EXP,
                enable_fp_fusion=False,
            )  # fmt: skip


def _low_dims(walk: Walk) -> Any:
    """The walk as walks of few dims, each with its offset in memory."""
    inner = math.prod(walk.sizes[-_MOST_DIMS:])
    for offset, piece in walk.pieces(inner) if len(walk.sizes) > _MOST_DIMS else [(0, walk)]:
        yield offset, Walk(piece.start, *(x[-_MOST_DIMS:] for x in piece[1:]))


def _parameters(what: Distribution) -> tuple[int, int]:
    """Two parameters as integers: floats as the bits of a double, thresholds and bounds as they are."""
    return _PARAMETERS.get(what.name, lambda a, b: (_bits(a), _bits(b)))(what.a, what.b)


_PARAMETERS: dict[str, Callable[[Any, Any], tuple[int, int]]] = {
    "integer": lambda a, b: (_signed(a % (1 << 64)), _signed(b % (1 << 64))),  # no bound: 2^64, which is 0
    "bernoulli": lambda a, b: (math.ceil(a * 2.0**53), 0),
    "dropout": lambda a, b: (round(a * 2.0**32) - 1, _bits(b)),
    "uniform": lambda a, b: (_bits(a), _bits(b - a)),
    "exponential": lambda a, b: (_bits(-a), 0),
    "geometric": lambda a, b: (_bits(math.log1p(-a)), 0),
}


def _bits(x: float) -> int:
    return struct.unpack("<q", struct.pack("<d", x))[0]


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


@triton.jit(do_not_specialize=["n", "start", "key", "draw", "a", "b", *_INTS])
def _fill(
    target, n: tl.int64, start: tl.int64, key: tl.int64, draw: tl.int64, a: tl.int64, b: tl.int64,
    size0: tl.int64, size1: tl.int64, size2: tl.int64, size3: tl.int64,
    step0: tl.int64, step1: tl.int64, step2: tl.int64, step3: tl.int64,
    stride0: tl.int64, stride1: tl.int64, stride2: tl.int64, stride3: tl.int64,
    NAME: tl.constexpr, WIDE: tl.constexpr, DOUBLE: tl.constexpr, BITS: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, MANTISSA: tl.constexpr, ROOT_HALF: tl.constexpr, LN2: tl.constexpr,
    LOG: tl.constexpr, SIN: tl.constexpr, COS: tl.constexpr,
    LN2_HIGH: tl.constexpr, LN2_LOW: tl.constexpr, LOG2_E: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """One element a lane: its place in the tile, its number, its block, its value."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    number = tl.zeros_like(place) + start
    offset = tl.zeros_like(place)
    rest = place
    if DIMS > 3:
        number += rest % size3 * step3
        offset += rest % size3 * stride3
        rest = rest // size3
    if DIMS > 2:
        number += rest % size2 * step2
        offset += rest % size2 * stride2
        rest = rest // size2
    if DIMS > 1:
        number += rest % size1 * step1
        offset += rest % size1 * stride1
        rest = rest // size1
    number += rest * step0
    offset += rest * stride0

    PER: tl.constexpr = 2 if WIDE else 4
    lane = number % PER
    w0, w1, w2, w3 = _words(number // PER, key, draw)
    if NAME == "normal" or NAME == "log_normal":
        if WIDE:
            length, direction = _pair(w0, w1), _pair(w2, w3)
        else:
            length, direction = tl.where(lane < 2, w0, w2), tl.where(lane < 2, w1, w3)
        radius = _root(_log(_open(length, WIDE), MANTISSA, ROOT_HALF, LN2, LOG, DOUBLE) * -2.0, DOUBLE)
        cos, sin = _turn(_half_turn(direction, WIDE), COS, SIN)
        cos = _sign_of(cos, direction, WIDE)
        value = tl.where(lane % 2 == 0, cos, sin) * radius
        value = value * _real(b, DOUBLE) + _real(a, DOUBLE)
        if NAME == "log_normal":
            value = _exp(value.to(tl.float64), LN2_HIGH, LN2_LOW, LOG2_E, EXP)
    else:
        if WIDE:
            x = tl.where(lane == 0, _pair(w0, w1), _pair(w2, w3))
        else:
            x = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
        if NAME == "uniform":
            if WIDE:
                u = (x >> (64 - BITS)).to(tl.int64).to(tl.float64) * (1.0 / (1 << BITS))
            else:
                u = (x >> (32 - BITS)).to(tl.int32).to(tl.float32) * (1.0 / (1 << BITS))
            value = u * _real(b, DOUBLE) + _real(a, DOUBLE)
        elif NAME == "exponential":
            logarithm = _log(_open(x, WIDE), MANTISSA, ROOT_HALF, LN2, LOG, DOUBLE)
            value = _quotient(logarithm, tl.zeros_like(logarithm) + _real(a, DOUBLE), DOUBLE)
        elif NAME == "cauchy":
            v = _half_turn(x, WIDE)
            EDGE: tl.constexpr = 1.0 - 1.0 / (1 << (53 if WIDE else 24))
            v = tl.minimum(tl.maximum(v, -EDGE), EDGE)
            cos, sin = _turn(v, COS, SIN)
            value = _quotient(sin, cos, DOUBLE) * _real(b, DOUBLE) + _real(a, DOUBLE)
        elif NAME == "geometric":
            value = _log(_open(x, WIDE), MANTISSA, ROOT_HALF, LN2, LOG, DOUBLE) / _real(a, DOUBLE)
            value = tl.maximum(tl.ceil(value), 1.0)
        elif NAME == "bernoulli":
            value = ((x >> 11) < a.to(tl.uint64)).to(tl.float32)
        elif NAME == "dropout":
            value = (x <= a.to(tl.uint32)).to(tl.float64 if DOUBLE else tl.float32) * _real(b, DOUBLE)
        else:
            span = b.to(tl.uint64, bitcast=True)
            if WIDE:
                drawn = tl.where(span == 0, x, x % tl.where(span == 0, 1, span).to(tl.uint64))
            else:
                drawn = (x.to(tl.uint64) * span) >> 32
            value = drawn.to(tl.int64, bitcast=True) + a
    tl.store(target + offset, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _words(block, key, draw):
    """Philox-4x32-10."""
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0) + draw.to(tl.uint32), tl.zeros_like(c0)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32)), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, tl.full(c0.shape, 0xCD9E8D57, tl.uint32)), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _pair(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _real(bits, DOUBLE: tl.constexpr):
    """A parameter, from the bits of a double."""
    value = bits.to(tl.float64, bitcast=True)
    return value if DOUBLE else value.to(tl.float32)


@triton.jit
def _open(x, WIDE: tl.constexpr):
    if WIDE:
        return ((x >> 11) | 1).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))
    else:
        return tl.minimum((x | 1).to(tl.float32) * (1.0 / (1 << 32)), 1.0 - 1.0 / (1 << 24))


@triton.jit
def _half_turn(x, WIDE: tl.constexpr):
    if WIDE:
        return ((x << 1).to(tl.int64, bitcast=True) >> 11).to(tl.float64) * (1.0 / (1 << 52))
    else:
        return (x << 1).to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / (1 << 31))


@triton.jit
def _sign_of(value, x, WIDE: tl.constexpr):
    """`value` with its sign changed where the first bit of x is set."""
    if WIDE:
        return (value.to(tl.uint64, bitcast=True) ^ (x >> 63 << 63)).to(tl.float64, bitcast=True)
    else:
        return (value.to(tl.uint32, bitcast=True) ^ (x >> 31 << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _log(
    u, MANTISSA: tl.constexpr, ROOT_HALF: tl.constexpr, LN2: tl.constexpr, LOG: tl.constexpr, DOUBLE: tl.constexpr
):
    bits = u.to(tl.int64 if DOUBLE else tl.int32, bitcast=True)
    exponent = (bits - ROOT_HALF) >> MANTISSA
    fraction = (bits - (exponent << MANTISSA)).to(u.dtype, bitcast=True)
    s = _quotient(fraction - 1.0, fraction + 1.0, DOUBLE)
    return s * _series(s * s, LOG) + exponent.to(u.dtype) * LN2


@triton.jit
def _exp(x, LN2_HIGH: tl.constexpr, LN2_LOW: tl.constexpr, LOG2_E: tl.constexpr, EXP: tl.constexpr):
    x = tl.minimum(tl.maximum(x, -1400.0), 1400.0)
    power = libdevice.rint(x * LOG2_E)
    total = _series(x - power * LN2_HIGH - power * LN2_LOW, EXP)
    half = tl.floor(power * 0.5)
    total *= ((half.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return total * (((power - half).to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _turn(v, COS: tl.constexpr, SIN: tl.constexpr):
    square = v * v
    return _series(square, COS) * (1.0 - square), _series(square, SIN) * v


@triton.jit
def _series(x, TERMS: tl.constexpr):
    COUNT: tl.constexpr = len(TERMS)
    total = x * TERMS[COUNT - 1]
    for i in tl.static_range(COUNT - 2):
        total = (total + TERMS[COUNT - 2 - i]) * x
    return total + TERMS[0]


@triton.jit
def _quotient(x, y, DOUBLE: tl.constexpr):
    if DOUBLE:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def _root(x, DOUBLE: tl.constexpr):
    if DOUBLE:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)
