"""Statistics: each distribution is what it says it is, and neighbouring shards have nothing to do with each other."""

import math

import numpy as np
import pytest
import torch

from shardwise.random import distributions as draws
from shardwise.random.fill import fill_tile

N = 1 << 18
FLOATS = (torch.float32, torch.float64)


def sample(what, dtype=torch.float64, n=N, key=2024):
    return fill_tile(torch.empty(n, dtype=dtype), (0,), (n,), what, key)


def phi(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


CONTINUOUS = {
    "uniform": (draws.uniform(-1, 3), lambda x: (x + 1) / 4),
    "normal": (draws.normal(2, 3), lambda x: phi((x - 2) / 3)),
    "log_normal": (draws.log_normal(0.5, 0.7), lambda x: phi((x.log() - 0.5) / 0.7)),
    "exponential": (draws.exponential(1.7), lambda x: 1 - torch.exp(-1.7 * x)),
    "cauchy": (draws.cauchy(1, 2), lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_kolmogorov_smirnov(name, dtype):
    what, cdf = CONTINUOUS[name]
    x = sample(what, dtype).double().sort().values
    steps = torch.arange(N + 1, dtype=torch.float64) / N
    distance = torch.maximum((steps[1:] - cdf(x)).max(), (cdf(x) - steps[:-1]).max())
    assert distance * math.sqrt(N) < 1.95, distance  # one in a thousand samples is further off


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bfloat16, torch.float16])
def test_moments(dtype):
    x = sample(draws.normal(), dtype).double()
    error = 5 / math.sqrt(N)
    assert abs(x.mean()) < error and abs(x.var() - 1) < 2 * error
    assert abs((x**3).mean()) < 6 * error and abs((x**4).mean() - 3) < 12 * error
    u = sample(draws.uniform(), dtype).double()
    middle = 0.5 - {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}.get(dtype, 0.0)
    assert abs(u.mean() - middle) < error and abs(u.var() - 1 / 12) < error and u.min() >= 0 and u.max() < 1


def test_complex_numbers_share_the_variance():
    x = sample(draws.normal(), torch.complex128)
    assert abs(x.real.var() - 0.5) < 0.01 and abs(x.imag.var() - 0.5) < 0.01
    assert abs((x.real * x.imag).mean()) < 0.01


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.3, 0.5, 1.0])
def test_bernoulli(p):
    x = sample(draws.bernoulli(p), torch.float32)
    assert set(x.unique().tolist()) <= {0.0, 1.0}
    assert abs(x.double().mean() - p) <= 5 * math.sqrt(p * (1 - p) / N)


@pytest.mark.parametrize("p", [1e-12, 0.1, 0.5, 0.9])
def test_dropout(p):
    x = sample(draws.dropout(p), torch.float64)
    assert set(x.unique().tolist()) <= {0.0, 1 / (1 - p)}
    assert abs(x.mean() - 1) < 5 * math.sqrt(p / (1 - p) / N) + 1e-9


def test_geometric():
    p = 0.2
    x = sample(draws.geometric(p), torch.int64)
    share = torch.bincount(x)[1:10].double() / N
    want = torch.tensor([p * (1 - p) ** k for k in range(9)], dtype=torch.float64)
    assert x.min() == 1 and (share - want).abs().max() < 5e-3


@pytest.mark.parametrize("bounds", [(0, 10), (-3, 4), (0, 1 << 30), (-(1 << 62), 1 << 62)])
def test_integers(bounds):
    x = sample(draws.integer(torch.int64, *bounds), torch.int64)
    low, high = bounds
    assert low <= x.min() and x.max() < high
    tenth = np.histogram(x.numpy().astype(np.float64), bins=7 if high - low == 7 else 10, range=(low, high))[0] / N
    assert np.abs(tenth - 1 / len(tenth)).max() < 5 / math.sqrt(N)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_integers_of_a_dtype(dtype):
    x = sample(draws.integer(dtype), dtype, 5000)
    assert x.min() >= 0 and len(x.unique()) > (1 if dtype == torch.bool else 100)
    assert sample(draws.integer(torch.float32), torch.float32).max() <= 1 << 24


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_are_independent(dtype):
    """Neighbouring elements, rows, shards and keys: no correlation."""
    shape = (512, 512)
    x, y = (fill_tile(torch.empty(shape, dtype=dtype), (0, 0), shape, draws.normal(), key).double() for key in (1, 2))
    pairs = {
        "elements": (x[:, :-1], x[:, 1:]),
        "rows": (x[:-1], x[1:]),
        "shards": (x[:256], x[256:]),
        "columns of shards": (x[:, :256], x[:, 256:]),
        "keys": (x, y),
        "squares": (x[:, :-1] ** 2 - 1, x[:, 1:] ** 2 - 1),
    }
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean()) < 5 * 2 / math.sqrt(a.numel()), name


def test_draws_of_one_key_differ():
    one, two = (fill_tile(torch.empty(100), (0,), (100,), draws.uniform(), 5, draw) for draw in (0, 1))
    assert not torch.equal(one, two)
