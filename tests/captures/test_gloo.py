"""Captured steps on real processes: bits as in eager runs on every rank, all passes, and ranks that compare programs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import Replicate, Shard, distribute_tensor
from shardwise.errors import RanksDifferError
from shardwise.parallel import data_parallel
from tests.captures.test_training import step_of
from tests.workers import run_ranks

EVERYTHING = ("aliases", "merge", "inverse", "unused", "overlap")


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 14), nn.Linear(14, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


def made(kind, mesh):
    torch.manual_seed(0)
    model = nn.Sequential(Tower(), nn.Dropout(0.1), Tower())
    if kind == "tensor":
        cuts = {"up": {"weight": 0, "bias": 0}, "down": {"weight": 1}}

        def cut(name, layer, mesh):
            for which, dim in cuts.get(name.rpartition(".")[2], {}).items():
                value = getattr(layer, which).detach()
                setattr(layer, which, nn.Parameter(distribute_tensor(value, mesh, [Shard(dim)])))

        return shardwise.distribute_module(model, mesh, cut), [Replicate()]
    return data_parallel(model, mesh, kind, units=lambda name, layer: isinstance(layer, Tower)), [Shard(0)]


def trains(rank, world_size, kind, passes, rows):
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for captured in (False, True):
        model, places = made(kind, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        step = step_of(model, optimizer)
        call = shardwise.capture(step, passes=passes) if captured else step
        torch.manual_seed(5)
        data = [torch.randn(rows, 8) for _ in range(6)]
        losses = [call(distribute_tensor(x, mesh, places)).full_tensor().item() for x in data]
        found.append((losses, [p.to_local().detach().clone() for p in model.parameters()]))
    checked = call.check()
    same = found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))
    return same, call.replays >= 3, call.eager, checked > 0, "begin_" in call.code


@pytest.mark.parametrize("passes", [EVERYTHING[:-1], EVERYTHING], ids=["plain", "overlap"])
@pytest.mark.parametrize("kind", ["tensor", "none", "parameters"])
def test_a_step(kind, passes):
    rows = 2 if "overlap" in passes else 7  # two rows: the third rank holds nothing where they are cut
    for answer in run_ranks(trains, 3, kind, passes, rows):
        assert answer == (True, True, {}, True, "overlap" in passes)


def buckets(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    parts = [shardwise.DTensor.from_local(torch.full((3, i + 1), rank + 1.0), mesh, [shardwise.Partial()]) for i in range(4)]

    def total(*parts):
        return [p.redistribute(placements=[Replicate()]) for p in parts]

    call = shardwise.capture(total, passes=("bucket",))
    found = [[t.to_local() for t in call(*parts)] for _ in range(2)][-1]
    return len(call.programs[0].moves()), [t.unique().tolist() for t in found], [tuple(t.shape) for t in found]


def test_small_sums_travel_together():
    want = (1, [[6.0]] * 4, [(3, i + 1) for i in range(4)])
    assert run_ranks(buckets, 3) == [want] * 3


def differs(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
    call = shardwise.capture(lambda x: x.redistribute(placements=[Replicate()]) * 2)
    call(x)
    call.check()
    if rank:
        call.programs[0].statements.clear()
    try:
        call.check()
    except RanksDifferError as error:
        return str(error)
    finally:
        dist.barrier()


def test_ranks_compare_what_they_wrote_down():
    for text in run_ranks(differs, 2):
        assert "ranks 0 and 1 wrote down different programs" in text and "test_gloo.py" in text and "nothing more" in text
