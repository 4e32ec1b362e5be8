"""Checkpoints of other programs, read and written: torch.distributed.checkpoint, torch.save."""

import errno
import json
import os
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from shardwise import Replicate, Shard, checkpoint, distribute_tensor
from shardwise.checkpoint import CheckpointError, Map, blocks, transpose
from shardwise.checkpoint.mapped_source import MappedSource
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.rewrite import rewrite
from tests.checkpoint.test_protocol import LAYOUTS, check, device_mesh, state, targets
from tests.workers import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage.*")


def from_dcp(rank, world_size, path):
    dcp.save(state(device_mesh), checkpoint_id=path)
    loaded = targets(device_mesh, 2)
    checkpoint.load(path, loaded)
    check(loaded)
    checkpoint.save(f"{path}-ours", state(device_mesh), format="dcp")
    again = targets(device_mesh, 3)
    dcp.load(again, checkpoint_id=f"{path}-ours")
    check(again)


def test_dcp_on_processes(tmp_path):
    run_ranks(from_dcp, 4, tmp_path / "c")
    into = {name: torch.zeros(7, 10) for name in LAYOUTS}
    checkpoint.load(tmp_path / "c", into, strict=False)
    check(into)


def on_other_ranks(rank, world_size, path, format):
    """Tensors that the first rank has nothing of, and a name that one rank alone has."""
    far, all_ = DeviceMesh("cpu", [3, 1]), torch.arange(10.0).view(5, 2)
    tensors = {"far": distribute_tensor(all_, far, [Shard(0)], src_data_rank=None), "count": torch.tensor(7)}
    tensors["one"] = distribute_tensor(torch.tensor(3), DeviceMesh("cpu", [2]), [Replicate()], src_data_rank=None)
    tensors["small"] = distribute_tensor(all_.to(torch.float8_e4m3fn), far, [Shard(1)], src_data_rank=None)
    tensors |= {f"rank {rank}": torch.full((2,), rank), "n": 4} if rank == 2 else {"n": 4}
    checkpoint.save(path, tensors, format=format)
    with pytest.raises(CheckpointError, match="'n' differs between ranks"):
        checkpoint.save(path, {"n": rank}, format=format)
    with pytest.raises(CheckpointError, match="'x' differs between ranks"):
        checkpoint.save(path, {"x": torch.full((2,), rank)}, format=format)


@pytest.mark.parametrize("format", ["dcp", "pt"])
def test_what_the_first_rank_does_not_have(tmp_path, format):
    run_ranks(on_other_ranks, 4, tmp_path / "c", format)
    into = {"far": torch.zeros(5, 2), "one": torch.tensor(0), "count": torch.tensor(0), "n": 0}
    into |= {"rank 2": torch.zeros(2, dtype=torch.int64), "small": torch.empty(5, 2, dtype=torch.float8_e4m3fn)}
    checkpoint.load(tmp_path / "c", into)
    assert into["far"].equal(torch.arange(10.0).view(5, 2)) and into["rank 2"].tolist() == [2, 2]
    assert into["small"].float().equal(into["far"])
    assert (into["one"], into["count"], into["n"]) == (3, 7, 4)


@pytest.mark.parametrize("format", ["dcp", "pt"])
def test_there_and_back(tmp_path, format):
    saved = {"a": torch.randn(3, 4), "n": 5, "name": "run", "x": 1.5}
    checkpoint.save(tmp_path / "c", saved, format=format)
    into = {"a": torch.zeros(3, 4), "n": 0, "name": "", "x": 0.0}
    checkpoint.load(tmp_path / "c", into)
    assert torch.equal(into.pop("a"), saved.pop("a")) and into == saved
    rewrite(open_source(tmp_path / "c"), tmp_path / "ours", most=1 << 30)
    assert len(open_source(tmp_path / "ours").entries) == 1


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_no_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="posix.mkdir is not what the metadata"):
        checkpoint.load(tmp_path / "c", {})
    torch.save({"x": Evil()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="x.pt: no file of torch.save that holds tensors and values only"):
        checkpoint.load(tmp_path / "x.pt", {})
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("format", ["dcp", "pt"])
def test_a_flipped_bit_in_files_of_torch(tmp_path, format):
    path = tmp_path / "c"
    checkpoint.save(path, {"a": torch.ones(50_000)}, format=format)
    file = path if format == "pt" else path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    into = {"a": torch.zeros(50_000)}
    with pytest.raises(CheckpointError, match="not what was written: the file is damaged"):
        checkpoint.load(path, into)
    assert not into["a"].any()
    checkpoint.load(path, into, verify="none")
    assert int((into["a"] != 1).sum()) == 1


@pytest.mark.parametrize(
    "ranges, size, text",
    [
        ([(0, 3), (1, 4)], 4, "'b' begins at byte .*, the one before it ends at"),
        ([(0, 3), (4, 7)], 7, "'b' begins at byte"),
        ([(0, 3), (3, 6)], 8, "2 bytes follow the last tensor"),
        ([(0, 3), (3, 6)], 5, "cut short: tensor 'b'"),
    ],
)
def test_headers_that_make_no_sense(tmp_path, ranges, size, text):
    said = {name: {"dtype": "U8", "shape": [3], "data_offsets": at} for name, at in zip("ab", ranges)}
    header = json.dumps(said).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "x.safetensors", {name: torch.zeros(3, dtype=torch.uint8) for name in "ab"})


