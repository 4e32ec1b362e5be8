"""torch's fake process group plays ranks that there are not, to look at shapes, layouts and collectives of a program."""

import io

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise import DTensor, MeshError, Partial, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

R = Replicate()
functional = torch.ops.c10d_functional


@pytest.fixture
def meshes():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield (
            init_device_mesh("cpu", (4,), mesh_dim_names=("x",)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        )
    finally:
        dist.destroy_process_group()


def held(tensor):
    return tuple(tensor.shape), tuple(tensor.to_local().shape)


def test_in_and_out(meshes):
    line, grid = meshes
    assert held(distribute_tensor(torch.randn(6, 4), line, [Shard(0)])) == ((6, 4), (2, 4))
    assert held(distribute_tensor(torch.randn(6, 4), grid, [Shard(0), Shard(1)])) == ((6, 4), (3, 2))
    assert held(DTensor.from_local(torch.randn(2, 4), line, [Shard(0)])) == ((8, 4), (2, 4))
    assert held(DTensor.from_local(torch.randn(2, 4), grid, [Shard(1), Shard(0)])) == ((4, 8), (2, 4))
    assert held(DTensor.from_local(torch.randn(2, 4), line, [R], run_check=True)) == ((2, 4), (2, 4))
    assert held(shardwise.rand(8, 4, device_mesh=line, placements=[Shard(0)])) == ((8, 4), (2, 4))
    assert held(DTensor.from_local(torch.randn(2, 4, device="meta"), line, [Shard(0)])) == ((8, 4), (2, 4))


def test_moves_and_ops(meshes):
    line, grid = meshes
    x = distribute_tensor(torch.randn(8, 4), line, [Shard(0)])
    with CommDebugMode() as mode:
        assert held(x.redistribute(placements=[R])) == ((8, 4), (8, 4))
        assert held(x.redistribute(placements=[Shard(1)])) == ((8, 4), (8, 1))
        assert held(x.redistribute(grid, [Shard(0), Shard(1)])) == ((8, 4), (4, 2))
        assert held((x.t() @ x).redistribute(placements=[R])) == ((4, 4), (4, 4))
    assert mode.get_comm_counts()[functional.all_reduce] == 1
    assert held(x.softmax(0)) == ((8, 4), (2, 4)) and held(x.amax(0)) == ((4,), (4,))
    assert x.full_tensor().shape == (8, 4) and isinstance(x.sum().item(), float)
    parts = DTensor.from_local(torch.randn(2, 4), grid, [Partial(), Shard(1)])
    assert held(parts.redistribute(placements=[Shard(0), R])) == ((2, 8), (1, 8))
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert held(torch.load(file, weights_only=False)) == held(x)


@pytest.mark.parametrize("fake_values", [False, True], ids=["values", "no values"])
def test_a_training_step(meshes, fake_values):
    line, _ = meshes
    with FakeTensorMode() if fake_values else torch.enable_grad():
        module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(module, line, plan)
        optimizer = torch.optim.AdamW(module.parameters())
        with CommDebugMode() as mode:
            out = module(torch.randn(2, 8))
            out.sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        assert out.shape == (2, 8) and held(module[0].weight.grad) == ((16, 8), (4, 8))
        counts = mode.get_comm_counts()
        assert counts[functional.all_gather_into_tensor] == 2 and counts[functional.reduce_scatter_tensor] == 1


def test_torchs_local_tensor_mode_names_ours(meshes):
    with LocalTensorMode(4), pytest.raises(MeshError, match=r"leave that mode and use shardwise.simulate\(\(4,\)\)"):
        distribute_tensor(torch.randn(8, 4), init_device_mesh("cpu", (4,)), [Shard(0)])
