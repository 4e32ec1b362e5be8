"""Making sharded tensors, taking them apart again, and everything that is refused; on processes."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import sharded as S
from shardwise import simulate
from shardwise.sharded.groups import all_gather_objects
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from tests.sharded.common import chunks, irregular, on_one, places, specs_for, values, whole
from tests.sharded.common import sharded as lay
from tests.workers import run_ranks


def groups(world):
    """The world, and a group of some of its ranks (made on all)."""
    return [(None, list(range(world))), (dist.new_group([world - 1, 0]) if world > 2 else None, [0, world - 1])]


# -- factories, metadata, gather ------------------------------------------------------------------------------
def made(rank, world):
    for size in [(7, 3), (1, 4), (0, 3), (5,), (3, 2, 4)]:
        for name, spec in specs_for(size, range(world)).items():
            for dtype in (torch.float32, torch.bool):
                st = S.full(spec, size, 1, dtype=dtype)
                assert st.dtype == dtype and st.size() == torch.Size(size) and st.metadata().size == torch.Size(size)
                assert torch.equal(whole(st), torch.ones(size, dtype=dtype)), (size, name, dtype)
            assert st.sharding_spec() == spec
            mine = [m for m in st.metadata().shards_metadata if m.placement.rank() == rank]
            assert [s.metadata for s in st.local_shards()] == mine
            assert all(list(s.tensor.shape) == s.metadata.shard_sizes for s in st.local_shards())
    assert S.zeros(chunks(0, range(world)), [4, 2]).local_tensor().sum() == 0
    assert S.ones(chunks(0, range(world)), 8, requires_grad=True).local_tensor().requires_grad
    assert S.empty(chunks(0, range(world)), 8, 2).size(-1) == 2
    scalar = S.full(on_one((), world - 1), (), 3.5)
    assert whole(scalar) == 3.5 and len(scalar.local_shards()) == (rank == world - 1)
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_factories_on_every_spec(world):
    assert all(run_ranks(made, world))


def drawn(rank, world):
    """The numbers of a DTensor with the same seed; in torch's stream, those of plain torch."""
    size, results = (9, 5), []
    one = lambda make: lambda n: make(n, device_mesh=simulate(1)).full_tensor()
    for way, pairs in (
        ("philox", ((S.rand, one(shardwise.rand)), (S.randn, one(shardwise.randn)))),
        ("torch", ((S.rand, torch.rand), (S.randn, torch.randn))),
    ):
        with shardwise.random.use(way):
            for make, plain in pairs:
                torch.manual_seed(3)
                want, after = plain(size), torch.rand(1)
                for spec in specs_for(size, range(world)).values():
                    torch.manual_seed(3)
                    results.append(torch.equal(whole(make(spec, size)), want))
                    results.append(torch.equal(after, torch.rand(1)))  # all ranks' generators are where one's would be
    return results


def test_random_values_do_not_depend_on_the_tiles():
    assert all(all(r) for r in run_ranks(drawn, 4))


def gathered(rank, world):
    value = values(6, 4)
    for group, ranks in groups(world):
        if rank not in ranks:
            continue
        members = dist.get_process_group_ranks(group) if group is not None else ranks
        st = lay(value, irregular((6, 4), ranks, 1), group)
        for dst in range(len(members)):
            mine = members[dst] == rank
            out = torch.empty(6, 4, dtype=torch.float64) if mine else None
            assert st.gather(dst=dst, out=out) is None
            assert not mine or torch.equal(out, value)
        mine = members[0] == rank
        for options in ({}, {"dtype": torch.float32}, {"enforce_dtype": True}):
            out = torch.empty(6, 4) if mine else None
            st.gather(0, out, **options)
            assert not mine or torch.equal(out, value.float())
        strided = torch.empty(4, 6, dtype=torch.float64).t() if mine else None
        st.gather(0, strided)
        assert not mine or torch.equal(strided, value)
        wrong = [(None, "must be specified on destination"), (torch.empty(4, 6), "but should be \\(6, 4\\)")]
        for out, text in wrong:  # the others are not left waiting
            if mine:
                with pytest.raises(ValueError, match=text):
                    st.gather(0, out)
            else:
                st.gather(0)
        with pytest.raises(ValueError, match=f"dst={len(members)} is not a rank"):
            st.gather(len(members))
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_gather(world):
    assert all(run_ranks(gathered, world))


