"""Modules and optimizers whose `load_state_dict` does more than put tensors in their places."""

import pytest
import torch
from torch import nn

from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint import CheckpointError
from shardwise.sharded import ShardedOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Hooked(nn.Module):
    """A hook adds a value to its state dict, and another takes it out."""

    def __init__(self, n):
        super().__init__()
        self.w, self.n = nn.Parameter(torch.full((2,), float(n))), n
        self.register_state_dict_post_hook(lambda module, found, prefix, _: found.update({f"{prefix}n": module.n}))
        self.register_load_state_dict_pre_hook(self._take)

    def _take(self, module, found, prefix, *_):
        self.n = found.pop(f"{prefix}n")


class Nested(nn.Module):
    """A state dict of its own form, with copies."""

    def __init__(self, n):
        super().__init__()
        self.w, self.n = nn.Parameter(torch.full((2,), float(n))), n

    def state_dict(self):
        return {"inner": {"w": self.w.detach().clone()}, "n": self.n}

    def load_state_dict(self, found):
        self.w.data.copy_(found["inner"]["w"])
        self.n = found["n"]


class Doubled(nn.Module):
    """What it has beside its parameter follows from it, when it is loaded."""

    def __init__(self, n):
        super().__init__()
        self.w, self.n = nn.Parameter(torch.full((2,), float(n))), n
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "n", int(module.w[0])))


@pytest.mark.parametrize("format", ["shardwise", "dcp", "pt"])
@pytest.mark.parametrize("kind", [Hooked, Nested, Doubled])
def test_modules(tmp_path, kind, format):
    other = kind(0)
    checkpoint.save(tmp_path / "c", {"m": kind(3)}, format=format)
    checkpoint.load(tmp_path / "c", {"m": other})
    assert other.w.tolist() == [3, 3] and other.n == 3


class Counting(torch.optim.SGD):
    """An optimizer with a number of its own."""

    count = 0

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, found):
        self.count = found["count"]
        super().load_state_dict({key: value for key, value in found.items() if key != "count"})


def stepped(kind, steps, **options):
    w = nn.Parameter(distribute_tensor(torch.arange(4.0), simulate(2), [Shard(0)]))
    made = kind([w], lr=0.1, momentum=0.5, **options)
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        made.step()
    return w, made


@pytest.mark.parametrize("format", ["shardwise", "dcp", "pt"])
def test_optimizers(tmp_path, format):
    _, one = stepped(Counting, 2)
    one.count = 5
    checkpoint.save(tmp_path / "c", {"o": one}, format=format)
    w, other = stepped(Counting, 0)
    checkpoint.load(tmp_path / "c", {"o": other})
    momentum = other.state[w]["momentum_buffer"]
    assert other.count == 5 and momentum.placements == w.placements and momentum.full_tensor().tolist() == [1.5] * 4


def test_hooks_of_optimizers(tmp_path):
    _, one = stepped(torch.optim.SGD, 2)
    checkpoint.save(tmp_path / "c", {"o": one})
    w, other = stepped(torch.optim.SGD, 0)
    seen = []
    other.register_load_state_dict_pre_hook(lambda _, found: seen.append(sorted(found)))
    other.register_load_state_dict_post_hook(lambda _: seen.append(len(other.state)))
    checkpoint.load(tmp_path / "c", {"o": other})
    assert seen == [["param_groups", "state"], 1] and w in other.state


def test_optimizers_by_name(tmp_path):
    def made(n):
        w = nn.Parameter(torch.ones(3))
        found = ShardedOptimizer({"w": w}, torch.optim.SGD, lr=0.1, momentum=0.9)
        w.grad = torch.full((3,), n)
        found.step()
        return found

    one, other = made(1.0), made(2.0)
    checkpoint.save(tmp_path / "c", {"o": one})
    checkpoint.load(tmp_path / "c", {"o": other})
    assert other.state_dict()["state"]["w"]["momentum_buffer"].tolist() == [1, 1, 1]


def test_named_parameters_in_another_order(tmp_path):
    def made(*names):
        found = torch.optim.SGD([(name, nn.Parameter(torch.ones(2))) for name in names], lr=0.1, momentum=0.9)
        for param in found.param_groups[0]["params"]:
            param.grad = torch.ones(2)
        found.step()
        return found

    checkpoint.save(tmp_path / "c", {"o": made("a", "b")})
    checkpoint.load(tmp_path / "c", {"o": made("a", "b")})
    checkpoint.load(tmp_path / "c", {"o": made("x", "y")})  # other names: torch goes by the order, too
    with pytest.raises(CheckpointError, match="parameter 0 of the optimizer is 'b', in the checkpoint that is parameter 1"):
        checkpoint.load(tmp_path / "c", {"o": made("b", "a")})
