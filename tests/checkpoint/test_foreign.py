"""Checkpoints of other programs, read and written: torch.distributed.checkpoint, torch.save."""

import json
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError
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
