"""Values that describe tiles: checked, comparable, picklable. No processes."""

import pickle
import random
import time

import pytest
import torch

from shardwise.layout.tiles import first_hole, first_overlap
from shardwise.sharded import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded.sharding_spec._internals import (
    check_tensor,
    get_chunked_dim_size,
    get_split_size,
    validate_non_overlapping_shards_metadata,
)
from shardwise.sharded.sharding_spec.api import _infer_sharding_spec_from_shards_metadata
from shardwise.sharded.tiles import _covers, _first_overlap_of_few, boxes_of
from tests.sharded.common import cut_up, places


def test_shard_metadata():
    one = ShardMetadata([0, 5], [5, 5], "rank:1/cpu")
    assert one == ShardMetadata([0, 5], [5, 5], "rank:1/cpu") != ShardMetadata([0, 5], [5, 5], "rank:0/cpu")
    assert hash(one) == hash(ShardMetadata([0, 5], [5, 5], "rank:1/cpu"))
    assert one.placement.rank() == 1 and one.placement.device() == torch.device("cpu")
    assert repr(one) == "ShardMetadata(shard_offsets=[0, 5], shard_sizes=[5, 5], placement=rank:1/cpu)"
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(ValueError, match=r"same number of elements, found 2 and \[5\]"):
        ShardMetadata([0, 0], [5])
    with pytest.raises(ValueError, match=r"shard_offsets should be >=0, found \[0, -1\]"):
        ShardMetadata([0, -1], [5, 5])
    with pytest.raises(ValueError, match=r"shard_sizes should be >= 0, found \[-5\]"):
        ShardMetadata([0], [-5])