# -- from local shards --------------------------------------------------------------------------------------------
def from_shards(rank, world):
    value = values(6, 4)
    for name, spec in specs_for((6, 4), range(world)).items():
        source = lay(value, spec)
        st = S.init_from_local_shards(source.local_shards(), 6, 4)
        assert torch.equal(whole(st), value), name
        assert set(st.metadata().shards_metadata) == set(source.metadata().shards_metadata)
        assert st.local_shards()[0].tensor is source.local_shards()[0].tensor if st.local_shards() else True
        again = S.ShardedTensor._init_from_local_shards_and_global_metadata(
            source.local_shards(), source.metadata(), sharding_spec=spec
        )
        assert again.sharding_spec() == spec and torch.equal(whole(again), value)
        base = S.ShardedTensorBase._init_from_local_shards_and_global_metadata(source.local_shards(), source.metadata())
        assert base.local_shards() is source.local_shards() and base.metadata() == source.metadata()
    spec = chunks(1, range(world))
    local = lay(value, spec).local_tensor()
    st = S.ShardedTensor._init_from_local_tensor(local, spec, (6, 4))
    assert st.local_tensor() is local and torch.equal(whole(st), value)
    assert S.ShardedTensor._init_from_local_shards(st.local_shards(), 6, 4).sharding_spec() == spec
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_from_local_shards(world):
    assert all(run_ranks(from_shards, world))


def sizes_found(rank, world):
    """A None in the size: the shards are rows one after the other, by rank, whatever their offsets say."""
    rows = rank + 1
    for size in ((None, 3), (None, None), (None,)):
        shards = [S.Shard(torch.full((rows, 3), float(rank)), S.ShardMetadata([0, 0], [rows, 3], f"rank:{rank}/cpu"))]
        st = S.init_from_local_shards(shards if rank else [], *size)
        starts = [0, 2, 5][: world - 1]
        assert st.size() == (sum(range(2, world + 1)), 3)
        assert [m.shard_offsets for m in st.metadata().shards_metadata] == [[start, 0] for start in starts]
        assert [s.metadata.shard_offsets for s in st.local_shards()] == ([[starts[rank - 1], 0]] if rank else [])
        found = whole(st)
        assert found[:, 0].tolist() == [float(r) for r in range(1, world) for _ in range(r + 1)]
    with pytest.raises(ValueError, match="global_size"):
        S.init_from_local_shards([], 4 if rank else None)
    return True


def test_sizes_are_found():
    assert all(run_ranks(sizes_found, 3))


def empty_chunks(rank, world):
    """As in torch, an empty chunk starts where a whole one would, which may be behind the end."""
    for n, starts in ((1, [0, 1, 2]), (2, [0, 1, 2]), (4, [0, 2, 4])):
        st = S.ones(chunks(0, range(world)), n, 2)
        assert [m.shard_offsets for m in st.metadata().shards_metadata] == [[start, 0] for start in starts]
        assert torch.equal(whole(st), torch.ones(n, 2))
        again = S.init_from_local_shards(st.local_shards(), n, 2)
        assert again.sharding_spec() == st.sharding_spec()
        st.reshard(chunks(1, range(world)))
        st.reshard(chunks(0, reversed(range(world))))
        assert torch.equal(whole(st), torch.ones(n, 2))
    return True


def test_empty_chunks():
    assert all(run_ranks(empty_chunks, 3))


def raised(call, kind=(ValueError, RuntimeError, TypeError)):
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return None


