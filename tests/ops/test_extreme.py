"""Extremes, statistics and sorting over cut dims: values, gradients, ties and NaNs, and only a few values travel."""

import pytest
import torch

import shardwise
from shardwise import Shard, distribute_tensor, simulate
from shardwise.testing import check_rule, spread_out
from tests.ops.cases import x
from tests.workers import device_mesh, run_ranks

INF, NAN = float("inf"), float("nan")
A, CUBE, LINE = x(7, 5), x(4, 5, 3), x(11)
TIES = (A * 1.5).round()
HOLES = TIES.masked_fill(A > 1, NAN)
INTS = (A * 3).round().long()
norm = torch.linalg.vector_norm
EXTREMES = {
    "amax": lambda a: (a.amax(), a.amin(0), a.amax((-1, 0), keepdim=True), torch.amin(a, axis=1, keepdims=True)),
    "max": lambda a: (a.max(), a.min(), *a.max(0), *torch.min(a, dim=-1, keepdim=True)),
    "aminmax": lambda a: (*a.aminmax(), *torch.aminmax(a, dim=0, keepdim=True)),
    "argmax": lambda a: (a.argmax(), a.argmin(0), torch.argmax(a, dim=-1, keepdim=True), a.argmin(keepdim=True)),
    "max of pieces": lambda a: (*torch.cat([a, a * 2, a]).max(0), torch.cat([a, a.flip(0)], 1).argmax()),
    "max of a view": lambda a: (*a.t().max(0), a.flip(0).amax(1), a[1:, ::2].argmax()),
    "max of two": lambda a: (torch.max(a, a.flip(0)), torch.min(a, other=a * 2)),
    "infinite norms": lambda a: (norm(a, INF), norm(a, -INF, 0), norm(a, INF, dim=(0, 1), keepdim=True)),
}
STATISTICS = {
    "var": (lambda a: (a.var(), a.var(0), torch.var(a, (0, -1), keepdim=True, correction=0)), [CUBE]),
    "var, old": (lambda a: (a.var(False), a.var(0, False), torch.std(a, 1, True, True), a.std(unbiased=False)), [A]),
    "std": (lambda a: (a.std(0), *torch.std_mean(a), *torch.var_mean(a, 1, keepdim=True, correction=2)), [A]),
    "var far from 0": (lambda a: (a + 1e6).var(0), [A]),
    "var of complex": (lambda a: (torch.complex(a, a.flip(0)).var(0), torch.std_mean(torch.complex(a, a * 2))[0]), [A]),
    "std of equals": (lambda a: (a * 0 + 1).std(0), [A]),
    "norms": (lambda a: (norm(a), norm(a, 1, 0), norm(a, 3, -1, True), norm(a, 0, 0), a.norm(p=2, dim=0)), [TIES]),
    "norms of two": (lambda a, b: (torch.dist(a, b), torch.dist(a, b[0], 1), torch.dist(a, b, INF)), [A, x(7, 5, seed=1)]),
    "renorm": (lambda a: (a.renorm(2, 0, 1.0), torch.renorm(a, p=1, dim=-1, maxnorm=2.0)), [CUBE]),
    "topk": (lambda a: (*a.topk(2), *a.topk(1, -1, False), *torch.topk(a, 9, dim=0, sorted=True)), [LINE]),
    "sort": (lambda a: (*a.sort(0), *a.sort(-1, True), a.argsort(stable=True, dim=0), a.msort()), [A]),
    "kth": (lambda a: (*a.kthvalue(2), *a.median(0), a.median(), *a.mode(0, True), a.quantile(0.3, dim=0)), [A]),
    "lookup": (lambda a, b: (torch.bucketize(a, b.sort()[0]), torch.searchsorted(a.sort()[0], a[:, :2])), [A, LINE]),
    "isin": (lambda a, b: (torch.isin(a, b), torch.isin(1, b), torch.isin(a, 2)), [INTS, INTS[0]]),
    "answers": (lambda a, b: (torch.equal(a, a), a.equal(b), torch.equal(a, b.t()), torch.allclose(a, b, atol=9)), [A, A + 1]),
}  # fmt: skip
MESHES = pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 1, 3)], ids=str)


