"""Tile tensors on a GPU, in an NCCL group of one whose rank has several tiles. Skipped where there is no GPU."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import Shard, init_device_mesh, simulate
from shardwise import sharded as S

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLACE = "rank:0/cuda:0"


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory):
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tiles(*boxes):
    return S.EnumerableShardingSpec([S.ShardMetadata(list(at), list(size), PLACE) for at, size in boxes])


SPECS = {
    "rows": S.ChunkShardingSpec(0, [PLACE, PLACE]),
    "columns": S.ChunkShardingSpec(1, [PLACE, PLACE, PLACE]),
    "one": tiles(((0, 0), (5, 4))),
    "any": tiles(((0, 3), (5, 1)), ((2, 0), (3, 3)), ((0, 0), (2, 2)), ((0, 2), (2, 1)), ((5, 0), (0, 4))),
}


def values(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cuda()


def cut(value, spec, requires_grad=False):
    st = S._shard_tensor(value, spec)
    return st.requires_grad_(requires_grad)


def whole(st):
    out = torch.empty(st.size(), dtype=st.dtype, device="cuda")
    st.gather(0, out)
    return out


@pytest.mark.parametrize("spec", SPECS)
def test_cut_gather_and_reshard(spec):
    st = cut(values(5, 4), SPECS[spec])
    assert all(shard.tensor.is_cuda for shard in st.local_shards())
    assert torch.equal(whole(st), values(5, 4))
    for other in SPECS.values():
        moved = cut(values(5, 4), SPECS[spec])
        moved.reshard(other)
        assert all(shard.tensor.is_cuda for shard in moved.local_shards())
        assert torch.equal(whole(moved), values(5, 4))


@pytest.mark.parametrize("spec", SPECS)
def test_ops_and_gradients(spec):
    def function(x, y):
        return (torch.tanh(x) * y).softmax(1) @ y.T + torch.where(x > 0, x, -x).sum()

    leaves = [values(5, 4, seed=i).requires_grad_() for i in range(2)]
    mine = [cut(values(5, 4, seed=i), s, True) for i, s in enumerate((SPECS[spec], SPECS["any"]))]
    want, got = function(*leaves), function(*mine)
    assert torch.allclose(whole(got.detach()), want)
    want.pow(2).sum().backward()
    got.pow(2).sum().backward()
    for leaf, st in zip(leaves, mine):
        assert torch.allclose(whole(st.grad), leaf.grad)


@pytest.mark.parametrize("spec", SPECS)
def test_embeddings(spec):
    table, ids = values(5, 4), torch.tensor([[0, 4, 2], [3, 3, 1]], device="cuda")
    weights = values(2, 3, seed=2)
    calls = [
        lambda t: F.embedding(ids, t, padding_idx=3),
        *(lambda t, mode=mode: F.embedding_bag(ids, t, mode=mode) for mode in ("sum", "mean", "max")),
        lambda t: F.embedding_bag(ids, t, mode="sum", per_sample_weights=weights, padding_idx=2),
        lambda t: F.embedding_bag(ids.view(-1), t, torch.tensor([0, 2, 2], device="cuda"), mode="mean"),
    ]
    for call in calls:
        leaf, st = table.clone().requires_grad_(), cut(table, SPECS[spec], True)
        want, got = call(leaf), call(st)
        assert got.is_cuda and torch.allclose(got, want)
        want.pow(2).sum().backward()
        got.pow(2).sum().backward()
        assert torch.allclose(whole(st.grad), leaf.grad)


def test_random_fills_are_those_of_a_cpu():
    torch.manual_seed(3)
    st = S.rand(SPECS["any"], 5, 4)
    torch.manual_seed(3)
    want = shardwise.rand(5, 4, device_mesh=simulate((2,)))
    assert all(shard.tensor.is_cuda for shard in st.local_shards())
    assert torch.equal(whole(st).cpu(), want.full_tensor())


def test_module_optimizer_and_state(tmp_path):
    def train(model):
        optimizer = torch.optim.AdamW(dict(S.named_params_with_sharded_tensor(model)).values(), lr=0.1)
        for step in range(3):
            loss = model(values(3, 4, seed=step)).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    torch.manual_seed(0)
    plain = nn.Linear(4, 5, dtype=torch.float64).cuda()
    mine = copy.deepcopy(plain)
    S.shard_module(mine, S.ShardingPlan(plan={"weight": SPECS["any"]}))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        want = plain(values(3, 4, seed=step)).pow(2).sum()
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
    assert torch.allclose(train(mine), want)
    assert torch.allclose(whole(mine.weight.detach()), plain.weight)

    kept = io.BytesIO()
    torch.save(mine.weight.detach(), kept)
    kept.seek(0)
    with S.load_with_process_group(dist.group.WORLD):
        loaded = torch.load(kept, weights_only=False)
    assert torch.equal(whole(loaded), whole(mine.weight.detach()))


def test_as_a_dtensor_and_back():
    mesh = init_device_mesh("cuda", (1,))
    st = cut(values(5, 4), SPECS["any"])
    x = st.to_dtensor(mesh, [Shard(0)])
    assert x.device.type == "cuda" and torch.equal(x.full_tensor(), values(5, 4))
