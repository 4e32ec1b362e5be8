"""`shardwise checkpoint`: every action on small checkpoints."""

import pytest
import torch

from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path):
    x = torch.arange(40.0).view(5, 8)
    state = {"x": distribute_tensor(x, simulate(3), [Shard(1)]), "y": torch.tensor([1.0, float("nan"), 3.0])}
    checkpoint.save(tmp_path / "step-00000001", state | {"n": 1}, step=1)
    checkpoint.save(tmp_path / "step-00000002", state | {"n": 2}, step=2)
    return tmp_path


def run(capsys, *words):
    code = main(["checkpoint", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_looking(saved, capsys):
    one, two = saved / "step-00000001", saved / "step-00000002"
    code, out = run(capsys, "ls", saved)
    assert code == 0 and "step-00000002" in out and "172 B" in out
    code, out = run(capsys, "show", one)
    assert code == 0 and "[5, 8]" in out and "S(1)" in out and "n = 1" in out and "2 tensors" in out
    assert run(capsys, "verify", one) == (0, f"{one}: every byte is what was written\n")
    code, out = run(capsys, "stats", one)
    assert code == 0 and "39" in out and "19.5" in out
    assert run(capsys, "diff", one, two) == (1, "n: 1 and 2\n1 differences\n")
    data = two / "model.safetensors"
    content = bytearray(data.read_bytes())
    content[-20] ^= 64
    data.write_bytes(content)
    code, out = run(capsys, "verify", two)
    assert code == 1 and "is damaged" in out
    code, out = run(capsys, "ls", saved / "nothing")
    assert code == 1 and "nothing" in out


def test_writing(saved, capsys):
    one = saved / "step-00000001"
    assert run(capsys, "reshard", one, saved / "many", "--max-file-size", "20B")[0] == 0
    assert len(list((saved / "many").glob("*.safetensors"))) == 2
    assert run(capsys, "merge", saved / "many", saved / "merged")[0] == 0
    assert run(capsys, "diff", one, saved / "merged") == (0, "no differences\n")
    assert (one / "model.safetensors").read_bytes() == (saved / "merged" / "model.safetensors").read_bytes()
    assert run(capsys, "convert", one, saved / "x.pt", "--format", "pt")[0] == 0
    assert torch.load(saved / "x.pt", weights_only=True)["n"] == 1
    assert run(capsys, "diff", one, saved / "x.pt") == (0, "no differences\n")
    code, out = run(capsys, "convert", one, saved / "hf", "--format", "safetensors")
    assert code == 1 and "'n' is a value" in out and not (saved / "hf").exists()
    assert run(capsys, "convert", one, saved / "hf", "--format", "safetensors", "--drop-values")[0] == 0
    code, out = run(capsys, "diff", one, saved / "hf")
    assert (code, out) == (1, "n: 1 and nothing\n1 differences\n")
    assert run(capsys, "convert", one, saved / "dcp", "--format", "dcp")[0] == 0
    assert run(capsys, "diff", one, saved / "dcp") == (0, "no differences\n")
    code, out = run(capsys, "merge", one, one)
    assert code == 1 and "the same path" in out


@pytest.mark.parametrize("format", ["dcp", "pt"])
def test_verify_says_that_checksums_of_torch_were_compared(tmp_path, capsys, format):
    path = tmp_path / "c"
    checkpoint.save(path, {"x": torch.ones(5), "n": 1}, format=format)
    code, out = run(capsys, "verify", path)
    assert code == 0 and "every tensor is what was written" in " ".join(out.split())
    old = tmp_path / "old.pt"
    torch.save({"x": torch.ones(5)}, old, _use_new_zipfile_serialization=False)
    code, out = run(capsys, "verify", old)
    assert code == 0 and "1 tensors have no checksums" in " ".join(out.split())


def test_a_file_of_another_save_with_another_dtype(tmp_path):
    for name, dtype in (("a", torch.int32), ("b", torch.float32)):
        checkpoint.save(tmp_path / name, {"x": torch.ones(5, dtype=dtype)}, format="dcp")
    for file in (tmp_path / "b").glob("*.distcp"):
        file.replace(tmp_path / "a" / file.name)
    into = {"x": torch.zeros(5, dtype=torch.int32)}
    with pytest.raises(checkpoint.CheckpointError, match="is torch.float32 of shape .*expected torch.int32"):
        checkpoint.load(tmp_path / "a", into)