@MESHES
@pytest.mark.parametrize("values", [A, TIES, INTS, A[:2]], ids=["distinct", "ties", "ints", "few"])
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name, values, mesh):
    if values.dtype == torch.long and "norms" in name:
        return
    partial = values is not TIES  # parts add up to values that are no longer equal
    check_rule(EXTREMES[name], [[values]], [simulate(mesh)], limit=4, seed=len(name), partial=partial, tolerance=1e-10)


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", EXTREMES)
def test_nan_wins(name, mesh):
    check_rule(EXTREMES[name], [[HOLES]], [simulate(mesh)], limit=6, partial=False, tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.half, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    values = TIES.relu().to(dtype)
    every = lambda a: (a.amax(), a.min(), *a.max(0), a.amin(1), *a.aminmax())  # noqa: E731
    check_rule(every, [[values]], [simulate((2, 2))], grad=False, partial=False, limit=8, tolerance=1e-10)
    if dtype.is_floating_point:
        every = lambda a: (a.var(0), *torch.std_mean(a), a.norm(), norm(a, INF), norm(a, dtype=torch.float64))  # noqa: E731
        check_rule(every, [[values]], [simulate((3,))], partial=False, tolerance=1e-2, limit=8)


@MESHES
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(name, mesh):
    function, tensors = STATISTICS[name]
    partial = name not in ("answers", "norms")
    check_rule(function, [tensors], [simulate(mesh)], limit=6, seed=len(name), partial=partial, tolerance=1e-9)


def histograms(a, w):
    return (
        *(a.histc(4), a.histc(bins=3, min=-1, max=1), (a * 0).histc(5), a[:0].histc(3)),
        *(*torch.histogram(a, 4), *torch.histogram(a, 3, range=(-1, 1), weight=w)),
        *torch.histogram(a, w[0].sort()[0], density=True),
    )


@MESHES
def test_counts(mesh):
    check_rule(histograms, [[A, A.abs()]], [simulate(mesh)], grad=False, partial=False, limit=8, tolerance=1e-10)


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["amax", "var", "std", "norm"])
def test_second_derivatives(name, mesh):
    def twice(a):
        (first,) = torch.autograd.grad((getattr(a, name)() ** 3).sum(), a, create_graph=True)
        return (first * first.cos()).sum()

    check_rule(twice, [[A]], [simulate(mesh)], partial=False, limit=8, tolerance=1e-10)
    check_rule(twice, [[A[:2, :2]]], [simulate(mesh)], partial=False, limit=8, tolerance=1e-10)


CHEAP = {
    "amax": lambda a: a.amax(),
    "max": lambda a: a.max(),
    "max along": lambda a: a.max(0)[0],
    "argmax": lambda a: a.argmax(),
    "topk": lambda a: a.topk(2, 0)[0],
    "var": lambda a: a.var(0),
    "std": lambda a: a.std(),
    "norm": lambda a: norm(a, INF),
    "histc": lambda a: a.detach().histc(5),
    "equal": lambda a: torch.equal(a, a + 1),
    "sort elsewhere": lambda a: a.sort(1)[0],
}


@pytest.mark.parametrize("name", CHEAP)
def test_only_a_few_values_travel(name):
    values = spread_out(x(300, 4), simulate((3,)), [Shard(0)], requires_grad=True)
    with shardwise.debug.ledger() as log:
        result = CHEAP[name](values)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
    assert not any(entry.reason for entry in log)
    assert sum(entry.bytes for entry in log) < 1200  # of 9,600


def test_errors_are_torchs_own():
    values = spread_out(A, simulate((3,)), [Shard(0)])
    for call, error, words in [
        (lambda: values.amax(2), IndexError, r"expected to be in range of \[-2, 1\], but got 2"),
        (lambda: values.var((0, -2)), RuntimeError, "dim 0 appears multiple times"),
        (lambda: values[:0].max(), RuntimeError, "Expected reduction dim to be specified"),
        (lambda: (values > 0).argmax(), RuntimeError, "does not support bool"),
        (lambda: values.topk(9, 0), RuntimeError, "k out of range"),
    ]:
        with pytest.raises(error, match=words):
            call()


def on_gloo(rank, world_size):
    mesh = device_mesh((world_size,))
    for function in EXTREMES.values():
        check_rule(function, [[TIES]], [mesh], limit=2, partial=False, tolerance=1e-10)
        check_rule(function, [[HOLES[:2]]], [mesh], limit=1, partial=False, tolerance=1e-10)
    for function, tensors in STATISTICS.values():
        check_rule(function, [tensors], [mesh], limit=1, partial=False, tolerance=1e-9)
    check_rule(histograms, [[A, A.abs()]], [mesh], limit=2, grad=False, partial=False, tolerance=1e-10)


def test_on_processes():
    run_ranks(on_gloo, 3)


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_median_of_an_expanded_tensor(name):
    """torch's own reads memory there that nobody has written."""
    plain = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    ours = distribute_tensor(plain, simulate(2), [Shard(0)]).requires_grad_()
    values, indices = getattr(torch, name)(ours[None].expand(4, 3), 0)
    assert torch.equal(values.full_tensor(), plain)
    assert int(indices.full_tensor().max()) < 4
    values.sum().backward()
    assert torch.equal(ours.grad.full_tensor(), torch.ones(3, dtype=torch.float64))
