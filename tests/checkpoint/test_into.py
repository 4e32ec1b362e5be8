"""What people load into, and what is refused before anything changes."""

import collections

import numpy as np
import pytest
import torch
from torch import nn

from shardwise import Shard, checkpoint, distribute_tensor, simulate
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


def test_tensors_that_share_a_part_of_their_memory(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": torch.ones(3), "b": torch.zeros(3)})
    x = torch.full((6,), 7.0)
    refused(tmp_path / "c", {"a": x[:3], "b": x[1:4]}, "'a' and 'b' share a part of their memory")
    refused(tmp_path / "c", {"a": x[::2], "b": x[2:5]}, "'a' and 'b' share a part of their memory")
    refused(tmp_path / "c", {"a": x.view(torch.int32)[:3].view(torch.float32), "b": x[2:5]}, "share a part")
    assert x.tolist() == [7] * 6
    checkpoint.load(tmp_path / "c", {"a": x[::2], "b": x[1::2]})
    assert x.tolist() == [1, 0] * 3
    checkpoint.save(tmp_path / "d", {"a": torch.arange(12.0).view(3, 4)})
    refused(tmp_path / "d", {"a": torch.zeros(9).as_strided((3, 4), (2, 1))}, "'a': elements of the tensor share memory")
    refused(tmp_path / "d", {"a": torch.zeros(50).as_strided((3, 4), (6, 4))}, "'a': elements of the tensor share memory")
    checkpoint.save(tmp_path / "e", {"a": torch.ones(3, 3)})
    refused(tmp_path / "e", {"a": torch.zeros(9).as_strided((3, 3), (4, 0))}, "'a': elements of the tensor share memory")
    gaps = torch.zeros(4, 9)[:, ::3].T
    checkpoint.load(tmp_path / "d", {"a": gaps})
    assert gaps.equal(torch.arange(12.0).view(3, 4))


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


def test_values_that_nothing_can_replace(tmp_path):
    checkpoint.save(tmp_path / "c", [1, 2])
    numbers = [0, 0, 0]
    checkpoint.load(tmp_path / "c", numbers)
    assert numbers == [1, 2]
    refused(tmp_path / "c", (0, 0), "the value '0' of `into` cannot be replaced in place")
    refused(tmp_path / "c", 0, "`into` cannot be replaced in place")
    checkpoint.save(tmp_path / "t", (torch.ones(1), [1], Pair(1, 2)))
    refused(tmp_path / "t", (torch.zeros(1), [0], Pair(0, 0)), "the value '2.x' of `into`|the value '2.0' of `into`")
    into = [torch.zeros(1), [0], Pair(0, 0)]
    inner = into[1]
    checkpoint.load(tmp_path / "t", into)
    assert inner == [1] and into[1] is inner and into[2] == Pair(1, 2) and type(into[2]) is Pair


def test_tensors_of_any_memory(tmp_path):
    values = {"c": torch.randn(4, dtype=torch.complex64).conj(), "s": torch.arange(6.0)[2:].as_strided((1,), (5,))}
    checkpoint.save(tmp_path / "c", values)
    into = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in values.items()}
    checkpoint.load(tmp_path / "c", into)
    assert all(torch.equal(into[name], x) for name, x in values.items())


@pytest.mark.parametrize("memory", [64 << 20, 100])
def test_a_write_is_a_write_to_autograd(tmp_path, memory):
    """What is read straight into a parameter changes its version: a graph that has kept the old values must not run."""
    checkpoint.save(tmp_path / "c", {"w": torch.ones(3, 4), "d": torch.ones(4, 3)})
    into = {"w": nn.Parameter(torch.zeros(3, 4)), "d": distribute_tensor(torch.zeros(4, 3), simulate(2), [Shard(0)])}
    into["d"].requires_grad_()
    losses = [x.square().sum() for x in into.values()]
    checkpoint.load(tmp_path / "c", into, memory=memory)
    assert into["w"].sum() == 12 and into["d"].full_tensor().sum() == 12
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_files_cannot_have(tmp_path, name):
    with pytest.raises(CheckpointError, match="a tensor cannot be called"):
        checkpoint.save(tmp_path / "c", {name: torch.ones(1)})
    assert not list(tmp_path.iterdir())


class Kept(nn.Module):
    """Its state dict has a copy of one tensor, and an extra state with a tensor and a number."""

    def __init__(self, n):
        super().__init__()
        self.w, self.cache, self.extra = nn.Parameter(torch.full((2,), n)), torch.full((3,), n), (torch.full((2,), n), n)

    def _save_to_state_dict(self, found, prefix, keep):
        super()._save_to_state_dict(found, prefix, keep)
        found[prefix + "cache"] = self.cache.clone()

    def _load_from_state_dict(self, found, prefix, *rest):
        self.cache = found.pop(prefix + "cache").clone()
        super()._load_from_state_dict(found, prefix, *rest)

    def get_extra_state(self):
        return {"t": self.extra[0] * 1, "n": self.extra[1]}

    def set_extra_state(self, found):
        self.extra = found["t"], found["n"]


@pytest.mark.parametrize("format", ["shardwise", "dcp", "pt"])
@pytest.mark.parametrize("inside", [lambda m: {"m": nn.Sequential(m)}, lambda m: m])
def test_modules_whose_state_is_not_their_memory(tmp_path, format, inside):
    checkpoint.save(tmp_path / "c", inside(Kept(3.0)), format=format)
    other = Kept(0.0)
    checkpoint.load(tmp_path / "c", inside(other))
    assert other.w.tolist() == [3, 3] and other.cache.tolist() == [3, 3, 3]
    assert other.extra[0].tolist() == [3, 3] and other.extra[1] == 3


def optimizer_of(*sizes, lr=0.1):
    groups = [{"params": [nn.Parameter(torch.zeros(2)) for _ in range(n)]} for n in sizes]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def test_groups_of_other_sizes(tmp_path):
    checkpoint.save(tmp_path / "c", {"o": optimizer_of(2, 1)})
    refused(tmp_path / "c", {"o": optimizer_of(1, 2)}, "'o.param_groups.0': 2 parameters in the checkpoint, 1 in the opt")
    refused(tmp_path / "c", {"o": optimizer_of(2)}, "'o': 2 groups of parameters")


def test_states_and_rates_of_other_kinds(tmp_path):
    one, other = optimizer_of(1, lr=torch.tensor(0.5)), optimizer_of(1)
    one.param_groups[0]["params"][0].grad = torch.ones(2)
    one.step()
    param = other.param_groups[0]["params"][0]
    other.state[param]["momentum_buffer"] = None
    checkpoint.save(tmp_path / "c", {"o": one})
    checkpoint.load(tmp_path / "c", {"o": other})
    assert other.state[param]["momentum_buffer"].tolist() == [1, 1] and other.param_groups[0]["lr"] == torch.tensor(0.5)


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


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="numbers of that many digits are not to be had here")
def test_a_number_with_more_digits_than_pythons_is_refused(tmp_path):
    checkpoint.save(tmp_path / "c", {"x": np.longdouble(0.5)})
    with pytest.raises(TypeError, match="x: a longdouble cannot be saved"):
        checkpoint.save(tmp_path / "c", {"x": np.longdouble(1) / 3})
