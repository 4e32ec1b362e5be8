"""From the words of blocks to numbers of a distribution.

Each element has words of its own: one for float32, narrower floats and small integers (a block serves four elements),
two for float64 and large integers (a block serves two).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.comm.capturing import unwritten
from shardwise.random.elementary import exp, log, turn
from shardwise.random.philox import SCRATCH, Words, in_turn

Number = Any  # an int of the distribution of integers, a float of all others
SMALL_SPAN = 1 << 24  # integers from fewer values than this take 32 bits


@dataclass(frozen=True)
class Distribution:
    """What to draw: a name in the table at the end of this file, which explains the parameters."""

    name: str
    a: Number
    b: Number
    torch_call: tuple[Any, ...]  # how torch draws it: the name of the method that fills a tensor, and its arguments

    def two_words(self, dtype: torch.dtype) -> bool:
        """Whether an element takes two words."""
        if self.name == "integer":
            return self.b > SMALL_SPAN
        return self.name in ("bernoulli", "geometric") or (self.name != "dropout" and dtype == torch.float64)

    def per_block(self, dtype: torch.dtype) -> int:
        """How many elements a block serves."""
        return 2 if self.two_words(dtype) else 4

    def check(self, dtype: torch.dtype) -> None:
        """Raise torch's own error where its method does not take these arguments or this dtype."""
        name, *args = self.torch_call
        with unwritten():
            getattr(torch.empty(1, dtype=dtype), name)(*args, generator=torch.Generator())

    def values(self, words: Words, dtype: torch.dtype) -> np.ndarray:
        """The numbers for all elements of these blocks, in order; to be cast to `dtype`."""
        return _TABLE[self.name](words, self, dtype)


# -- uniform numbers -------------------------------------------------------------------------------------------------
def unit_bits(dtype: torch.dtype) -> int:
    """How many bits of a word a uniform number takes: as many as the dtype can hold, so that it stays below 1."""
    return {torch.float64: 53, torch.bfloat16: 8, torch.float16: 11}.get(dtype, 24)


def _over(x: np.ndarray, bits: int) -> np.ndarray:
    """The integers as floats of the same size, over 2^bits."""
    u = SCRATCH.cast(x, np.float64 if x.itemsize == 8 else np.float32)
    u *= u.dtype.type(2.0**-bits)
    return u


def _half_open(x: np.ndarray, bits: int) -> np.ndarray:
    """In [0, 1)."""
    x >>= x.dtype.type(8 * x.itemsize - bits)
    return _over(x.view(np.int64 if x.itemsize == 8 else np.int32), bits)


def _open(x: np.ndarray) -> np.ndarray:
    """In (0, 1)."""
    if x.dtype == np.uint64:
        x = np.right_shift(x, np.uint64(11), out=SCRATCH.new(x.shape, np.uint64))
        x |= np.uint64(1)
        return _over(x.view(np.int64), 53)
    u = _over(np.bitwise_or(x, np.uint32(1), out=SCRATCH.new(x.shape, np.uint32)), 32)
    return np.minimum(u, np.float32(1 - 2.0**-24), out=u)


def _signed(x: np.ndarray) -> np.ndarray:
    """In [-1, 1], from all bits but the first."""
    bits = np.left_shift(x, x.dtype.type(1), out=SCRATCH.new(x.shape, x.dtype))
    if x.dtype == np.uint32:
        return _over(bits.view(np.int32), 31)
    whole = bits.view(np.int64)
    whole >>= 11
    return _over(whole, 52)


def _scaled(x: np.ndarray, factor: float, offset: float) -> np.ndarray:
    if factor != 1.0:
        x *= x.dtype.type(factor)
    if offset != 0.0:
        x += x.dtype.type(offset)
    return x


# -- the table -------------------------------------------------------------------------------------------------------
def _uniform(words: Words, d: Distribution, dtype: torch.dtype) -> np.ndarray:
    return _scaled(_half_open(words.elements(d.two_words(dtype)), unit_bits(dtype)), d.b - d.a, d.a)


def _normal(words: Words, d: Distribution, dtype: torch.dtype) -> np.ndarray:
    """A pair of words (or of double words) is a point of the plane: its distance from the origin, its direction."""
    if d.two_words(dtype):
        length, direction = words.pairs()
    else:
        length, direction = SCRATCH.cast(words.even, np.uint32), SCRATCH.cast(words.odd, np.uint32)
    radius = log(_open(length))
    radius *= radius.dtype.type(-2)
    np.sqrt(radius, out=radius)
    cos, sin = turn(_signed(direction))  # of half a turn: the first bit says on which side
    direction &= direction.dtype.type(1 << 8 * direction.itemsize - 1)
    cos.view(direction.dtype)[...] ^= direction
    cos *= radius
    sin *= radius
    if d.two_words(dtype):
        values = in_turn(np.stack((cos, sin)))
    else:  # two floats travel as one uint64
        both = SCRATCH.cast(sin.view(np.uint32), np.uint64)
        both <<= np.uint64(32)
        both |= cos.view(np.uint32)
        values = in_turn(both).view(np.float32)
    return _scaled(values, d.b, d.a)


