"""A run that goes on from a checkpoint on another mesh has the losses of one that was never interrupted."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import Replicate, Shard
from shardwise.checkpoint import Manager

R = Replicate()
# the mesh; how the rows of the first weight and the columns of the second are cut
MESHES = {
    "one": ((1,), [R], [R]),
    "rows": ((4,), [Shard(0)], [Shard(1)]),
    "uneven": ((3,), [Shard(0, sizes=(9, 0, 4))], [Shard(0)]),
    "grid": ((2, 3), [R, Shard(0)], [R, Shard(1)]),
    "both": ((2, 2), [Shard(0), Shard(1)], [Shard(1), Shard(1)]),
}
HALF, STEPS = 2, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)), 0.3))


def build(name, seed):
    shape, up, down = MESHES[name]
    mesh = shardwise.simulate(shape)
    torch.manual_seed(seed)
    model = Net().double()
    for layer, places in ((model.up, up), (model.down, down)):
        layer.weight = nn.Parameter(shardwise.distribute_tensor(layer.weight.detach(), mesh, places))
        layer.bias = nn.Parameter(shardwise.distribute_tensor(layer.bias.detach(), mesh, [R] * len(shape)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    return mesh, {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def losses(mesh, state, steps):
    out = []
    for _ in range(steps):
        rows = torch.randn(5, 6, dtype=torch.float64)
        x = shardwise.distribute_tensor(rows, mesh, [R] * len(mesh.shape))
        loss = (state["model"](x) - x).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        out.append(loss.full_tensor().item())
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The losses of a run on one device, and the first half of a run on each mesh, saved."""
    want, roots = losses(*build("one", 0), STEPS), {}
    for name in MESHES:
        mesh, state = build(name, 0)
        assert losses(mesh, state, HALF) == pytest.approx(want[:HALF], abs=1e-12, rel=0)
        roots[name] = tmp_path_factory.mktemp(name)
        Manager(roots[name], sigterm=False).save(HALF, state)
    return want, roots


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(MESHES, 2)))
def test_on_another_mesh(runs, first, second):
    want, roots = runs
    mesh, state = build(second, seed=1)  # other weights, and another place in the random stream
    assert Manager(roots[first], sigterm=False).restore(state) == HALF
    got = losses(mesh, state, STEPS - HALF)
    assert max(abs(a - b) for a, b in zip(got, want[HALF:], strict=True)) <= 1e-12
