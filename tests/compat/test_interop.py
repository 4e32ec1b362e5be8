"""shardwise.interop: torch's own DTensors in and out, sharing memory."""

import pytest
import torch
import torch.distributed.tensor as theirs

import shardwise
from shardwise import DTensor, LayoutError, MeshError, Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.interop import from_torch, to_torch
from tests.compat.common import grid, line, seeded
from tests.versions import since_213
from tests.workers import run_ranks

NO_STRIDED = since_213("flattening a cut dim raises")


def there_and_back(tensor, value):
    """A tensor of torch's through ours: values, memory and layout stay."""
    ours = from_torch(tensor)
    assert isinstance(ours, DTensor) and ours.device_mesh == tensor.device_mesh
    assert ours.to_local().data_ptr() == tensor.to_local().data_ptr()
    torch.testing.assert_close(ours.full_tensor(), value)
    back = to_torch(ours)
    assert isinstance(back, theirs.DTensor) and tuple(back.placements) == tuple(tensor.placements)
    assert back.to_local().data_ptr() == tensor.to_local().data_ptr()
    assert back.shape == tensor.shape and back.stride() == tensor.stride()


def plain_layouts(rank, world_size):
    for shape in ((8, 6), (5, 3), (1, 4)):
        value = seeded(*shape)
        for place in (theirs.Shard(0), theirs.Shard(1), theirs.Replicate()):
            there_and_back(theirs.distribute_tensor(value, line(), [place]), value)
        for places in ([theirs.Shard(0), theirs.Shard(0)], [theirs.Shard(1), theirs.Replicate()]):
            there_and_back(theirs.distribute_tensor(value, grid(), places), value)
        for op in ("sum", "avg", "max"):
            tensor = theirs.DTensor.from_local(value + rank, line(), [theirs.Partial(op)], run_check=False)
            torch.testing.assert_close(from_torch(tensor).full_tensor(), tensor.full_tensor())


def strided_layouts(rank, world_size):
    """Flattening a cut dim into one on its left gives torch's strided placement."""
    value = torch.arange(64.0).reshape(4, 2, 8)
    tensor = theirs.distribute_tensor(value, line(), [theirs.Shard(2)]).flatten(1)
    assert type(tensor.placements[0]) is not theirs.Shard
    there_and_back(tensor, value.flatten(1))
    tensor = theirs.distribute_tensor(value, grid(), [theirs.Shard(0), theirs.Shard(2)]).flatten(1)
    there_and_back(tensor, value.flatten(1))
    ours = distribute_tensor(value.flatten(1), grid(), tensor.placements)
    assert torch.equal(ours.to_local(), tensor.to_local())


def gradients(rank, world_size):
    for places in ([theirs.Shard(0)], [theirs.Replicate()]):
        leaf = theirs.distribute_tensor(seeded(5, 4), line(), places).requires_grad_()
        weight = distribute_tensor(seeded(5, 4, seed=1), line(), [Shard(0)])
        (from_torch(leaf) * weight).sum().backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), seeded(5, 4, seed=1))
        mine = distribute_tensor(seeded(5, 4), line(), [shardwise.Shard(0) if places[0].is_shard() else Replicate()])
        mine.requires_grad_()
        (to_torch(mine) * theirs.distribute_tensor(seeded(5, 4, seed=1), line(), places)).sum().backward()
        torch.testing.assert_close(mine.grad.full_tensor(), seeded(5, 4, seed=1))


def what_torch_has_not(rank, world_size):
    sizes = (3, 0, 5, *[0] * (world_size - 3))
    with pytest.raises(LayoutError, match=r"redistribute axis 0 to Shard\(0\)"):
        to_torch(distribute_tensor(seeded(8, 2), line(), [Shard(0, sizes=sizes)]))
    for wrong in (torch.ones(2), distribute_tensor(torch.ones(2), line(), [Replicate()])):
        with pytest.raises(LayoutError, match="torch.distributed.tensor"):
            from_torch(wrong)
    with pytest.raises(LayoutError, match="shardwise.DTensor"):
        to_torch(torch.ones(2))
    with pytest.raises(MeshError, match="simulated"):
        to_torch(distribute_tensor(torch.ones(4), simulate(2), [Partial()]))


@pytest.mark.parametrize("check", [plain_layouts, pytest.param(strided_layouts, marks=NO_STRIDED), gradients, what_torch_has_not])
def test_on_processes(check):
    run_ranks(check, 4)
