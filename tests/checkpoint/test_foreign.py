"""Checkpoints of other programs, read and written: torch.distributed.checkpoint, torch.save."""

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