def test_shard():
    shard = Shard.from_tensor_and_offsets(torch.ones(2, 3), [4, 0], 1)
    assert shard.metadata == ShardMetadata([4, 0], [2, 3], "rank:1/cpu")
    with pytest.raises(ValueError, match=r"Found shard tensor size: \[2, 3\], metadata.shard_lengths: \[2, 4\]"):
        Shard(torch.ones(2, 3), ShardMetadata([0, 0], [2, 4]))
    with pytest.raises(ValueError, match="device: cpu, local shard metadata placement device: cuda:0"):
        Shard(torch.ones(2), ShardMetadata([0], [2], "rank:0/cuda:0"))
    with pytest.raises(TypeError, match="a shard holds a torch.Tensor, got int"):
        Shard(5, ShardMetadata([0], [2], "rank:0/cpu"))
    with pytest.raises(ValueError, match="same number of elements"):
        Shard.from_tensor_and_offsets(torch.ones(2, 3), [4], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_properties_pickle(dtype, form):
    properties = TensorProperties(dtype, torch.strided, True, form, True)
    metadata = ShardedTensorMetadata([ShardMetadata([0], [4], "rank:0/cpu")], torch.Size([4]), properties)
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_properties_that_do_not_pickle_say_so():
    with pytest.raises(RuntimeError, match="Invalid torch.memory_format: torch.channels_last_3d"):
        pickle.dumps(TensorProperties(memory_format=torch.channels_last_3d))
    assert TensorProperties.create_from_tensor(torch.ones(3, dtype=torch.int16)).dtype == torch.int16


def test_a_pickle_of_today_loads_tomorrow():
    """Bytes written once: the state of the values may not change."""
    state = (torch.float16, torch.strided, True, 1, False)
    fields = TensorProperties(torch.float16, requires_grad=True, memory_format=torch.channels_last).__getstate__()
    assert (fields[0], fields[1], fields[2], fields[3].value, fields[4]) == state
    assert ShardMetadata.__module__ == "shardwise.sharded.metadata"


def test_chunks():
    spec = ChunkShardingSpec(-1, places(range(3)))
    shards = spec.build_metadata(torch.Size([2, 7]), TensorProperties()).shards_metadata
    assert [(s.shard_offsets, s.shard_sizes) for s in shards] == [([0, 0], [2, 3]), ([0, 3], [2, 3]), ([0, 6], [2, 1])]
    short = ChunkShardingSpec(0, places(range(4))).build_metadata(torch.Size([2]), TensorProperties())
    assert [s.shard_sizes for s in short.shards_metadata] == [[1], [1], [0], [0]]
    assert spec == ChunkShardingSpec(-1, places(range(3))) != ChunkShardingSpec(0, places(range(3)))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert [get_chunked_dim_size(7, get_split_size(7, 3), i) for i in range(4)] == [3, 3, 1, 0]


def test_bad_chunks_are_named():
    with pytest.raises(ValueError, match=r"Invalid sharding dim: 2 for a tensor of size \[2, 7\]"):
        ChunkShardingSpec(2, places([0])).build_metadata(torch.Size([2, 7]), TensorProperties())
    with pytest.raises(NotImplementedError, match="named dimension yet! Got dim='N'"):
        ChunkShardingSpec("N", places([0]))
    with pytest.raises(ValueError, match="needs to be an integer, found: None"):
        ChunkShardingSpec(None, places([0]))
    with pytest.raises(TypeError, match="Invalid type for remote_device: <class 'int'>"):
        ChunkShardingSpec(0, [5])
    with pytest.raises(ValueError, match="Could not parse remote_device: rank:x/cpu"):
        ChunkShardingSpec(0, ["rank:x/cpu"])
    with pytest.raises(ValueError, match="the list is empty"):
        ChunkShardingSpec(0, []).build_metadata(torch.Size([2]), TensorProperties())


def test_enumerated_tiles():
    tiles = [ShardMetadata([0, 0], [5, 5], "rank:0/cpu"), ShardMetadata([0, 5], [5, 5], "rank:1/cpu")]
    spec = EnumerableShardingSpec(tiles)
    assert spec.build_metadata(torch.Size([5, 10]), TensorProperties()).shards_metadata == tiles
    with pytest.raises(ValueError, match="exceeds tensor dim: 4 for shard"):
        spec.build_metadata(torch.Size([4, 10]), TensorProperties())
    with pytest.raises(
        ValueError, match=r"Total volume of shards: 50 does not match tensor volume: 60.*at \[5, 0\] of"
    ):
        spec.build_metadata(torch.Size([6, 10]), TensorProperties())
    with pytest.raises(ValueError, match="Rank of tensor is 1, but shards rank is 2"):
        spec.build_metadata(torch.Size([50]), TensorProperties())
    with pytest.raises(ValueError, match=r"Shards .*\[0, 0\].* and .*\[0, 4\].* overlap"):
        EnumerableShardingSpec([tiles[0], ShardMetadata([0, 4], [5, 5], "rank:1/cpu")])
    with pytest.raises(ValueError, match="inconsistent ranks for shards: 2 and 1"):
        EnumerableShardingSpec([tiles[0], ShardMetadata([4], [5], "rank:1/cpu")])
    with pytest.raises(ValueError, match="Empty shard list provided"):
        EnumerableShardingSpec([])
    validate_non_overlapping_shards_metadata(tiles)
    check_tensor(tiles, torch.Size([5, 10]))


def test_a_hole_is_named():
    tiles = [([0, 0], [2, 4]), ([2, 0], [2, 1]), ([2, 3], [2, 1])]
    spec = EnumerableShardingSpec([ShardMetadata(o, s, "rank:0/cpu") for o, s in tiles])
    with pytest.raises(ValueError, match=r"nobody has the box at \[2, 1\] of sizes \[2, 2\]"):
        spec.build_metadata(torch.Size([4, 4]), TensorProperties())


def test_the_spec_behind_tiles():
    chunk = ChunkShardingSpec(1, places([2, 0, 1]))
    tiles = chunk.build_metadata(torch.Size([3, 8]), TensorProperties()).shards_metadata
    assert _infer_sharding_spec_from_shards_metadata(tiles) == chunk
    assert _infer_sharding_spec_from_shards_metadata(tiles[::-1]) == chunk
    odd = [ShardMetadata([0], [2], "rank:0/cpu"), ShardMetadata([2], [3], "rank:1/cpu")]
    assert _infer_sharding_spec_from_shards_metadata(odd) == EnumerableShardingSpec(odd)


def test_a_spec_of_ones_own():
    class Halves(ShardingSpec):
        def build_metadata(self, tensor_sizes, tensor_properties):
            spec = ChunkShardingSpec(0, places([0, 1]))
            return spec.build_metadata(tensor_sizes, tensor_properties)

    assert len(Halves().build_metadata(torch.Size([4]), TensorProperties()).shards_metadata) == 2
    assert DevicePlacementSpec("rank:0/cpu").device.rank() == 0
    with pytest.raises(TypeError, match="Invalid type for remote_device"):
        DevicePlacementSpec(4)


def test_printing_ten_thousand_tiles_is_short_and_quick():
    tiles = ChunkShardingSpec(0, places(range(4)) * 2500).build_metadata(torch.Size([20000, 8]), TensorProperties())
    start = time.process_time()
    text = repr(tiles)
    assert time.process_time() - start < 0.2 and len(text) < 20_000 and "9936 more" in text


@pytest.mark.parametrize("seed", range(30))
def test_few_tiles_are_checked_as_many_are(seed):
    """Up to some number of tiles all pairs are looked at, above it arrays are swept: the same answers."""
    generator = random.Random(seed)
    boxes = cut_up([6, 5], 7, generator)
    if seed % 3 == 1:
        boxes.append(([generator.randrange(5), generator.randrange(4)], [1, generator.randrange(2)]))
    if seed % 3 == 2:
        boxes.pop(generator.randrange(len(boxes)))
    tiles = [ShardMetadata(offsets, sizes, "rank:0/cpu") for offsets, sizes in boxes]
    swept = first_overlap(boxes_of(tiles)) is None
    assert (_first_overlap_of_few(tiles) is None) == swept
    if swept:
        assert _covers(tiles, (6, 5)) == (first_hole(boxes_of(tiles), (6, 5)) is None)
