"""Paths that are links, and files that are not what their names say."""

import threading
import time

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError, Manager
from shardwise.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def loaded(path):
    into = {"x": torch.zeros(3)}
    checkpoint.load(path, into)
    return into["x"].tolist()


@pytest.mark.parametrize("format", ["shardwise", "dcp"])
def test_a_link_stays_and_leads_to_what_was_saved(tmp_path, format):
    (tmp_path / "far" / "c").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "far" / "c")
    for n in (1, 2):
        checkpoint.save(link, {"x": torch.full((3,), float(n))}, format=format)
        assert link.is_symlink() and loaded(link) == loaded(tmp_path / "far" / "c") == [n] * 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_manager_below_a_link_keeps_the_draft_of_a_save_under_way(tmp_path, monkeypatch):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    may_write, write = threading.Event(), checkpoint.write.write

    def slow(*given):
        assert may_write.wait(20)
        return write(*given)

    monkeypatch.setattr(checkpoint.write, "write", slow)
    first = Manager(tmp_path / "link", async_=True, sigterm=False)
    first.save(1, {"x": torch.ones(3)})
    while not (tmp_path / "far" / ".step-00000001.saving" / "model.safetensors").exists():
        time.sleep(0.01)
    Manager(tmp_path / "link", async_=True, sigterm=False).save(2, {"x": torch.ones(3)})
    may_write.set()
    first.wait()
    assert first.steps() == [1, 2]


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_folder_in_the_place_of_a_file(tmp_path, name):
    checkpoint.save(tmp_path / "c", {"x": torch.ones(3)})
    (tmp_path / "c" / name).unlink()
    (tmp_path / "c" / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        loaded(tmp_path / "c")


def test_text_that_is_nested_too_deeply(tmp_path):
    checkpoint.save(tmp_path / "c", {"x": torch.ones(3)})
    (tmp_path / "c" / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"manifest\.json: the manifest is damaged"):
        loaded(tmp_path / "c")


def test_a_file_of_a_dcp_folder_that_is_missing_is_named(tmp_path):
    checkpoint.save(tmp_path / "c", {"x": torch.ones(3)}, format="dcp")
    (tmp_path / "c" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: tensor 'x', part at \(0,\): the file is missing"):
        loaded(tmp_path / "c")


def test_a_text_is_no_file_of_torch_save(tmp_path):
    (tmp_path / "c").write_text("hello")
    with pytest.raises(CheckpointError, match="holds tensors and values only: KeyError 101"):
        loaded(tmp_path / "c")


def test_a_checkpoint_is_not_replaced_by_a_part_of_it(tmp_path, capsys):
    checkpoint.save(tmp_path / "c", {"x": torch.ones(3), "n": 1})
    (tmp_path / "link").symlink_to(tmp_path / "c")
    for target in ("c", "link"):
        assert main(["checkpoint", "merge", str(tmp_path / "c" / "model.safetensors"), str(tmp_path / target)]) == 1
        assert "FROM is in TO" in capsys.readouterr().err
    assert (tmp_path / "c" / "manifest.json").exists()
