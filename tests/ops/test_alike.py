"""Odd calls: what plain torch computes is computed, with its dtype; what it raises is raised, on all ranks."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor, simulate
from shardwise.experimental import local_map
from shardwise.testing import check_rule
from tests.values import seeded
from tests.versions import since_213

A = seeded((8, 6))[0].double()
ROWS = torch.tensor([[1.0, -1.0], [2.0, -3.0], [0.5, 0.0], [-1.0, 1.0]], dtype=torch.float64)
CLASSES = torch.tensor([0, 1, 5, 2])
INF = math.inf


def put(index):
    def write(x):
        x = x.clone()
        x[index] = 7
        return x

    return write


def pending(func):
    """`func` of pending sums."""
    return lambda *tensors: func(*(t.sum(0) for t in tensors))


INDICES = [
    np.array([0.0, 1.9]), np.array([2, 0]), np.array([True, False] * 4), np.array(3.0), [0.0, 1.0], np.array([1], np.uint8),
    np.array(["a"]), 1.5, torch.tensor([0.0, 1.0]), np.int64(2),
]  # fmt: skip
CASES = {
    **{f"x[{index!r}]": (lambda x, index=index: x[index], [A]) for index in INDICES},
    **{f"x[{index!r}] = 7": (put(index), [A]) for index in INDICES},
    "one_hot": (lambda i: F.one_hot(i), [CLASSES]),
    "one_hot, classes": (lambda i: F.one_hot(i, 9), [CLASSES]),
    "one_hot, too few classes": (lambda i: F.one_hot(i, 3), [CLASSES]),
    "one_hot, a negative class": (lambda i: F.one_hot(i - 1, 9), [CLASSES]),
    "one_hot, floats": (lambda i: F.one_hot(i, 9), [CLASSES.double()]),
    "one_hot of nothing": (lambda i: F.one_hot(i[:0], 3), [CLASSES]),
    "one_hot of nothing, classes unknown": (lambda i: F.one_hot(i[:0]), [CLASSES]),
    "embedding of integers": (lambda w: torch.embedding(w, torch.tensor([3, 0])), [torch.arange(12).view(4, 3)]),
    "embedding of bools": (lambda w: F.embedding(torch.tensor([3, 0]), w), [torch.arange(12).view(4, 3) > 5]),
    "embedding, float ids": (lambda w: F.embedding(torch.tensor([0.0]), w), [A]),
    **{
        f"{name}, {number}": (pending(lambda *t, func=func, number=number: func(*t, number)), [ROWS, ROWS * 2])
        for number in (INF, -INF, math.nan, 0.0, 2.0)
        for name, func in {
            "add": lambda a, b, n: torch.add(a, b, alpha=n),
            "sub": lambda a, b, n: torch.sub(a, b, alpha=n),
            "add_": lambda a, b, n: a.add_(b, alpha=n),
            "lerp": lambda a, b, n: torch.lerp(a, b, n),
            "mul": lambda a, b, n: a * n + b,
            "_foreach_add": lambda a, b, n: torch._foreach_add([a, b], [b, a], alpha=n),
            "_foreach_lerp": lambda a, b, n: torch._foreach_lerp([a, b], [b, a], n),
            "_foreach_mul": lambda a, b, n: torch._foreach_mul([a, b], [2.0, n]),
        }.items()
    },
    **{
        f"{name}, {number}": (lambda a, b, func=func, number=number: func(a, b, number), [ROWS, ROWS * 2])
        for number in (INF, 2.0)
        for name, func in {
            "addmv": lambda a, b, n: torch.addmv(a.sum(0), b.T, b[:, 0], alpha=n),
            "addmm": lambda a, b, n: torch.addmm(a.sum(0), a.T, b, alpha=n),
            "addmm, beta": lambda a, b, n: torch.addmm(a.sum(0), a.T, b, beta=n),
            "baddbmm": lambda a, b, n: torch.baddbmm(a.sum(0), a.T[None], b[None], alpha=n),
        }.items()
    },
    "addr of an integer": (lambda m, a, b: torch.addr(m, a, b, beta=0.5, alpha=1.5), [torch.arange(20).view(4, 5), A[:4, 0], A[0, :5]]),
    "addmv of an integer": (lambda m, a: torch.addmv(m, a, a[0], beta=2, alpha=3), [torch.arange(4), torch.arange(20).view(4, 5)]),
}  # fmt: skip


def outcome(func, tensors):
    try:
        found = func(*tensors)
    except Exception as error:
        return type(error)
    return [
        t.full_tensor() if isinstance(t, DTensor) else t
        for t in (found if isinstance(found, (list, tuple)) else [found])
    ]


OLDER = {"embedding, float ids": since_213("the kernel for shapes raises ValueError, the others RuntimeError")}


@pytest.mark.parametrize("places", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("name", [pytest.param(name, marks=OLDER.get(name, ())) for name in CASES])
def test_as_torch_does(name, places):
    func, tensors = CASES[name]
    want = outcome(func, [t.clone() for t in tensors])
    got = outcome(func, [distribute_tensor(t, simulate(4), [places]) for t in tensors])
    if isinstance(want, type):
        assert got is want or (isinstance(got, type) and issubclass(got, want))
    else:
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("loss", [F.huber_loss, F.soft_margin_loss, F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.kl_div])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_of_mixed_dtypes(loss, reduction):
    samples = [(A.float(), A.flip(0).abs()), (A, A.flip(0).abs().float())]
    check_rule(lambda a, b: loss(a, b, reduction=reduction), samples, [(3,)], limit=12, grad=False, tolerance=1e-4)


NOT_DENSE = {
    "to_sparse": (lambda x: x.to_sparse(), "a DTensor is dense"),
    "to_sparse_csr": (lambda x: x.to_sparse_csr(), "a DTensor is dense"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "a DTensor is dense"),
    "meets nested": (lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * x, "a nested tensor meets"),
    "meets quantized": (lambda x: x + torch.quantize_per_tensor(torch.ones(8, 6), 0.1, 0, torch.qint8), "use x.dequantize"),
    "meets sparse": (lambda x: x + torch.ones(8, 6).to_sparse(), "use x.to_dense"),
    "of nested": (lambda x: distribute_tensor(torch.nested.nested_tensor([torch.ones(2)]), x.device_mesh), "got nested"),
    "of quantized": (lambda x: DTensor.from_local(torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8), x.device_mesh), "got quantized"),
    "of sparse": (lambda x: DTensor.from_local(torch.ones(2, 2).to_sparse(), x.device_mesh), "got torch.sparse_coo"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_DENSE)
def test_what_is_not_dense_is_refused_by_name(name):
    func, message = NOT_DENSE[name]
    with pytest.raises(shardwise.ShardwiseError, match=message):
        func(distribute_tensor(A, simulate(4), [Shard(0)]))


def test_local_map_asks_how_outputs_are_laid_out():
    mesh = simulate(4)
    twice = local_map(lambda part: part * 2)
    with pytest.raises(shardwise.LayoutError, match="output 0 is a tensor .* out_placements does not say"):
        twice(distribute_tensor(A, mesh, [Shard(0)]))
    torch.testing.assert_close(twice(distribute_tensor(A, mesh, [Replicate()])).full_tensor(), A * 2)
