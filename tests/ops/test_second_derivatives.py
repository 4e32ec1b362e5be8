"""Second derivatives of norms and of what is made of them, where a rank holds nothing but zeros."""

import math

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Shard, distribute_tensor, simulate
from tests.workers import device_mesh, run_ranks

ZEROS = torch.zeros(3, 3, dtype=torch.float64)
A = torch.cat([torch.tensor([[1.0, 2, -3]], dtype=torch.float64), ZEROS])
B = torch.cat([torch.tensor([[2.0, 5, 4]], dtype=torch.float64), ZEROS])
ORDERS = [0.5, 1, 1.5, 2, 2.5, 3, math.inf, -math.inf, -1]

OF_ORDER = {
    "vector_norm": lambda p: lambda a: torch.linalg.vector_norm(a, p),
    "vector_norm along": lambda p: lambda a: torch.linalg.vector_norm(a, p, 0),
    "vector_norm kept": lambda p: lambda a: torch.linalg.vector_norm(a, p, (0, 1), keepdim=True),
    "norm": lambda p: lambda a: a.norm(p),
    "dist": lambda p: lambda a, b: torch.dist(a, b, p),
    "pairwise_distance": lambda p: lambda a, b: F.pairwise_distance(a.t(), b.t(), p),
    "normalize": lambda p: lambda a: F.normalize(a, p, dim=0),
    "renorm": lambda p: lambda a: torch.renorm(a, p, 1, 0.5),
}
CASES = {f"{name} {p}": (of(p), [A, B]) for name, of in OF_ORDER.items() for p in ORDERS if p > 0 or name[0] in "vnd"}
CASES |= {
    "frobenius": (torch.linalg.matrix_norm, [A]),
    "cosine_similarity": (lambda a, b: F.cosine_similarity(a, b, dim=0), [A, B]),
    "std": (lambda a: a.std(0), [A]),
    "complex": (lambda a: torch.linalg.vector_norm(torch.complex(a, 2 * a)), [A]),
    "all zeros": (lambda a: torch.linalg.vector_norm(a), [A * 0]),
    "infinite": (lambda a: torch.linalg.vector_norm(a), [A.masked_fill(A == 2, math.inf)]),
    "in double": (lambda a: torch.linalg.vector_norm(a.float(), dtype=torch.float64), [A]),
}


def derivatives(func, tensors):
    """The value, the gradients, and the gradients of those; or the error that torch raises."""
    tensors = [t.requires_grad_() for t in tensors][: func.__code__.co_argcount if hasattr(func, "__code__") else 1]
    out = func(*tensors)
    weight = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).reshape(out.shape)
    try:
        first = torch.autograd.grad((out * weight).sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), tensors, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        return type(error)
    return out, *first, *second


def compared(name, mesh):
    func, tensors = CASES[name]
    want = derivatives(func, [t.clone() for t in tensors])
    for places in (
        [Shard(0)] * mesh.ndim,
        [Shard(0, sizes=(1, 3, *[0] * (mesh.shape[0] - 2)))] + [Shard(1)] * (mesh.ndim - 1),
    ):
        got = derivatives(func, [distribute_tensor(t, mesh, places) for t in tensors])
        if isinstance(want, type):
            assert got is want, name
            continue
        for g, w in zip(got, want, strict=True):
            assert (g is None) == (w is None), name
            if w is not None:
                full = g.full_tensor() if isinstance(g, DTensor) else g
                # what cancels out in plain torch is noise of its own
                torch.testing.assert_close(full, w, rtol=1e-10, atol=1e-6, equal_nan=True, msg=lambda m: f"{m}\n{name}")


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name, shape):
    compared(name, simulate(shape))


def all_of_them(rank, world_size):
    for name in CASES:
        compared(name, device_mesh((4,)))


def test_on_processes():
    run_ranks(all_of_them, 4)
