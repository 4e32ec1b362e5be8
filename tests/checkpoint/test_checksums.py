"""Damage is found whatever the format, and a lost manifest is no way around the checksums."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint import CheckpointError, behind, crc, direct
from shardwise.checkpoint.opening import open_source
from shardwise.cli import main


def state(value=None):
    make = (lambda x: x) if value is None else (lambda x: torch.full_like(x, value))
    mesh = simulate(3)
    tensors = {
        "wide": torch.arange(20_011.0, dtype=torch.float64),
        "odd": torch.arange(30_001).to(torch.int8),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(3.5),
    }
    cut = distribute_tensor(make(torch.arange(7 * 2_003.0).view(7, 2_003)), mesh, [Shard(0)])
    return {name: make(tensor) for name, tensor in tensors.items()} | {"cut": cut}


def same(one, other):
    whole = [{name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in found.items()} for found in (one, other)]
    return all(torch.equal(whole[0][name], whole[1][name]) for name in whole[0])


def flipped(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("several", [False, True])
def test_safetensors_files_have_checksums_of_their_own(tmp_path, several):
    checkpoint.save(tmp_path / "c", state(), format="safetensors", max_file_bytes=100_000 if several else 1 << 30)
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert (len(files) > 1) == several
    assert set().union(*(load_file(file) for file in files)) == set(state())  # other programs read them
    into = state(0)
    checkpoint.load(tmp_path / "c", into)
    assert same(into, state())
    assert main(["checkpoint", "verify", str(tmp_path / "c")]) == 0
    for file in files:
        size = file.stat().st_size
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        for at in (9, header // 2, header - 20, header, (header + size) // 2, size - 1):
            kept = file.read_bytes()
            flipped(file, at)
            into = state(0)
            with pytest.raises(CheckpointError):
                checkpoint.load(tmp_path / "c", into)
            assert same(into, state(0))
            file.write_bytes(kept)
    flipped(files[0], files[0].stat().st_size - 1)
    checkpoint.load(tmp_path / "c", state(0), verify="none")


def test_a_lost_manifest_is_told(tmp_path, capsys):
    path = tmp_path / "c"
    checkpoint.save(path, state())
    alone = path / "model.safetensors"
    into = state(0)
    checkpoint.load(alone, into)  # one file is compared with the manifest beside it
    assert same(into, state()) and open_source(alone).checksum("wide", 0) is not None
    shutil.copytree(path, tmp_path / "damaged")
    flipped(tmp_path / "damaged" / "model.safetensors", alone.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="are not what was written"):
        checkpoint.load(tmp_path / "damaged" / "model.safetensors", state(0))
    (path / "manifest.json").unlink()
    for lost in (path, alone):
        into = state(0)
        with pytest.raises(CheckpointError, match=r"manifest.json is missing, which has the checksums.*verify='none'"):
            checkpoint.load(lost, into)
        assert same(into, state(0))
        checkpoint.load(lost, into, verify="none")
        assert same(into, state())
    assert main(["checkpoint", "verify", str(path)]) == 1 and "manifest.json is missing" in capsys.readouterr().err
    assert main(["checkpoint", "merge", str(path), str(tmp_path / "m")]) == 1
    assert main(["checkpoint", "merge", "--unchecked", str(path), str(tmp_path / "m")]) == 0
    checkpoint.load(tmp_path / "m", into := state(0))
    assert same(into, state())


@pytest.mark.parametrize("way", ["direct", "usual", "no such system"])
def test_past_the_page_cache(tmp_path, monkeypatch, way):
    """Short ranges and small buffers: all edges of pages and files are met."""
    monkeypatch.setattr(direct, "LEAST", 1)
    monkeypatch.setattr(behind, "LEAST", 1)
    monkeypatch.setattr(behind, "_BUFFER", 8192)
    monkeypatch.setattr(direct, "is_cached", lambda *_: way == "usual")
    if way == "no such system":
        monkeypatch.setattr(direct, "DIRECT", 0)
        monkeypatch.setattr(behind, "DIRECT", 0)
        crc._quicker.cache_clear()
        monkeypatch.setattr(crc.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    for blocks in (1 << 10, 1 << 14, 1 << 20):
        monkeypatch.setattr("shardwise.checkpoint.blocks.LEAST_BLOCK", blocks)
        path = tmp_path / f"{way} {blocks}"
        checkpoint.save(path, state(), max_file_bytes=100_000)
        into = state(0)
        checkpoint.load(path, into, memory=64 << 20)
        assert same(into, state())
        found = {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}
        assert same(state(), found)
        assert main(["checkpoint", "merge", str(path), str(path) + " merged"]) == 0
        checkpoint.load(str(path) + " merged", into := state(0), verify="full")
        assert same(into, state())
        one, other = (json.loads((p / "manifest.json").read_text())["tensors"] for p in (path, tmp_path / (path.name + " merged")))
        assert all(one[name][5] == other[name][5] for name in one)
    crc._quicker.cache_clear()


def test_odd_states_are_refused_by_name(tmp_path):
    itself = {}
    itself["me"] = itself
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for wrong, text in (
        ({"a.b": 1, "a": {"b": torch.ones(2)}}, "two entries of the state are called 'a.b'"),
        (itself, "nested too deeply, or contains itself"),
        ({"n": nested}, "saving 'n': a nested tensor has no tiles"),
    ):
        with pytest.raises(CheckpointError, match=text):
            checkpoint.save(tmp_path / "c", wrong)
    assert not os.listdir(tmp_path)


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoint.save(tmp_path / "c", state())
    assert not os.listdir(tmp_path)
