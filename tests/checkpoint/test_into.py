"""What people load into, and what is refused before anything changes."""

import collections

import numpy as np
import pytest
import torch
from torch import nn

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError, Manager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Pair = collections.namedtuple("Pair", "x y")


def refused(path, into, text):
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(path, into)


def test_memory_that_cannot_be_written(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": torch.ones(3, 4)})
    still = np.zeros((3, 4), dtype=np.float32)
    still.setflags(write=False)
    refused(tmp_path / "c", {"a": still}, "'a': the numpy array in `into` is read-only")
    assert not still.any()
    refused(tmp_path / "c", {"a": torch.zeros(4).expand(3, 4)}, "'a': elements of the tensor share memory")


@pytest.mark.parametrize("format", ["shardwise", "safetensors"])
def test_two_names_of_one_tensor(tmp_path, format):
    w = torch.zeros(3)
    checkpoint.save(tmp_path / "same", {"a": torch.ones(3), "b": torch.ones(3)}, format=format)
    checkpoint.load(tmp_path / "same", {"a": w, "b": w})
    assert w.tolist() == [1, 1, 1]
    checkpoint.save(tmp_path / "other", {"a": torch.ones(3), "b": torch.zeros(3)}, format=format)
    refused(tmp_path / "other", {"a": w, "b": w}, "'a' and 'b' are one tensor in `into`, but have different values")
    assert w.tolist() == [1, 1, 1]


class Fails:
    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        raise ValueError("not today")


def test_an_object_that_does_not_load(tmp_path):
    checkpoint.save(tmp_path / "c", {"w": torch.ones(2), "s": Fails()})
    refused(tmp_path / "c", {"w": torch.zeros(2), "s": Fails()}, "'s': load_state_dict of Fails raised ValueError: not to.*tensors of `into` have their new values")


def test_kinds_of_containers_stay(tmp_path):
    checkpoint.save(tmp_path / "c", {"p": Pair(1, torch.ones(1)), "o": collections.OrderedDict(a=1)})
    into = {"p": Pair(0, torch.zeros(1)), "o": collections.OrderedDict(a=0)}
    checkpoint.load(tmp_path / "c", into)
    assert type(into["p"]) is Pair and into["p"].x == 1 and into["o"] == collections.OrderedDict(a=1)


def trained(kind, steps):
    torch.manual_seed(steps)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "n": steps}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("format", ["shardwise", "dcp", "pt"])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "LBFGS"])
def test_optimizers_that_have_not_stepped(tmp_path, format, name):
    if (name, format) == ("LBFGS", "dcp"):
        name = "RMSprop"  # LBFGS has empty lists, which a DCP folder cannot say
    kind = getattr(torch.optim, name)
    saved, into = trained(kind, 2), trained(kind, 0)
    checkpoint.save(tmp_path / "c", saved, format=format)
    checkpoint.load(tmp_path / "c", into)
    assert into["n"] == 2
    for name in ("model", "optimizer", "scheduler"):
        assert same(saved[name].state_dict(), into[name].state_dict()), name


def test_files_of_others(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    model, fresh = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    checkpoint.load(tmp_path / "old.pt", fresh)
    assert torch.equal(model.weight, fresh.weight)
    for name in ("x", "y"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    refused(tmp_path, {"a": torch.zeros(2)}, "y.safetensors: tensor 'a' is in x.safetensors too")


def test_paths_and_arguments(tmp_path):
    state = {"w": torch.ones(1)}
    checkpoint.save(tmp_path / "new" / "x.pt", state, format="pt")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.pt"]
    with pytest.raises(CheckpointError, match="is a folder; format='pt' writes one file"):
        checkpoint.save(tmp_path / "new", state, format="pt")
    with pytest.raises(TypeError, match="load: map: expected Map"):
        checkpoint.load(tmp_path / "new" / "x.pt", state, map={"w": "v"})
    with pytest.raises(ValueError, match="step = -5; give a number >= 0"):
        Manager(tmp_path / "run", sigterm=False).save(-5, state)
