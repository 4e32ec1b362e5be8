"""Scans along a cut dim: values, gradients and second derivatives, whatever the split, and only totals travel."""

import pytest
import torch

import shardwise
from shardwise import Replicate, Shard, simulate
from shardwise.testing import check_rule, spread_out
from tests.ops.cases import x
from tests.values import compare
from tests.workers import device_mesh, run_ranks

INF, NAN = float("inf"), float("nan")
A, CUBE, LINE, ONE = x(5, 7), x(4, 5, 3), x(9), x()
ZEROS = A.clone().masked_fill_(A.abs() < 0.4, 0)
HOLES = torch.tensor([-INF, -INF, 1.0, -INF, -INF, 2.0, -INF], dtype=torch.float64)
COUNTS = (A * 3).round().long()
SCANS = {
    "cumsum": (lambda a: (a.cumsum(0), torch.cumsum(a, dim=-1)), [CUBE]),
    "cumsum of 0-d": (lambda a: (a.cumsum(0), a.cumprod(-1), a.logcumsumexp(0)), [ONE]),
    "cumsum as": (lambda a: (a.round().cumsum(0, dtype=torch.float32), a.round().int().cumprod(1, dtype=a.dtype)), [A]),
    "cumsum of ints": (lambda a: (a.cumsum(0), a.int().cumprod(1), (a > 0).cumsum(0), a.cumsum(1, dtype=a.dtype)), [COUNTS]),
    "scans in narrow ints": (
        lambda a: (a.int().cumsum(0, dtype=torch.int32), a.cumprod(1, dtype=torch.uint8), (a / 2).cumsum(0, dtype=torch.int8)),
        [COUNTS],
    ),
    "cumsum in place": (lambda a: ((a * 1).cumsum_(0), (a * 1).cumprod_(1)), [A]),
    "cumprod": (lambda a: (a.cumprod(0), a.cumprod(2)), [CUBE]),
    "cumprod of zeros": (lambda a: (a.cumprod(0), a.cumprod(1)), [ZEROS]),
    "cumprod of one": (lambda a: a.cumprod(0), [LINE[:1]]),
    "logcumsumexp": (lambda a: (a.logcumsumexp(0), torch.logcumsumexp(a, dim=1)), [A]),
    "scans of nothing": (lambda a: (a.cumsum(0), a.cumprod(0), a.logcumsumexp(0), a.cumprod(1)), [x(0, 3)]),
    "scans of a view": (lambda a: (a.t().cumsum(0), a.flip(0).cumprod(0), a[1:].logcumsumexp(0)), [A]),
    "scans of pieces": (lambda a: [s(torch.cat([a, a * 2, a])) for s in PIECEWISE], [A[:4, :2]]),
    "scans of complex": (lambda a: [s(torch.complex(a, a.flip(1) * 2)) for s in PIECEWISE], [A]),
    "cummax": (lambda a: (*a.round().cummax(0), *a.cummin(1)), [A]),
}  # fmt: skip
PIECEWISE = [lambda a: a.cumsum(0), lambda a: a.cumprod(0), lambda a: a.logcumsumexp(0)]


@pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_scans(name, mesh):
    function, tensors = SCANS[name]
    check_rule(function, [tensors], [simulate(mesh)], limit=6, seed=len(name), tolerance=1e-10)


NOT_FINITE = [
    HOLES,
    torch.tensor([1.0, INF, 2, NAN, 3]).double(),
    torch.tensor([2.0, NAN, 3, 0, 1, NAN, 4, 5]).double(),
]


@pytest.mark.parametrize("values", [*NOT_FINITE, NOT_FINITE[-1].flip(0)], ids=str)
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
def test_not_finite(name, values):
    check_rule(lambda a: getattr(a, name)(0), [[values]], [simulate((3,))], limit=8, partial=False, tolerance=1e-10)


@pytest.mark.parametrize("shape", [(7,), (2, 3), (3, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("name", ["cumprod", "logcumsumexp"])
def test_second_derivatives(name, shape):
    """Also where a rank holds nothing, or one element, of which torch's own scans have none."""

    def twice(a):
        (first,) = torch.autograd.grad((getattr(a, name)(0) ** 2).sum(), a, create_graph=True)
        return (first * first.cos()).sum()

    check_rule(twice, [[x(*shape)]], [simulate((3,))], partial=False, limit=8, tolerance=1e-10)
    check_rule(twice, [[x(*shape)]], [simulate((2, 2))], partial=False, limit=8, tolerance=1e-10)


def test_half_is_summed_in_float32():
    values = torch.rand(64, generator=torch.Generator().manual_seed(0)).to(torch.float16)
    got = spread_out(values, simulate((4,)), [Shard(0)]).cumsum(0)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.full_tensor(), values.cumsum(0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("scan", PIECEWISE)
def test_only_totals_travel(scan):
    a = spread_out(x(300, 2), simulate((3,)), [Shard(0)], requires_grad=True)
    with shardwise.debug.ledger() as log:
        out = scan(a)
    assert not any(entry.reason for entry in log)
    assert max(entry.bytes for entry in log) <= 3 * 2 * 3 * 2 * 8  # an all-reduce of three rows of two
    compare(out, scan(a.full_tensor()), "", 1e-10)
    assert out.placements == (Shard(0),)


def test_another_dim_moves_nothing():
    a = spread_out(CUBE, simulate((2, 2)), [Shard(1), Replicate()], requires_grad=True)
    with shardwise.strict():
        (a.cumsum(0) + a.cumprod(2) + a.logcumsumexp(0)).sum()


def on_processes(rank, world_size):
    for name, (function, tensors) in SCANS.items():
        check_rule(function, [tensors], [device_mesh((world_size,))], limit=4, seed=len(name), tolerance=1e-10)
    test_twice = lambda a: torch.autograd.grad((a.cumprod(0) ** 2).sum(), a, create_graph=True)[0].square().sum()  # noqa: E731
    check_rule(test_twice, [[x(2, 1)]], [device_mesh((world_size,))], partial=False, limit=8, tolerance=1e-10)


def test_processes():
    run_ranks(on_processes, 3)
