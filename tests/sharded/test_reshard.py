"""From any spec to any spec: values, gradients, fewest bytes; on processes."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import sharded as S
from shardwise.comm.messages import backend_for
from shardwise.move.tiles import TilePlan
from shardwise.sharded.tiles import plan_between
from tests.sharded.common import chunks, irregular, on_one, sharded, specs_for, values, whole
from tests.workers import run_ranks


def all_pairs(rank, world, size):
    value = values(*size)
    specs = specs_for(size, range(world))
    for (a, source), (b, target) in itertools.product(specs.items(), specs.items()):
        st = sharded(value, source)
        plan = plan_between(st._tiles, sharded(value, target)._tiles, 8)
        with shardwise.debug.ledger() as log:
            same = st.reshard(target)
        assert same is st and st.sharding_spec() == target
        assert sum(e.bytes for e in log) == plan.bytes_in(rank) == plan.lower_bound(rank), (a, b)
        assert torch.equal(whole(st), value), (a, b)
        assert [s.metadata for s in st.local_shards()] == [
            m for m in st.metadata().shards_metadata if m.placement.rank() == rank
        ]
    return True


@pytest.mark.parametrize("world,size", [(2, (5, 3)), (4, (6, 5)), (4, (3,)), (2, (0, 4)), (2, (2, 3, 4))])
def test_all_pairs(world, size):
    assert all(run_ranks(all_pairs, world, size))


def with_gradients(rank, world):
    value, weight = values(5, 4), values(5, 4, seed=1)
    specs = specs_for((5, 4), range(world))
    for a, b in itertools.product(("chunk 0", "one", "irregular", "grid", "twice", "some"), repeat=2):
        leaf = sharded(value, specs[a], requires_grad=True)
        st = (leaf * 2).reshard(specs[b])  # a rank without tiles takes part in the backward pass
        factor = sharded(weight, specs[b])
        loss = (st * st * factor).sum()
        loss.backward()
        want = 8 * value * weight
        assert torch.allclose(whole(leaf.grad), want), (a, b)
        assert leaf.grad.sharding_spec() == specs[a] and leaf.is_leaf and not st.is_leaf
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_gradients(world):
    assert all(run_ranks(with_gradients, world))


def by_collective(rank, world):
    """What backends without messages of their own do: one all-to-all."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert backend_for(dist.group.WORLD, cpu) == "gloo" and backend_for(dist.group.WORLD, cuda) != "gloo"
    with mock.patch.object(TilePlan, "sends_separately", lambda plan, along: False):
        return all_pairs(rank, world, (6, 5)) and with_gradients(rank, world) and dtypes(rank, world)


def test_by_one_collective():
    assert all(run_ranks(by_collective, 4))


def odd_memory(rank, world):
    """Tiles with holes in their memory or lazily conjugated, and messages that a program sends itself."""
    value, ranks = values(6, 4, dtype=torch.complex128), list(range(world))
    for target in (chunks(0, ranks[::-1]), chunks(1, ranks), on_one((6, 4), 1)):
        st = sharded(value, chunks(0, ranks)).conj()
        assert st.local_tensor().is_conj()
        assert torch.equal(whole(st.reshard(target)), value.conj().resolve_conj())
        tile = S.Shard(value.t().contiguous().t()[3 * rank : 3 * rank + 3], chunk_of(rank, ranks))
        holes = S.ShardedTensor._from_parts(
            [tile], sharded(value, chunks(0, ranks)).metadata(), chunks(0, ranks), dist.group.WORLD
        )
        assert not tile.tensor.is_contiguous() and torch.equal(whole(holes.reshard(target)), value)
    mine = torch.zeros(3)
    coming = dist.irecv(mine, 1 - rank)
    st = sharded(value, chunks(0, ranks)).reshard(chunks(0, ranks[::-1]))
    assert torch.equal(whole(st), value)
    dist.isend(torch.full((3,), float(rank)), 1 - rank).wait()
    coming.wait()
    assert mine.tolist() == [1.0 - rank] * 3
    for out in (torch.empty(4, 6, dtype=torch.complex128).t(), torch.empty(6, 4, dtype=torch.complex64)):
        st.gather(0, out if rank == 0 else None)
        assert rank or torch.equal(out, value.to(out.dtype))
    return True


def chunk_of(rank, ranks):
    return chunks(0, ranks).build_metadata(torch.Size([6, 4]), S.TensorProperties()).shards_metadata[rank]


def test_odd_memory():
    assert all(run_ranks(odd_memory, 2))


def second_order(rank, world):
    value = values(4, 3)
    leaf = sharded(value, irregular((4, 3), range(world), 0), requires_grad=True)
    moved = (leaf * 1.0).reshard(chunks(1, range(world)))
    (first,) = torch.autograd.grad((moved**3).sum(), [leaf], create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), [leaf])
    assert torch.allclose(whole(second), 36 * value**3)
    return True


def test_second_derivatives():
    assert all(run_ranks(second_order, 2))


def parameters(rank, world):
    value = values(5, 4)
    leaf = torch.nn.Parameter(sharded(value, chunks(0, range(world))))
    with torch.no_grad():
        leaf.reshard(irregular((5, 4), range(world), 1))
    assert leaf.is_leaf and leaf.requires_grad and isinstance(leaf, torch.nn.Parameter)
    (leaf * leaf).sum().backward()
    assert torch.allclose(whole(leaf.grad), 2 * value)
    assert leaf.grad.sharding_spec() == leaf.sharding_spec()
    return True


def test_parameters_stay_leaves():
    assert all(run_ranks(parameters, 4))


def dtypes(rank, world):
    for dtype in (torch.bool, torch.int8, torch.complex128, torch.bfloat16, torch.float16, torch.int64):
        value = values(5, 4, dtype=dtype)
        st = sharded(value, chunks(0, range(world))).reshard(irregular((5, 4), range(world), 2))
        assert torch.equal(whole(st), value)
    scalar = sharded(torch.tensor(2.5), on_one((), 0)).reshard(on_one((), world - 1))
    assert whole(scalar) == 2.5
    still = S.ones(chunks(0, range(world)), 5)
    tile = still.local_tensor()
    assert still.reshard(chunks(0, range(world))) is still and still.local_tensor() is tile
    return True


def test_dtypes_and_no_ops():
    assert all(run_ranks(dtypes, 2))


def gather_dtypes(rank, world):
    """enforce_dtype: the values travel in the tensor's dtype, as torch's do, whatever `dtype` says."""
    from torch.distributed._shard import sharded_tensor as theirs
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    value = torch.arange(12.0).view(6, 2) + 1 / 3  # float16 would round it
    torchs = theirs.empty(ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(world)]), 6, 2)
    ours = sharded(value, chunks(0, range(world)))
    torchs.local_shards()[0].tensor.copy_(ours.local_tensor())
    half = value.to(torch.float16).to(torch.float32)
    for options, want in (
        ({}, value),
        ({"dtype": torch.float16}, half),
        ({"enforce_dtype": True}, value),
        ({"enforce_dtype": True, "dtype": torch.float16}, value),
    ):
        for tensor in (torchs, ours):
            out = torch.zeros(6, 2) if rank == 0 else None
            tensor.gather(0, out, **options)
            assert rank or torch.equal(out, want), (type(tensor), options)
    return True


def test_gather_in_a_dtype():
    assert all(run_ranks(gather_dtypes, 2))
