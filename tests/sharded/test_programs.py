"""What programs written for torch.distributed._shard meet: orders of shards, odd arguments, memory. On processes."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import sharded as S
from tests.sharded.common import chunks, irregular, sharded, values, whole
from tests.workers import run_ranks


def orders(rank, world):
    """Shards in any order: values are found by their metadata; chunks are listed one after the other."""
    value = values(6, 4)
    for tiles in (
        [([0, 0], [1, 4], 0), ([1, 0], [2, 4], 0), ([3, 0], [2, 4], 1), ([5, 0], [1, 4], 1)],
        [([2, 0], [2, 4], 0), ([0, 0], [2, 4], 1), ([4, 0], [2, 4], 0)],  # chunks
        [([0, 0], [6, 1], 0), ([0, 1], [0, 3], 1), ([0, 1], [0, 3], 1), ([0, 1], [6, 3], 1)],  # empty ones, twice
    ):
        known = [S.ShardMetadata(o, s, f"rank:{r}/cpu") for o, s, r in tiles]
        metadata = S.ShardedTensorMetadata(known, value.size(), S.TensorProperties(value.dtype))
        mine = [S.Shard(S._utils.narrow_tensor(value, m).clone(), m) for m in known if m.placement.rank() == rank]
        for shards in (mine, mine[::-1]):
            st = S.ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)
            told = S.init_from_local_shards(shards, 6, 4)
            assert torch.equal(whole(st), value) and torch.equal(whole(told), value)
            assert torch.equal(whole(st.reshard(chunks(1, [1, 0]))), value) and torch.equal(whole(told * 2), value * 2)
            assert any(shard is mine[0] for shard in told.local_shards())
        if isinstance(told.sharding_spec(), S.ChunkShardingSpec):
            assert [m.shard_offsets[0] for m in told.metadata().shards_metadata] == [0, 2, 4]
    twice = [S.Shard(torch.zeros(2, 4), S.ShardMetadata([0, 0], [2, 4], f"rank:{rank}/cpu"))] * 2
    known = [S.ShardMetadata([2 * i, 0], [2, 4], f"rank:{rank}/cpu") for i in range(2)]
    with pytest.raises(ValueError, match="more often than in the metadata"):
        S.ShardedTensor._init_from_local_shards_and_global_metadata(
            twice, S.ShardedTensorMetadata(known, torch.Size([4, 4]), S.TensorProperties())
        )
    return True


def test_shards_in_any_order():
    assert all(run_ranks(orders, 2))


def refused(rank, world):
    spec = chunks(0, range(world))
    st = S.ones(spec, 4, 3)
    for dim in (2, -3):
        for kind in (IndexError, ValueError):
            with pytest.raises(kind, match="must be within the range"):
                st.size(dim)
    with pytest.raises(TypeError, match="process_group: expected a ProcessGroup"):
        S.ones(spec, 4, process_group="world")
    known = spec.build_metadata(torch.Size([2 * world, 3]), S.TensorProperties())
    across = S.Shard(torch.ones(3, 2).t(), known.shards_metadata[rank])
    with pytest.raises(ValueError, match="Only torch.contiguous_format"):
        S.ShardedTensor._init_from_local_shards_and_global_metadata([across], known)
    for call, kind in (
        (lambda: S.rand(spec, 4, dtype=torch.int8), NotImplementedError),
        (lambda: nn.init.uniform_(S.empty(spec, 4, dtype=torch.int64)), NotImplementedError),
        (lambda: nn.init.uniform_(S.empty(spec, 4), 3, 1), RuntimeError),
        (lambda: nn.init.normal_(S.empty(spec, 4), 0, -1), RuntimeError),
        (lambda: nn.init.uniform_(S.empty(spec, 4), None), ValueError),
        (lambda: nn.init.normal_(S.empty(spec, 4), 0.0, None), ValueError),
        (lambda: nn.init.kaiming_uniform_(S.empty(spec, 4, 4), mode=None), ValueError),
        (lambda: nn.init.constant_(S.empty(spec, 4), None), ValueError),
        (lambda: S.full(spec, (4,), None), ValueError),
        (lambda: S.ones(spec, 4, layout=None), TypeError),
        (lambda: S.ones(spec, 4, requires_grad=None), TypeError),
        (lambda: S.ones(spec, 4, pin_memory=1), TypeError),
        (lambda: S.ChunkShardingSpec(0, "rank:0/cpu"), TypeError),
        (lambda: S.sharding_spec._infer_sharding_spec_from_shards_metadata([]), ValueError),
        (lambda: F.embedding(torch.ones(2), st), RuntimeError),
        (lambda: F.embedding_bag(torch.ones(2, 2), st), RuntimeError),
        (lambda: F.embedding(torch.tensor([4]), st), IndexError),
        (lambda: F.embedding(torch.tensor([-1]), st), ValueError),
        (lambda: S._shard_tensor(torch.ones(4), spec, src_rank=9), RuntimeError),
        (lambda: st.to(1.5), TypeError),
        (lambda: st.to(torch.float64, memory_format=torch.channels_last), RuntimeError),
        (lambda: st.untyped_storage(), RuntimeError),
        (lambda: st.storage(), RuntimeError),
    ):
        with pytest.raises(kind):
            call()
    assert S.sharding_spec.api.validate_non_overlapping_shards_metadata([]) is None
    return True


def test_refusals_of_torch():
    assert all(run_ranks(refused, 2))


def places_of_all_kinds(rank, world):
    assert str(S.ChunkShardingSpec(0, [torch.device("cpu")]).placements[0]) == "cpu"
    spec = S.ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cuda:1"])
    if rank:  # all tiles are elsewhere, on devices that this machine lacks
        st = S.zeros(spec, 4, requires_grad=True)
        assert st.requires_grad and st.local_shards() == [] and st.is_leaf
    st = sharded(values(5, 3), irregular((5, 3), range(world), 1))
    there = st.to("meta")
    assert there.is_meta and there.metadata().shards_metadata[0].placement.device() == torch.device("meta")
    for call, dtype in (
        (lambda: st.to("cpu", torch.float64, True, True), torch.float64),
        (lambda: st.to(torch.int8, False, True), torch.int8),
        (lambda: st.to(torch.ones(1), False, True), torch.float32),
        (lambda: st.to(other=torch.ones(1)), torch.float32),
        (lambda: st.to(dtype=torch.float64, copy=True), torch.float64),
    ):
        assert call() is not st and torch.equal(whole(call()), values(5, 3).to(dtype))
    assert st.to("cpu", torch.float64, True) is st and st.to(st) is st
    return True


def test_devices_of_all_kinds():
    assert all(run_ranks(places_of_all_kinds, 2))


def memory(rank, world):
    """Functions that look at a tensor's memory: on the tiles' or on the whole value, never on what is not there."""
    value = values(5, 3)
    for spec in (chunks(0, range(world)), irregular((5, 3), range(world), 2), chunks(0, [1])):
        st = sharded(value, spec)
        assert not st.is_shared() or not st.local_shards()
        assert st.share_memory_() is st and st.is_shared() and all(s.tensor.is_shared() for s in st.local_shards())
        assert torch.equal(torch.from_dlpack(st), value)
        assert st.apply_(lambda x: x + 1) is st and torch.equal(whole(st), value + 1)
        assert torch.equal(whole(pickle.loads(pickle.dumps(st))), value + 1)
    return True


def test_memory():
    assert all(run_ranks(memory, 2))
