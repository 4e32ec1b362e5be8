"""Every dtype plain torch takes, type promotion, and inputs that are not contiguous."""

import itertools

import pytest
import torch

from shardwise import DTensor, LayoutError, Partial, RankTensor, Replicate, Shard, distribute_tensor, simulate
from shardwise.testing import check_rule
from tests.workers import device_mesh, run_ranks

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def values(dtype, shape=(5, 7), seed=0):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-3, 4, shape, generator=generator)
    return whole.ne(0) if dtype is torch.bool else whole.abs().to(dtype) if dtype is torch.uint8 else whole.to(dtype)


PROGRAMS = {
    "add": lambda a, b: a + b if a.dtype is not torch.bool else a | b,
    "add number": lambda a, b: (a + 2, a * 1.5, a + True),
    "mul": lambda a, b: a * b,
    "compare": lambda a, b: (a == b, a != 0),
    "sum": lambda a, b: (a.sum(), a.sum(0), b.sum(1, keepdim=True)),
    "views": lambda a, b: (a.t(), a[1:4], a.reshape(-1), a[2], a[:, 3]),
    "join": lambda a, b: (torch.cat([a, b]), torch.stack([a, b])),
    "where": lambda a, b: torch.where(a == b, a, b),
    "cast": lambda a, b: (a.to(torch.float32) if not a.is_complex() else a.abs(), a.to(torch.complex64), a != 0),
    "promote": lambda a, b: (a + b.to(torch.float64) if not a.is_complex() else a + b, a.mul(torch.tensor(2))),
    "any all": lambda a, b: (a.any(), b.all(0)),
    "like": lambda a, b: (torch.zeros_like(a), torch.ones_like(a, dtype=torch.float32), a.clone()),
}
EXACT = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.complex64: 1e-6}


def try_all(mesh, dtype, limit):
    a, b = values(dtype), values(dtype, seed=1)
    for name, program in PROGRAMS.items():
        try:
            check_rule(
                program, [[a, b]], [mesh], limit=limit, grad=False, tolerance=EXACT.get(dtype, 1e-12), partial=False
            )
        except AssertionError as error:
            raise AssertionError(f"{name} on {dtype}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_simulated(dtype, mesh):
    try_all(simulate(mesh), dtype, limit=5)


def on_gloo(rank, world_size):
    for dtype in DTYPES:
        try_all(device_mesh((world_size,)), dtype, limit=2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gloo(world_size):
    run_ranks(on_gloo, world_size)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float32], ids=str)
def test_gradients_of_other_dtypes(dtype):
    a, b = (torch.randn(5, 7, dtype=dtype, generator=torch.Generator().manual_seed(i)) for i in range(2))
    check_rule(
        lambda a, b: (a @ b.t()) * 2 + a.sum(),
        [[a, b]],
        [simulate((2, 2))],
        limit=8,
        tolerance=1e-4 if dtype is torch.float32 else 1e-10,
    )


def test_non_contiguous_locals():
    """Locals that are transposed, sliced or expanded views of something else."""
    parts = [torch.randn(9, 4, dtype=torch.float64)[::2].t() for _ in range(3)]  # (4, 5), strided
    whole = torch.cat(parts)
    x = DTensor.from_local(RankTensor(parts), simulate(3), [Shard(0)])
    for function in (
        lambda t: t * 2,
        lambda t: t.t() @ t,
        lambda t: t.reshape(-1),
        lambda t: t.sum(0),
        lambda t: t[3:9],
    ):
        torch.testing.assert_close(function(x).full_tensor(), function(whole))
    for places in ([Replicate()], [Shard(1)], [Partial()]):
        torch.testing.assert_close(x.redistribute(placements=places).full_tensor(), whole)


def test_non_contiguous_whole():
    whole = torch.randn(6, 5, 4, dtype=torch.float64).permute(2, 0, 1)
    for places in ([Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]):
        x = distribute_tensor(whole, simulate(3), places)
        torch.testing.assert_close(x.full_tensor(), whole)
        torch.testing.assert_close((x + 1).reshape(4, -1).full_tensor(), (whole + 1).reshape(4, -1))


COPIED_ONLY = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
TAKEN = {
    "column": lambda t: t[:, 1],
    "row": lambda t: t[-1],
    "rows": lambda t: t[[2, 0]],
    "select": lambda t: t.index_select(1, torch.tensor([3, 3, 0])),
    "steps": lambda t: t[::2],
    "cat": lambda t: torch.cat([t, t], 1),
    "roll": lambda t: t.roll(1, 0),
    "reshape": lambda t: t.reshape(2, 10),
}


@pytest.mark.parametrize("dtype", COPIED_ONLY, ids=str)
def test_what_torch_cannot_index_or_add_moves_and_is_taken_from(dtype):
    mesh = simulate((2, 2))
    value = torch.arange(20.0).reshape(4, 5).to(dtype)
    places = [Replicate(), Shard(0), Shard(1), Shard(0, sizes=(1, 3)), Shard(1, sizes=(5, 0))]
    layouts = list(itertools.product(places, places))
    for pair in layouts:
        try:
            x = distribute_tensor(value, mesh, pair)
        except LayoutError:  # sizes of a dim that another axis cuts too
            continue
        for target in layouts:
            try:
                moved = x.redistribute(placements=target)
            except LayoutError:
                continue
            assert torch.equal(moved.full_tensor().double(), value.double()), (pair, target)
        for name, take in TAKEN.items():
            assert torch.equal(take(x).full_tensor().double(), take(value).double()), (name, pair)
