"""Programs as CUDA graphs: every bit is that of an eager run, whatever happens around them."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from shardwise import Replicate
from shardwise.captures.passes import DEFAULT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("graph") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield shardwise.init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def build(mesh, graph, dropout=0.0, capturable=True, attention=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, 16)
    ).cuda()
    model = shardwise.distribute_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=capturable)

    def step(x, y):
        optimizer.zero_grad()
        out = model(x)
        if attention:
            heads = out.unflatten(-1, (2, 8))[None].transpose(1, 2).bfloat16()
            out = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)[0].float()
        loss = F.mse_loss(out, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return model, optimizer, shardwise.capture(step, passes=(*DEFAULT, "cuda_graph")) if graph else step


def change_learning_rate(number, model, optimizer):
    if number == 12:
        optimizer.param_groups[0]["lr"] = 1e-3


def keep_a_gradient(number, model, optimizer):
    return model[0].weight.grad.to_local() if number % 5 == 2 else None


def forget_gradients(number, model, optimizer):
    if number % 3 == 0:
        optimizer.zero_grad()


def load_a_state(number, model, optimizer):
    if number == 9:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def move_a_parameter(number, model, optimizer):
    if number == 9:
        local = model[0].weight.to_local()
        local.data = local.data.clone() * 2


@pytest.mark.parametrize(
    "meanwhile",
    [None, change_learning_rate, keep_a_gradient, forget_gradients, load_a_state, move_a_parameter],
)
@pytest.mark.parametrize("options", [{}, {"attention": True}, {"dropout": 0.3}, {"capturable": False}])
def test_bits(mesh, meanwhile, options):
    runs = []
    for graph in (False, True):
        model, optimizer, step = build(mesh, graph, **options)
        torch.manual_seed(5)
        losses, kept = [], []
        for number in range(30):
            batch = [shardwise.distribute_tensor(torch.randn(6, 16).cuda(), mesh, [Replicate()]) for _ in range(2)]
            losses.append(step(*batch).full_tensor())
            if meanwhile is not None:
                kept.append(meanwhile(number, model, optimizer))
        kept = [value for value in kept if value is not None]
        runs.append((torch.stack(losses), [p.full_tensor() for p in model.parameters()], kept))
    (losses, parameters, kept), (again, others, also) = runs
    assert torch.equal(losses, again)
    assert all(map(torch.equal, parameters, others)) and all(map(torch.equal, kept, also))
    is_graph = not {"dropout", "capturable"} & set(options)
    assert ("no CUDA graph" not in step.explain()) == is_graph
