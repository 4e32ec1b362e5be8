"""Files that are whole, each of them, and no checkpoint together; and dtypes that safetensors has no name for."""

import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file

from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BY_MEMORY = [torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def bits(x):
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("format", ["shardwise", "safetensors"])
def test_a_file_of_another_save(tmp_path, format):
    for name, value in (("one", 1.0), ("two", 2.0), ("same", 1.0)):
        state = {"a": torch.full((300,), value), "b": torch.full((300,), value)}
        checkpoint.save(tmp_path / name, state, format=format, max_file_bytes=1000)
    file = "model-00002-of-00002.safetensors"
    into = {"a": torch.zeros(300), "b": torch.zeros(300)}
    shutil.copy(tmp_path / "same" / file, tmp_path / "one" / file)  # the same values: nothing is wrong with it
    checkpoint.load(tmp_path / "one", into)
    assert into["b"].sum() == 300
    shutil.copy(tmp_path / "two" / file, tmp_path / "one" / file)
    into = {"a": torch.zeros(300), "b": torch.zeros(300)}
    with pytest.raises(CheckpointError, match="model-0000.-of-00002.safetensors"):
        checkpoint.load(tmp_path / "one", into)
    assert not into["a"].any() and not into["b"].any()


@pytest.mark.parametrize("dtype", BY_MEMORY, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (), (0, 2), (1,), (2,)])
def test_dtypes_without_a_name_come_back_from_files_alone(tmp_path, dtype, shape):
    x = torch.randint(0, 120, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
    checkpoint.save(tmp_path / "c", {"x": x, "y": torch.ones(3)}, format="safetensors")
    into = {"x": torch.zeros(shape, dtype=dtype), "y": torch.zeros(3)}
    checkpoint.load(tmp_path / "c", into)
    assert torch.equal(bits(into["x"]), bits(x)) if x.numel() else True
    assert torch.equal(bits(load_file(tmp_path / "c" / "model.safetensors")["x"]), bits(x)) if x.numel() else True
    if shape:
        cut = distribute_tensor(torch.zeros(shape, dtype=dtype), simulate(3), [Shard(len(shape) - 1)])
        checkpoint.load(tmp_path / "c", {"x": cut, "y": torch.zeros(3)})
        assert torch.equal(bits(cut.full_tensor()), bits(x)) if x.numel() else True


def test_large_complex_tensors_have_the_same_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.checkpoint.blocks.LEAST_BLOCK", 40)
    x = torch.randn(3, 7, 9, dtype=torch.complex64)
    checkpoint.save(tmp_path / "c", {"x": x}, format="safetensors")
    into = {"x": torch.zeros_like(x)}
    checkpoint.load(tmp_path / "c", into)
    assert torch.equal(into["x"], x)


@pytest.mark.parametrize("damage", ["offset", "size", "gone", "fields"])
def test_metadata_of_others_whose_parts_are_not_the_whole(tmp_path, damage):
    x = distribute_tensor(torch.arange(12.0), simulate(3), [Shard(0)])
    checkpoint.save(tmp_path / "c", {"x": x, "n": 3}, format="dcp")
    path = tmp_path / "c" / ".metadata"
    said = pickle.loads(path.read_bytes())
    chunks = said.state_dict_metadata["x"].chunks
    if damage == "offset":
        chunks[1].offsets = chunks[0].offsets
    elif damage == "size":
        chunks[1].sizes = torch.Size([3])
    elif damage == "gone":
        chunks.pop()
    else:
        for info in said.storage_data.values():
            object.__delattr__(info, "length")
    path.write_bytes(pickle.dumps(said))
    into = {"x": torch.zeros(12), "n": 0}
    with pytest.raises(CheckpointError, match="metadata is damaged"):
        checkpoint.load(tmp_path / "c", into)
    assert not into["x"].any()
