"""Across the families: DTensor and ShardedTensor, without a copy where the tiles agree."""

import pytest
import torch

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor
from shardwise import sharded as S
from shardwise.errors import MeshError
from tests.sharded.common import chunks, grid, irregular, sharded, specs_for, values, whole
from tests.workers import device_mesh, run_ranks


def both_ways(rank, world):
    value = values(6, 5)
    mesh = device_mesh((world,))
    for name, spec in specs_for((6, 5), range(world)).items():
        st = sharded(value, spec, requires_grad=True)
        for where in (None, mesh):
            dt = st.to_dtensor(where)
            assert torch.equal(dt.full_tensor(), value), name
        (dt * dt).sum().full_tensor().backward()
        assert torch.allclose(whole(st.grad), 2 * value), name
        back = dt.to_sharded()
        assert torch.equal(whole(back.detach()), value) and back.requires_grad
    for places in [[Shard(0)], [Shard(1, sizes=[5] + [0] * (world - 1))], [Replicate()], [Partial()]]:
        dt = distribute_tensor(value, mesh, places).requires_grad_()
        st = dt.to_sharded()
        assert torch.allclose(whole(st.detach()), value), places
        (st * st).sum().backward()
        assert torch.allclose(dt.grad.full_tensor(), 2 * value), places
    assert distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]).to_sharded().full_tensor() == 2
    assert whole(distribute_tensor(values(0, 3), mesh, [Shard(0)]).to_sharded()).shape == (0, 3)
    assert torch.equal(sharded(value, irregular((6, 5), range(world), 0)).full_tensor(), value)
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_both_ways(world):
    assert all(run_ranks(both_ways, world))


def no_copy(rank, world):
    value = values(6, 4)
    for spec in (chunks(0, range(world)), chunks(1, range(world)), chunks(0, [3, 1, 0, 2])):
        st = sharded(value, spec)
        with shardwise.debug.ledger() as log:
            dt = st.to_dtensor()
            back = dt.to_sharded()
        assert not list(log) and dt.to_local().data_ptr() == st.local_tensor().data_ptr()
        assert back.local_tensor().data_ptr() == st.local_tensor().data_ptr()
        assert set(back.metadata().shards_metadata) == set(st.metadata().shards_metadata)
    # a grid is a mesh of two axes
    st = sharded(value, grid((6, 4), range(4)))
    with shardwise.debug.ledger() as log:
        dt = st.to_dtensor(device_mesh((2, 2)))
    assert not list(log) and dt.placements == (Shard(0), Shard(1))
    assert dt.to_local().data_ptr() == st.local_tensor().data_ptr()
    assert dt.to_sharded().local_tensor().data_ptr() == st.local_tensor().data_ptr()
    # so are several pieces a rank, with a copy but without communication
    with shardwise.debug.ledger() as log:
        dt = sharded(value, chunks(0, [0, 1, 2, 3, 0, 1])).to_dtensor()
    assert not list(log) and torch.equal(dt.full_tensor(), value)
    assert len(dt.to_sharded().local_shards()) == (2 if rank < 2 else 1)
    # uneven and empty tiles keep their place
    uneven = S.EnumerableShardingSpec(
        [S.ShardMetadata([0, 0], [5, 4], "rank:2/cpu"), S.ShardMetadata([5, 0], [1, 4], "rank:0/cpu")]
    )
    with shardwise.debug.ledger() as log:
        dt = sharded(value, uneven).to_dtensor()
    assert not list(log) and torch.equal(dt.full_tensor(), value)
    return True


def test_no_copy_where_tiles_agree():
    assert all(run_ranks(no_copy, 4))


def placed(rank, world):
    value = values(6, 4)
    st = sharded(value, irregular((6, 4), range(world), 2))
    dt = st.to_dtensor(device_mesh((2, 2)), [Replicate(), Shard(1)])
    assert dt.placements == (Replicate(), Shard(1)) and torch.equal(dt.full_tensor(), value)
    with pytest.raises(MeshError, match="simulated|process group"):
        st.to_dtensor(shardwise.simulate((4,)))
    with pytest.raises(MeshError, match="simulated mesh"):
        distribute_tensor(value, shardwise.simulate((4,)), [Shard(0)]).to_sharded()
    return True


def test_chosen_placements_and_refusals():
    assert all(run_ranks(placed, 4))
