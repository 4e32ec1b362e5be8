"""use("torch"): bit by bit the numbers of a plain program, a chunk at a time."""

import pytest
import torch

import shardwise
from shardwise import DTensor, Replicate, Shard, simulate
from shardwise.random import distributions as draws
from shardwise.random import torch_stream
from tests.random.common import as_torch_draws

WHATS = {
    "uniform": draws.uniform(-1, 2),
    "normal": draws.normal(1, 2),
    "random": draws.integer(torch.int64, 3, 90),
    "geometric": draws.geometric(0.3),
    "cauchy": draws.cauchy(1, 2),
    "exponential": draws.exponential(2),
    "bernoulli": draws.bernoulli(0.3),
    "log_normal": draws.log_normal(0, 1),
    "dropout": draws.dropout(0.3),
}


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 31, 32, 100, 1000, 1024 + 5])
@pytest.mark.parametrize("name", WHATS)
def test_chunks_are_what_torch_draws(name, n, monkeypatch):
    """However small the chunks: the stream of plain torch, and it goes on where plain torch's does."""
    monkeypatch.setattr(torch_stream, "CHUNK", 32)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(1)
        want = torch_stream.draw_whole(torch.empty(n, dtype=dtype), WHATS[name])
        after = torch.rand(1)
        torch.manual_seed(1)
        got = torch.full((n,), float("nan"), dtype=dtype)
        sizes = []
        for start, numbers in torch_stream.chunks((n,), (1,), dtype, torch.device("cpu"), WHATS[name]):
            got[start : start + len(numbers)] = numbers
            sizes.append(len(numbers))
        assert torch.equal(got, want) and torch.equal(torch.rand(1), after)
        if name in ("uniform", "normal", "random", "geometric", "cauchy"):
            assert max(sizes, default=0) <= 32


PLACEMENTS = [
    ((3,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((3,), [Shard(0, sizes=(0, 11, 2))]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2,), [Replicate()]),
]


@pytest.mark.parametrize("shape,placements", PLACEMENTS, ids=str)
@as_torch_draws
def test_every_rank_keeps_its_part(shape, placements, monkeypatch):
    monkeypatch.setattr(torch_stream, "CHUNK", 32)
    mesh = simulate(shape)
    for make, plain in ((shardwise.rand, torch.rand), (shardwise.randn, torch.randn)):
        torch.manual_seed(2)
        got = make(13, 7, device_mesh=mesh, placements=placements).full_tensor()
        torch.manual_seed(2)
        assert torch.equal(got, plain(13, 7))
    torch.manual_seed(2)
    got = shardwise.randperm(13, device_mesh=mesh, placements=[Replicate()] * len(shape)).full_tensor()
    torch.manual_seed(2)
    assert torch.equal(got, torch.randperm(13))


@as_torch_draws
def test_memory_order():
    """Plain torch fills memory in its order."""
    plain = torch.zeros(7, 5).t()
    mine = shardwise.distribute_tensor(torch.zeros(7, 5), simulate((2,)), [Shard(0)]).t()
    torch.manual_seed(3)
    plain.normal_()
    torch.manual_seed(3)
    assert torch.equal(mine.normal_().full_tensor(), plain)
    torch.manual_seed(3)
    want = torch.rand_like(plain)
    torch.manual_seed(3)
    got = torch.rand_like(mine)
    assert torch.equal(got.full_tensor(), want) and got.stride() == want.stride()


def test_like_a_tensor_with_holes_in_its_memory():
    """torch makes the result without holes, and fills it in that order."""
    holes = torch.zeros(5, 5, 2, dtype=torch.float64)[..., 0]
    x = DTensor.from_local(holes, simulate(3), [Replicate()], shape=(5, 5), stride=holes.stride())
    with shardwise.random.use("torch"):
        torch.manual_seed(0)
        want = torch.randn_like(holes)
        torch.manual_seed(0)
        assert torch.equal(torch.randn_like(x).full_tensor(), want)
