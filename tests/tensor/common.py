"""What the checks of this folder share. A check is a function of a mesh: it runs on simulated meshes and, in workers,
on real ones, and compares with plain torch."""

import functools
import random
from importlib import import_module

import pytest
import torch

from shardwise import DTensor, Partial, Replicate, Shard, simulate
from shardwise.mesh import as_mesh
from shardwise.testing.spread import random_sizes, spread_out
from tests.workers import device_mesh, run_ranks

R = Replicate()
SIMULATED = [(3,), (2, 2), (2, 1, 2)]
REAL = [(2, 2)]


def x(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape)), dtype=dtype)


def on_one_axis(mesh, placement, axis=0):
    """`placement` on one axis, Replicate on the others."""
    return [placement if a == axis % mesh.ndim else R for a in range(mesh.ndim)]


def layouts(mesh, value, partial=True):
    """Placements for a tensor: whole, cut on each dim (by the first axis, the last, all), uneven and empty parts."""
    found = [[R] * mesh.ndim]
    for dim in range(value.dim()):
        found.append(on_one_axis(mesh, Shard(dim)))
        sizes = random_sizes(value.shape[dim], mesh.shape[0], random.Random(dim))
        found.append(on_one_axis(mesh, Shard(dim, sizes=sizes)))
        if mesh.ndim > 1:
            found.append(on_one_axis(mesh, Shard(dim), -1))
            found.append([Shard(dim)] * mesh.ndim)
            found.append([Shard(dim), *[Shard(value.dim() - 1 - dim)] * (mesh.ndim - 1)])
    if partial:
        found.append(on_one_axis(mesh, Partial()))
        if mesh.ndim > 1 and value.dim():
            found.append([Partial(), *[Shard(0)] * (mesh.ndim - 1)])
    return found if is_simulated(mesh) else found[::2]  # the moves between all of them have tests of their own


def laid_out(value, mesh, places, requires_grad=False):
    """`value` under these placements; a Partial one in uneven parts."""
    return spread_out(value.detach(), mesh, places, requires_grad=requires_grad)


def whole(value):
    with torch.no_grad():
        return value.full_tensor() if isinstance(value, DTensor) else value.detach()


def same(got, want, where="", tolerance=1e-10, exact_dtype=True):
    """A distributed (or plain) tensor has the values of a plain one; None only meets None."""
    if want is None:
        assert got is None, where
        return
    assert got is not None, where
    assert tuple(got.shape) == tuple(want.shape), f"{tuple(got.shape)} != {tuple(want.shape)} {where}"
    if exact_dtype:
        assert got.dtype == want.dtype, f"{got.dtype} != {want.dtype} {where}"
    torch.testing.assert_close(
        whole(got), want.detach(), rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=exact_dtype,
        msg=lambda m: f"{m}\n  {where}",
    )  # fmt: skip


def is_simulated(mesh):
    return as_mesh(mesh).comm.simulated


def locals_of(tensor):
    """The distinct plain tensors this process holds of it."""
    return tensor._layout.mesh.comm.values(tensor._local)


def _on_ranks(rank, world_size, module, names, shape):
    checks = {c.__name__: c for c in import_module(module).CHECKS}
    for name in names:
        torch.manual_seed(0)
        try:
            checks[name](device_mesh(shape, tuple("abc"[: len(shape)])))
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error


def checked_on(module, checks, simulated=SIMULATED, real=REAL):
    """The checks of a module as tests: one by one on simulated meshes, all in one go on each real one."""

    @pytest.mark.parametrize("shape", simulated, ids=str)
    @pytest.mark.parametrize("check", checks, ids=lambda c: c.__name__)
    def test_simulated(check, shape):
        check(simulate(shape, axis_names=tuple("abc"[: len(shape)])))

    @pytest.mark.parametrize("shape", real, ids=str)
    def test_processes(shape):
        names = [c.__name__ for c in checks]
        run_ranks(_on_ranks, functools.reduce(int.__mul__, shape), module, names, shape)

    return test_simulated, test_processes


class TripledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.mark_dirty(t)
        return t.mul_(3)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


VALUE, WEIGHT = x(5, 4), x(5, 4, seed=3)


def leaves(mesh, value=VALUE, partial=True):
    """A plain leaf and a distributed one, for every layout."""
    for places in layouts(mesh, value, partial):
        yield value.clone().requires_grad_(), laid_out(value, mesh, places, requires_grad=True), str(places)
