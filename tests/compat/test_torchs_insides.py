"""Private attributes of torch's DTensor that programs write to."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwise import DTensor, LayoutError, MeshError, RankTensor, Replicate, Shard, distribute_tensor, simulate
from tests.workers import run_ranks


def table(mesh=None):
    return distribute_tensor(torch.arange(20.0).reshape(10, 2), mesh or simulate(4), [Shard(0)])


def test_the_local_tensor_is_replaced_in_a_simulation():
    x = torch.nn.Parameter(table())
    before = x.detach().clone()
    x._local_tensor = RankTensor([local.double() * 2 for local in x._local_tensor.ranks])
    assert (x.dtype, x.is_leaf, x.requires_grad) == (torch.float64, True, True)
    assert torch.equal(x.full_tensor(), before.full_tensor().double() * 2)
    (x * x).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * x.detach().full_tensor())


def test_a_copy_with_another_local_tensor_leaves_the_first_alone():
    x = table()
    moved = copy.copy(x)
    moved._local_tensor = RankTensor([local + 1 for local in x._local_tensor.ranks])
    assert torch.equal(x.full_tensor(), torch.arange(20.0).reshape(10, 2))
    assert torch.equal(moved.full_tensor(), x.full_tensor() + 1)


@pytest.mark.parametrize("local", [torch.ones(3, 2), torch.ones(10, 2), 3, None, table()])
def test_a_local_tensor_of_another_size_or_kind_is_refused(local):
    x = table()
    with pytest.raises(LayoutError, match="local tensor is|expected a plain tensor"):
        x._local_tensor = local
    assert torch.equal(x.full_tensor(), torch.arange(20.0).reshape(10, 2))


def on_processes(rank, world_size):
    x, memory = table(init_device_mesh("cpu", (world_size,))), torch.full((3 if rank < 3 else 1, 2), float(rank))
    x._local_tensor = memory
    memory += 1  # it is the tensor's own memory
    return x.full_tensor()[:, 0].tolist()


def test_the_local_tensor_is_replaced_on_processes():
    assert run_ranks(on_processes, 4) == [[1.0] * 3 + [2.0] * 3 + [3.0] * 3 + [4.0]] * 4


def test_torchs_switch_of_implicit_replication():
    mesh, dispatcher = simulate((2, 2), axis_names=("dp", "tp")), DTensor._op_dispatcher
    whole = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
    part = distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)])
    with pytest.raises(MeshError, match="implicit_replication"):
        whole + part
    assert not dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        assert dispatcher._allow_implicit_replication
        assert torch.equal((whole + part).full_tensor(), torch.full((4, 4), 2.0))
    finally:
        dispatcher._allow_implicit_replication = False


@pytest.mark.parametrize("name", ["sharding_propagator", "_custom_op_handlers", "dispatch"])
def test_what_works_inside_of_torchs_class_is_not_here(name):
    assert not hasattr(DTensor._op_dispatcher, name)
    with pytest.raises(AttributeError, match=f"_op_dispatcher.{name} works inside of torch's DTensor.*register_sharding"):
        getattr(DTensor._op_dispatcher, name)
