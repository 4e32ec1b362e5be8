"""The same checks on a GPU: simulated ranks on it, and a real NCCL group of one. Skipped where there is none."""

import pytest
import torch
import torch.distributed as dist

from shardwise import Shard, distribute_tensor, init_device_mesh, randn, simulate
from shardwise.testing import check_rule
from tests.model import gpt
from tests.ops.cases import CASES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ON_CPU = {
    "index",
    "index two",
    "index apart",
    "index mask",
    "index_select",
    "inverse",
    "stft",
}  # they make plain CPU tensors


@pytest.fixture(scope="module")
def nccl_mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1, 1))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [n for n in CASES if n not in ON_CPU])
def test_simulated(name):
    function, tensors = CASES[name]
    check_rule(function, [[t.cuda() for t in tensors]], [simulate((2, 2), device="cuda")], limit=4, tolerance=1e-8)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ON_CPU])
def test_nccl(name, nccl_mesh):
    function, tensors = CASES[name]
    check_rule(function, [[t.cuda() for t in tensors]], [nccl_mesh], limit=2, tolerance=1e-8)


@pytest.mark.parametrize("layout", gpt.LAYOUTS)
def test_gpt(layout):
    want = gpt.step(gpt.build().cuda(), *(t.cuda() for t in gpt.batch()))
    mine = gpt.run(simulate(gpt.LAYOUTS[layout][0], device="cuda"), layout)
    gpt.assert_equal(mine, want, atol=1e-8)


def test_factories_and_moves_land_on_the_gpu(nccl_mesh):
    x = randn(4, 6, device_mesh=nccl_mesh, placements=[Shard(0), Shard(1)])
    assert x.device.type == x.to_local().device.type == "cuda"
    y = distribute_tensor(torch.arange(12.0).view(3, 4), nccl_mesh, [Shard(0), Shard(1)])
    assert y.full_tensor().device.type == "cuda" and y.sum().item() == 66