def mismatches(rank, world):
    """The message every rank gets."""
    one = rank == 1

    def shard(rows=2, offset=None, owner=rank, **options):
        tensor = torch.ones(rows, 3, **options)
        offset = 2 * rank if offset is None else offset
        return S.Shard(tensor, ShardMetadata([offset, 0], [rows, 3], f"rank:{owner}/cpu"))

    init = S.init_from_local_shards
    return {
        "dtype": raised(lambda: init([shard(dtype=torch.float64 if one else torch.float32)], 4, 3)),
        "requires_grad": raised(lambda: init([shard(requires_grad=one)], 4, 3)),
        "size": raised(lambda: init([shard()], 5 if one else 4, 3)),
        "overlap": raised(lambda: init([shard(offset=rank)], 3, 3)),
        "hole": raised(lambda: init([shard(offset=3 * rank)], 5, 3)),
        "outside": raised(lambda: init([shard(offset=3 * rank)], 4, 3)),
        "none": raised(lambda: init([], 4, 3)),
        "one rank's": raised(lambda: init([shard(owner=0)], 4, 3)),
        "unknown": raised(lambda: init([shard(owner=9) if one else shard()], 4, 3)),
        "strided": raised(
            lambda: init([S.Shard(torch.ones(3, 2).t() if one else torch.ones(2, 3), shard().metadata)], 4, 3)
        ),
        "type": raised(lambda: init([torch.ones(2)] if one else [shard()], 4, 3)),
        "two": raised(lambda: init([shard(), shard(offset=4 + 2 * rank, dtype=torch.int32 if one else None)], 8, 3)),
        "dims": raised(lambda: init([shard()], 12)),
    }


def test_mismatches_are_named_on_every_rank():
    first, second = run_ranks(mismatches, 2)
    for texts in (first, second):
        assert "dtype=torch.float32 on rank:0, and dtype=torch.float64 on rank:1" in texts["dtype"]
        assert "requires_grad=False on rank:0, and requires_grad=True on rank:1" in texts["requires_grad"]
        assert "global_size=torch.Size([4, 3]) on rank:0, and global_size=torch.Size([5, 3]) on rank:1" in texts["size"]
        assert "rank:0/cpu) and ShardMetadata(shard_offsets=[1, 0]" in texts["overlap"]
        assert "nobody has the box at [2, 0] of sizes [1, 3]" in texts["hole"]
        assert "offset 3 and length 2 exceeds tensor dim: 4" in texts["outside"]
        assert "no local shards on all ranks" in texts["none"]
        assert "current rank in the process group: 1, local ShardMetadata placement's rank: 0" in texts["one rank's"]
        assert "Global rank 9 does not exist in input process group: [0, 1]" in texts["unknown"]
        assert "contiguous_format memory_format is currently supported" in texts["strided"]
        assert "expected Shards, found a Tensor on rank:1" in texts["type"]
        assert "torch.int32" in texts["two"] and "rank:1" in texts["two"]
        assert "Rank of tensor is 1, but shards rank is 2" in texts["dims"]
    assert first["type"].startswith("TypeError: rank 1:") and second["type"].startswith("TypeError: local")