def test_a_disk_that_dcp_cannot_write_to(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="could not be written: rank 0: .*No space left"):
        checkpoint.save(tmp_path / "c", {"a": torch.ones(2)}, format="dcp")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("can", [True, False])
def test_from_file_to_file(tmp_path, monkeypatch, can):
    """Blocks that are the same on both sides are copied by the system where it can; damage is found all the same."""
    monkeypatch.setattr(blocks, "LEAST_BLOCK", 64)
    if not can:

        def no(*_):
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(os, "copy_file_range", no)
    state = {"a": torch.randn(7, 9), "e": torch.zeros(0), "c": torch.randn(5, dtype=torch.complex64), "n": 3, "b": torch.randn(40)}
    checkpoint.save(tmp_path / "parts", state, max_file_bytes=200, step=2)
    rewrite(open_source(tmp_path / "parts"), tmp_path / "merged", most=1 << 40)
    rewrite(MappedSource(open_source(tmp_path / "merged"), Map([transpose("a")])), tmp_path / "turned", most=100)
    for name, turned in (("merged", False), ("turned", True)):
        into = {k: x if k == "n" else torch.zeros(x.t().shape if turned and k == "a" else x.shape, dtype=x.dtype) for k, x in state.items()}
        assert checkpoint.load(tmp_path / name, into, verify="full").step == 2
        into["a"] = into["a"].t() if turned else into["a"]
        assert all(torch.equal(into[k], state[k]) for k in "aecb")
    file = tmp_path / "merged" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-70] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="not what was written"):
        rewrite(open_source(tmp_path / "merged"), tmp_path / "again", most=100)
    assert not (tmp_path / "again").exists() and not (tmp_path / ".again.saving").exists()


def test_numpy_arrays_in_a_file_of_torch_save_can_be_loaded_again(tmp_path):
    checkpoint.save(tmp_path / "x.pt", {"a": np.arange(3.0), "n": [1, {"b": np.ones((2, 2), dtype=np.int32)}]}, format="pt")
    into = {"a": np.zeros(3), "n": [0, {"b": np.zeros((2, 2), dtype=np.int32)}]}
    checkpoint.load(tmp_path / "x.pt", into)
    assert into["a"].tolist() == [0.0, 1.0, 2.0] and into["n"][0] == 1 and into["n"][1]["b"].all()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full disk to try")
def test_a_full_disk_says_so_in_a_file_of_torch_save(tmp_path):
    (tmp_path / ".x.pt.saving").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="x.pt: could not be written: .*(No space left|is the disk full)"):
        checkpoint.save(tmp_path / "x.pt", {"a": torch.ones(100_000)}, format="pt")
    assert os.path.exists("/dev/full") and not (tmp_path / "x.pt").exists()


def test_formats_that_are_written_at_once_have_a_handle_too(tmp_path):
    handle = checkpoint.save(tmp_path / "x.pt", {"w": torch.ones(2)}, format="pt", async_=True)
    assert handle.done() and (tmp_path / "x.pt").exists()
    handle.wait()
    with pytest.raises(TypeError, match="save: async_: expected bool, got 1"):
        checkpoint.save(tmp_path / "y", {"w": torch.ones(2)}, async_=1)
