"""On a GPU: the same numbers as on a CPU. Skipped without one."""

import pytest
import torch

import shardwise
from shardwise.random import distributions as draws
from shardwise.random.fill import fill_tile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KEYS = (0, 123, 0xFEDCBA9876543210)
BOXES = {  # global shape, offsets, sizes
    "all": ((70, 33), (0, 0), (70, 33)),
    "rows": ((70, 33), (13, 0), (40, 33)),
    "columns": ((70, 33), (0, 7), (70, 11)),
    "one column": ((70, 33), (0, 7), (70, 1)),
    "five dims": ((3, 4, 5, 6, 7), (1, 1, 1, 1, 1), (2, 3, 3, 4, 5)),
    "far": ((1 << 20, 1 << 20), ((1 << 19), 12345), (3, 1000)),
    "empty": ((70, 33), (13, 0), (0, 33)),
    "scalar": ((), (), ()),
}
CASES = {
    "uniform": (draws.uniform(), (torch.float32, torch.float64, torch.bfloat16, torch.float16)),
    "uniform between": (draws.uniform(-0.3, 1.7), (torch.float32, torch.float64)),
    "normal": (draws.normal(), (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128)),
    "normal around": (draws.normal(3.0, 0.02), (torch.float32, torch.float64)),
    "log_normal": (draws.log_normal(0.5, 1.5), (torch.float32, torch.float64, torch.bfloat16)),
    "exponential": (draws.exponential(1.7), (torch.float32, torch.float64)),
    "cauchy": (draws.cauchy(1.0, 2.0), (torch.float32, torch.float64)),
    "geometric": (draws.geometric(0.2), (torch.float32, torch.float64, torch.int64)),
    "bernoulli": (draws.bernoulli(0.3), (torch.float32, torch.float64, torch.bool, torch.int64)),
    "dropout": (draws.dropout(0.1), (torch.float32, torch.float64, torch.bfloat16)),
    "few integers": (draws.integer(torch.int64, -5, 90), (torch.int64, torch.int32, torch.float32)),
    "many integers": (draws.integer(torch.int64, 0, 1 << 40), (torch.int64,)),
    "all integers": (draws.integer(torch.int64, -(1 << 63), None), (torch.int64,)),
}


def on(device, box, what, dtype, key, draw=0, transposed=False):
    shape, offsets, sizes = BOXES[box]
    target = torch.empty(sizes[::-1] if transposed else sizes, dtype=dtype, device=device)
    return fill_tile(
        target.permute(*reversed(range(target.dim()))) if transposed else target, offsets, shape, what, key, draw
    )


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name):
    what, dtypes = CASES[name]
    for dtype in dtypes:
        for box in BOXES:
            for key in KEYS:
                for draw in (0, 5):
                    got, want = (on(device, box, what, dtype, key, draw) for device in ("cuda", "cpu"))
                    assert torch.equal(got.cpu(), want), (name, dtype, box, key, difference(got.cpu(), want))
        got, want = (on(device, "columns", what, dtype, 5, transposed=True) for device in ("cuda", "cpu"))
        assert torch.equal(got.cpu(), want), (name, dtype, "transposed")


def difference(got, want):
    return got.numel() and (got.to(torch.complex128) - want.to(torch.complex128)).abs().max().item()


def test_large():
    for dtype in (torch.float32, torch.float64):
        for what in (draws.normal(), draws.exponential(), draws.cauchy()):
            shape = (1 << 22,)
            got, want = (
                fill_tile(torch.empty(shape, dtype=dtype, device=d), (0,), shape, what, 99) for d in ("cuda", "cpu")
            )
            assert torch.equal(got.cpu(), want), (dtype, what.name, (got.cpu() != want).sum())


@pytest.mark.parametrize("shape,places", [((4,), ["S0"]), ((2, 2), ["S1", "S0"]), ((3,), ["R"])], ids=str)
def test_distributed_tensors(shape, places):
    """Factories, dropout and its gradient on simulated ranks: on a GPU as on a CPU."""
    found = []
    for device in ("cpu", "cuda"):
        mesh = shardwise.simulate(shape, device=device)
        placed = [shardwise.Replicate() if p == "R" else shardwise.Shard(int(p[1])) for p in places]
        torch.manual_seed(3)
        x = shardwise.randn(13, 10, dtype=torch.float64, device_mesh=mesh, placements=placed, requires_grad=True)
        y = torch.nn.functional.dropout(x, 0.3)
        y.square().sum().backward()
        found.append([t.detach().full_tensor().cpu() for t in (x, y, x.grad)])
    for cpu, cuda in zip(*found, strict=True):
        assert torch.equal(cpu, cuda)