def refused(rank, world):
    spec, ranks = chunks(0, range(world)), range(world)
    value, make = torch.ones(2, 3), S.ShardedTensor._init_from_local_shards_and_global_metadata
    mine = S.Shard(value, ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu"))

    def metadata(**changes):
        shards = spec.build_metadata(torch.Size([2 * world, 3]), TensorProperties()).shards_metadata
        return ShardedTensorMetadata(shards, torch.Size([2 * world, 3]), TensorProperties(**changes))

    cases = [
        (lambda: make([], metadata()), "local shards (0) does not match number of local shards metadata", "Runtime"),
        (
            lambda: make([mine], metadata(dtype=torch.int8)),
            f"on rank {rank}: tensor property dtype=torch.int8",
            "Value",
        ),
        (lambda: make([mine], metadata(requires_grad=True)), "tensor property requires_grad=True", "Value"),
        (lambda: make([mine], metadata(pin_memory=True)), "tensor property pin_memory=True", "Value"),
        (lambda: make([mine], metadata(layout=torch.sparse_coo)), "Only torch.strided layout", "Value"),
        (lambda: make([mine], metadata(), sharding_spec=chunks(1, ranks)), "does not give the shards", "Value"),
        (lambda: S.empty(spec, 4, layout=torch.sparse_coo), "Only torch.strided layout", "Value"),
        (lambda: S.empty(spec, 4, memory_format=torch.channels_last), "Only torch.contiguous_format", "Value"),
        (lambda: S.empty(chunks(0, [0, 9]), 4), "Global rank 9 does not exist", "Value"),
        (lambda: S.empty(S.ChunkShardingSpec(0, ["cpu"]), 4), "placement cpu names no owner", "Value"),
        (lambda: S.empty(S.ChunkShardingSpec(0, ["w/cpu"]), 4), "RPC framework needs to be initialized", "Runtime"),
        (lambda: S.empty(spec, 4, init_rrefs=True), "RPC Framework needs to be initialized", "Runtime"),
        (lambda: S.empty(spec, 4).remote_shards(), "created with init_rrefs=False", "Runtime"),
        (lambda: S.empty(5, 4), "Expecting ShardingSpec but got", "Value"),
        (lambda: S.empty(spec, "4"), "size has to be a sequence of ints, found: ['4']", "Type"),
        (lambda: S.empty(spec, -4), "[-4] has a negative entry", "Value"),
        (lambda: S.ones(chunks(0, list(ranks) * 2), 8).local_tensor(), "Number of shards: 2", "NotImplemented"),
        (lambda: S.ones(spec, 8).reshard(7), "expected a ShardingSpec, got int", "NotImplemented"),
        (
            lambda: S.ShardedTensor._init_from_local_tensor(torch.ones(3, 2).t(), spec, 4, 3),
            "local_tensor is not a contiguous Tensor",
            "Value",
        ),
    ]
    for call, text, kind in cases:
        error = raised(call, Exception)
        assert error is not None and text in error and error.startswith(kind), (text, error)
    swapped = S.Shard(value, ShardMetadata([2 * (rank ^ 1), 0], [2, 3], f"rank:{rank}/cpu"))
    assert "by the global metadata it holds" in raised(lambda: make([swapped], metadata()))
    return True


def test_refusals():
    assert all(run_ranks(refused, 2))


# -- sub-groups -------------------------------------------------------------------------------------------------------
def in_group(rank, world):
    group = dist.new_group([1, 3])
    spec = chunks(0, [1, 3])
    st = S.ones(spec, 5, 2, process_group=group)  # ranks outside may make it too: they hold nothing
    assert len(st.local_shards()) == (rank in (1, 3))
    if rank in (1, 3):
        assert torch.equal(whole(st), torch.ones(5, 2))
        st.reshard(irregular((5, 2), [1, 3], 0))
        assert torch.equal(whole(st), torch.ones(5, 2))
        assert torch.equal((st * 2 + st).full_tensor(), torch.full((5, 2), 3.0))
        assert torch.equal(st.mm(torch.ones(2, 2)).full_tensor(), torch.full((5, 2), 2.0))
        with pytest.raises(ValueError, match=r"Global rank 0 does not exist in input process group: \[1, 3\]"):
            S.ones(chunks(0, [0, 1]), 5, process_group=group)
    else:
        with pytest.raises(RuntimeError, match="not in the tensor's process group"):
            st.reshard(chunks(1, [1, 3]))
        with pytest.raises(ValueError, match="is not in it"):
            S.init_from_local_shards([], 4, process_group=group)
    return True


def test_subgroups_and_ranks_outside():
    assert all(run_ranks(in_group, 4))


# -- copies and pickles -----------------------------------------------------------------------------------------------
def copied(rank, world):
    value = values(5, 4)
    for spec in (chunks(0, range(world)), irregular((5, 4), range(world), 2), on_one((5, 4), 1)):
        st = lay(value, spec, requires_grad=True)
        twin = copy.deepcopy(st)
        assert twin.requires_grad and twin.is_leaf and twin.sharding_spec() == spec
        with torch.no_grad():
            for shard in twin.local_shards():
                shard.tensor.zero_()
        assert torch.equal(whole(st.detach()), value) and whole(twin.detach()).count_nonzero() == 0
        assert torch.equal(whole(st.clone().detach()), value) and st.clone().requires_grad
        for load in (lambda b: pickle.loads(b.getvalue()), lambda b: torch.load(b, weights_only=True)):
            buffer = io.BytesIO()
            if load.__code__.co_names[0] == "pickle":
                buffer.write(pickle.dumps(st))
            else:
                torch.save(st, buffer)
                buffer.seek(0)
            back = load(buffer)
            assert back.requires_grad and back.metadata() == st.metadata() and back.sharding_spec() == spec
            assert torch.equal(whole(back.detach()), value)
    view = S.ShardedTensor._init_from_local_tensor(torch.ones(1000, 1000)[0, :4], chunks(0, range(world)), 4 * world)
    assert len(pickle.dumps(view)) < 20_000  # not the memory behind it
    param = torch.nn.Parameter(lay(value, chunks(0, range(world))))
    assert isinstance(pickle.loads(pickle.dumps(param)), torch.nn.Parameter)
    assert isinstance(copy.deepcopy(param), torch.nn.Parameter)
    return True


def test_copies_and_pickles():
    assert all(run_ranks(copied, 2))


def loaded_wrongly(rank, world):
    bytes_of = [None] * world
    dist.all_gather_object(bytes_of, pickle.dumps(S.ones(chunks(0, range(world)), 6)))
    group = dist.new_group([1, 2])
    texts = []
    if rank in (1, 2):
        texts.append(raised(lambda: pickle.loads(bytes_of[0])))
        with S.load_with_process_group(group):
            texts.append(raised(lambda: pickle.loads(bytes_of[rank])))
            texts.append(raised(lambda: S.load_with_process_group(group).__enter__()))
        small = pickle.dumps(S.ones(chunks(0, [1, 2]), 6, process_group=group))
        with S.load_with_process_group(group):
            back = pickle.loads(small)
        assert torch.equal(whole(back), torch.ones(6)) and back._process_group is group
    return texts


def test_loading_checks_where_it_was_saved():
    _, first, second, _ = run_ranks(loaded_wrongly, 4)
    assert "Local rank at save time was 0, but at load time was 1" in first[0]
    assert "Local rank at save time was 2, but at load time was 1" in second[1]
    assert "ProcessGroup already set by previous" in first[2]


# -- state dicts ---------------------------------------------------------------------------------------------------------
class Inner(torch.nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.tensor = tensor


class Outer(torch.nn.Module):
    def __init__(self, one, two):
        super().__init__()
        self.tensor, self.inner, self.linear = one, Inner(two), torch.nn.Linear(2, 2)
        self._register_state_dict_hook(S.state_dict_hook)
        self.register_load_state_dict_pre_hook(S.pre_load_state_dict_hook)


def state_dicts(rank, world):
    one, two = lay(values(5, 2), chunks(0, range(world))), lay(values(4, 4), irregular((4, 4), range(world), 3))
    module = Outer(one, two)
    state = module.state_dict()
    assert {"tensor", "inner.tensor", "linear.weight"} <= set(state) and state["tensor"] is one
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    fresh = Outer(None, None)
    result = fresh.load_state_dict(torch.load(buffer, weights_only=False))
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(whole(fresh.tensor), values(5, 2)) and torch.equal(whole(fresh.inner.tensor), values(4, 4))
    assert torch.equal(fresh.linear.weight, module.linear.weight)
    assert set(torch.nn.Linear(2, 2).state_dict()) == {"weight", "bias"}
    # a parameter in other tiles takes the values
    source, target = torch.nn.Linear(4, 5), torch.nn.Linear(4, 5)
    S.shard_parameter(source, "weight", chunks(0, range(world)))
    S.shard_parameter(target, "weight", irregular((5, 4), range(world), 4))
    target.load_state_dict(source.state_dict())
    assert torch.equal(whole(target.weight.detach()), whole(source.weight.detach()))
    return True


def test_state_dicts():
    assert all(run_ranks(state_dicts, 2))


def checkpointed(rank, world, folder):
    """torch.distributed.checkpoint: written from one tiling, read into another."""
    from torch.distributed import checkpoint

    source = {
        "table": lay(values(6, 5), irregular((6, 5), range(world), 1)),
        "row": lay(values(3), chunks(0, range(world))),
    }
    checkpoint.save(source, checkpoint_id=folder)
    target = {
        "table": S.zeros(chunks(1, range(world)), 6, 5, dtype=torch.float64),
        "row": S.zeros(on_one((3,), 1), 3, dtype=torch.float64),
    }
    checkpoint.load(target, checkpoint_id=folder)
    return torch.equal(whole(target["table"]), values(6, 5)) and torch.equal(whole(target["row"]), values(3))


def test_distributed_checkpoints(tmp_path):
    assert all(run_ranks(checkpointed, 2, str(tmp_path)))


# -- devices and dtypes -------------------------------------------------------------------------------------------------
def converted(rank, world):
    st = lay(values(5, 3), irregular((5, 3), range(world), 5))
    assert st.cpu() is st and st.to("cpu") is st and st.to(torch.float64) is st
    assert st.to(torch.float16).dtype == torch.float16 and st.to("cpu", torch.int32).dtype == torch.int32
    twin = st.to(device="cpu", copy=True)
    assert twin is not st and torch.equal(whole(twin), whole(st))
    assert st.to(S.ones(chunks(0, range(world)), 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert st.to(torch.ones(1, dtype=torch.int8)).dtype == torch.int8
    assert [f(st).dtype for f in (torch.Tensor.half, torch.Tensor.int, torch.Tensor.bool)] == [
        torch.float16,
        torch.int32,
        torch.bool,
    ]
    assert st.type(torch.float32).dtype == torch.float32 and st.type() == "torch.DoubleTensor"
    assert st.type_as(torch.ones(1)).dtype == torch.float32 and st.device == torch.device("cpu")
    assert not st.is_meta and not st.is_pinned() and st.is_floating_point() and not st.is_complex()
    assert (st.dim(), st.ndim, st.numel(), len(st), st.shape, st.stride()) == (2, 2, 15, 5, torch.Size([5, 3]), (3, 1))
    assert hash(st) == id(st) and repr(st).startswith("ShardedTensor(shape=")
    with pytest.raises(RuntimeError, match="torch.preserve_format"):
        st.cpu(memory_format=torch.channels_last)
    return True


def test_devices_and_dtypes():
    assert all(run_ranks(converted, 2))


def many(rank, world):
    """Seconds of this process to make, reshard and print a tensor of 10,000 tiles."""
    import time

    rows, spans = 100, []
    owners = places(range(world))

    def spec(turn):
        return S.EnumerableShardingSpec(
            [
                ShardMetadata([2 * i, 2 * j], [2, 2], owners[(i * rows + j + turn * (i % 2)) % world])
                for i in range(rows)
                for j in range(rows)
            ]
        )

    first, second = spec(0), spec(1)
    dist.barrier()
    start = time.process_time()
    S.EnumerableShardingSpec(first.shards)
    spans.append(time.process_time() - start)
    start = time.process_time()
    st = S.zeros(first, 2 * rows, 2 * rows)
    repr(st)
    spans.append(time.process_time() - start)
    start = time.process_time()
    st.reshard(second)
    spans.append(time.process_time() - start)
    return spans


def test_ten_thousand_tiles_are_quick():
    for check, make, move in run_ranks(many, 2):
        assert check < 0.8 and make < 1.6 and move < 6  # the last with copies of 2,500 tiles


def told(rank, world):
    """Short and long, on some ranks or all, and on a part of the ranks."""
    group = dist.new_group([1, 0])
    for lengths in ([0, 1], [2039, 5], [5, 2040], [2041, 9000], [30000, 30000]):
        said = bytes([rank]) * lengths[rank % 2]
        assert all_gather_objects((rank, said), group) == [(r, bytes([r]) * lengths[r]) for r in range(2)]
    return True


def test_what_ranks_tell():
    assert all(run_ranks(told, 2))
