"""Parallel styles on ranks that are not in the mesh: the program runs there, on nothing."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Replicate, Shard
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    input_reshard,
    loss_parallel,
    parallelize_module,
)
from tests.workers import run_ranks

MESH_RANKS = [0, 2]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.up, self.down, self.out = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 10)

    def forward(self, ids):
        hidden = self.norm(self.embed(ids))
        return self.out(hidden + self.down(self.up(hidden).relu()))


PLANS = {
    "tensor": lambda: {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "out": ColwiseParallel(output_layouts=Replicate()),
    },
    "sequence": lambda: {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "out": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    },
}
IDS = torch.arange(8).reshape(2, 4)


def trained(net, parallel):
    """The losses of three steps, and what the parameters were after them."""
    opt, losses = torch.optim.AdamW(net.parameters(), lr=0.1), []
    for _ in range(3):
        logits = net(IDS).flatten(0, 1)
        if parallel:
            with loss_parallel():
                loss = F.cross_entropy(logits, IDS.flatten())
                loss.backward()
        else:
            loss = F.cross_entropy(logits, IDS.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append((loss.to_local() if isinstance(loss, DTensor) else loss).detach().item())
    return losses


def trains(rank, world_size, name):
    torch.manual_seed(0)
    net = parallelize_module(Net(), DeviceMesh("cpu", MESH_RANKS), PLANS[name]())
    losses = trained(net, name == "sequence")
    return losses, [p.to_local().numel() for p in net.parameters() if isinstance(p, DTensor)]


def test_training_goes_on_around_ranks_outside():
    torch.manual_seed(0)
    want = trained(Net(), False)
    for name in PLANS:
        for rank, (losses, held) in enumerate(run_ranks(trains, 3, name)):
            if rank in MESH_RANKS:
                torch.testing.assert_close(losses, want, rtol=1e-4, atol=1e-4)
                assert all(held)
            else:
                assert losses == [0.0] * 3 and not any(held)


def prepares(rank, world_size):
    """The shapes and kinds of outputs, where a style hands them over as local tensors and where not."""
    mesh, made = DeviceMesh("cpu", MESH_RANKS), []
    for style in (
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True),
        PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
        PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(0),
            use_local_output=False,
        ),
    ):
        net = parallelize_module(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), mesh, style)
        out = net(torch.ones(4, 8, requires_grad=True))
        out.sum().backward()
        made.append((tuple(out.shape), isinstance(out, DTensor)))
    net = parallelize_module(nn.Linear(8, 4), mesh, ColwiseParallel())
    out = input_reshard(net, mesh, 0)(torch.ones(4, 8, requires_grad=True))
    out.sum().backward()
    return [*made, (tuple(out.shape), isinstance(out, DTensor))]


def test_inputs_and_outputs_keep_global_sizes_outside():
    inside, outside, _ = run_ranks(prepares, 3)
    assert [kind for _, kind in outside] == [True] * 4
    assert inside == [((8, 4), False), ((2, 4), False), ((4, 4), True), ((4, 2), False)]
    assert [shape for shape, _ in outside] == [(8, 4), (4, 4), (4, 4), (4, 4)]
