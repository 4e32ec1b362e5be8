"""Programs that are asked to be CUDA graphs: where they cannot be, they run as they are and say why."""

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import Replicate, simulate
from shardwise.captures.passes import DEFAULT

MESH = simulate(1)


def training(optimizer=None, dropout=0.0):
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 4)
    model = shardwise.distribute_module(torch.nn.Sequential(*layers), MESH)
    chosen = optimizer(model.parameters(), lr=0.1) if optimizer else None

    def step(x):
        model.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        if chosen is not None:
            chosen.step()
        return loss.detach()

    return step


def laid_out():
    torch.manual_seed(1)
    return shardwise.distribute_tensor(torch.randn(6, 4), MESH, [Replicate()])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: training(), "tensors that are not on a GPU"),
        (lambda: training(torch.optim.AdamW), "not capturable=True"),
        (lambda: training(torch.optim.SGD), "not capturable=True"),
        (lambda: training(dropout=0.5), "it runs Python"),
        (lambda: lambda x: x.mul_(2).sum(), "it writes to an argument"),
        (lambda: lambda x: x[1:], "a result is in memory that was there before"),
    ],
)
def test_what_is_no_graph_runs_as_it_is(make, reason):
    eager, captured = make(), shardwise.capture(make(), passes=(*DEFAULT, "cuda_graph"))
    given = [laid_out(), laid_out()]
    torch.manual_seed(2)
    want = [eager(given[0]).full_tensor() for _ in range(4)]
    torch.manual_seed(2)
    assert [torch.equal(captured(given[1]).full_tensor(), value) for value in want] == [True] * 4
    assert captured.replays and f"{reason}" in " ".join(captured.explain().split())
