"""fully_shard on a GPU: where parameters, gradients and computations are. Skipped where there is none."""

import copy

import pytest
import torch

from shardwise import RankTensor, simulate
from shardwise.parallel import CPUOffloadPolicy, fully_shard
from tests.parallel.data_net import batch, build, equal, loss_of, one_device
from tests.parallel.shard_net import sharded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def steps(model, mesh):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *(RankTensor([p.cuda() for p in v.chunk(mesh.size())]) for v in batch(step))).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("shape", [(4,), (1,), (2, 3)], ids=str)
def test_moved_to_the_device(shape):
    mesh = simulate(shape, device="cuda")
    model = sharded(build(), mesh)
    assert all(p.device.type == "cuda" for p in model.parameters())
    steps(model, mesh)
    equal(model.cpu(), one_device())


@pytest.mark.parametrize("shape", [(4,), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("on", ["cpu", "cuda"])
@pytest.mark.parametrize("pin", [False, True])
def test_offload(shape, on, pin):
    """Parameters, gradients and state on the CPU; the module computes on the GPU."""
    mesh = simulate(shape, device="cuda")
    model = sharded(build().to(on), mesh, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    assert all(p.device.type == "cpu" for p in model.parameters())
    seen = []
    model.blocks[0].up.register_forward_pre_hook(lambda m, args: seen.append(m.weight.device.type))
    steps(model, mesh)
    assert set(seen) == {"cuda"}
    assert all(p.grad is None or p.grad.device.type == "cpu" for p in model.parameters())
    equal(model, one_device())


def test_from_meta():
    mesh = simulate(4, device="cuda")
    values = copy.deepcopy(build().state_dict())
    for offload in (None, CPUOffloadPolicy()):
        with torch.device("meta"):
            model = build()
        options = {} if offload is None else {"offload_policy": offload}
        sharded(model, mesh, **options)
        model.to_empty(device="cuda" if offload is None else "cpu")
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(values[name].to(p.device))
        equal(steps(model, mesh).cpu(), one_device())


def test_buffers_follow():
    mesh = simulate(2, device="cuda")
    model = fully_shard(torch.nn.Sequential(torch.nn.BatchNorm1d(4)), mesh=mesh)
    assert model[0].running_mean.device.type == "cuda"