def _log_normal(words: Words, d: Distribution, dtype: torch.dtype) -> np.ndarray:
    return exp(_normal(words, d, dtype).astype(np.float64))


def _exponential(words: Words, d: Distribution, dtype: torch.dtype) -> np.ndarray:
    values = log(_open(words.elements(d.two_words(dtype))))
    values /= values.dtype.type(-d.a)
    return values


def _cauchy(words: Words, d: Distribution, dtype: torch.dtype) -> np.ndarray:
    x = words.elements(d.two_words(dtype))
    v = _signed(x)
    edge = v.dtype.type(1 - 2.0 ** -unit_bits(torch.float64 if d.two_words(dtype) else torch.float32))
    cos, sin = turn(np.clip(v, -edge, edge, out=v))
    sin /= cos
    return _scaled(sin, d.b, d.a)


def _geometric(words: Words, d: Distribution, dtype: torch.dtype) -> np.ndarray:
    values = log(_open(words.elements(True)))
    values /= math.log1p(-d.a) if d.a < 1 else -math.inf
    return np.maximum(np.ceil(values, out=values), 1.0, out=values)


def _bernoulli(words: Words, d: Distribution, dtype: torch.dtype) -> np.ndarray:
    x = words.elements(True)
    x >>= np.uint64(11)
    return x < np.uint64(math.ceil(d.a * 2.0**53))


def _dropout(words: Words, d: Distribution, dtype: torch.dtype) -> np.ndarray:
    """`b` with probability `a`, else 0."""
    x = words.elements(False)
    kept = np.less_equal(x, np.uint32(round(d.a * 2.0**32) - 1), out=SCRATCH.new(x.shape, np.bool_))
    values = SCRATCH.cast(kept, np.float64 if dtype == torch.float64 else np.float32)
    values *= values.dtype.type(d.b)
    return values


def _integer(words: Words, d: Distribution, dtype: torch.dtype) -> np.ndarray:
    """`b` values from `a` on."""
    two_words = d.two_words(dtype)
    x = words.elements(two_words)
    if not two_words:
        values = SCRATCH.cast(x, np.uint64)
        values *= np.uint64(d.b)
        values >>= np.uint64(32)
    else:
        values = x if d.b == 1 << 64 else x % np.uint64(d.b)
    values += np.uint64(d.a % (1 << 64))
    return values.view(np.int64)


# -- what torch's methods draw: their names and arguments ------------------------------------------------------------
def uniform(low: float = 0.0, high: float = 1.0) -> Distribution:
    return Distribution("uniform", float(low), float(high), ("uniform_", low, high))


def normal(mean: float = 0.0, std: float = 1.0) -> Distribution:
    return Distribution("normal", float(mean), float(std), ("normal_", mean, std))


def log_normal(mean: float = 1.0, std: float = 2.0) -> Distribution:
    return Distribution("log_normal", float(mean), float(std), ("log_normal_", mean, std))


def exponential(lambd: float = 1.0) -> Distribution:
    return Distribution("exponential", float(lambd), 0.0, ("exponential_", lambd))


def cauchy(median: float = 0.0, sigma: float = 1.0) -> Distribution:
    return Distribution("cauchy", float(median), float(sigma), ("cauchy_", median, sigma))


def geometric(p: float) -> Distribution:
    return Distribution("geometric", float(p), 0.0, ("geometric_", p))


def bernoulli(p: float = 0.5) -> Distribution:
    return Distribution("bernoulli", float(p), 0.0, ("bernoulli_", p))


def dropout(p: float) -> Distribution:
    """The factor of dropout: 0 with probability p < 1, else 1 / (1 - p)."""
    return Distribution("dropout", 1.0 - p, 1.0 / (1.0 - p), ("dropout", p))


def integer(dtype: torch.dtype, *bounds: int | None) -> Distribution:
    """random_(), random_(to), random_(from, to): without `to`, all integers that the dtype has without a gap."""
    low, high = (0, *bounds) if len(bounds) == 1 else bounds or (0, None)
    assert low is not None
    stop = _largest(dtype) + 1 if high is None else high
    return Distribution("integer", int(low), int(stop - low), ("random_", *bounds))


def _largest(dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return {torch.float64: 1 << 53, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}.get(dtype, 1 << 24)
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


_TABLE: dict[str, Callable[[Words, Distribution, torch.dtype], np.ndarray]] = {
    "uniform": _uniform,  # from a to b
    "normal": _normal,  # mean a, standard deviation b
    "log_normal": _log_normal,  # the exponential of that
    "exponential": _exponential,  # of rate a
    "cauchy": _cauchy,  # median a, scale b
    "geometric": _geometric,  # trials until a success of probability a
    "bernoulli": _bernoulli,  # 1 with probability a
    "dropout": _dropout,  # b with probability a
    "integer": _integer,  # a to a + b - 1
}
