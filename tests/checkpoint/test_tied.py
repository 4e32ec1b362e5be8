"""Files of others have one of two names that are one tensor in a program: a head and an embedding that share weights."""

import pytest
import torch
from torch import nn

from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.errors import CheckpointError
from tests.workers import device_mesh, run_ranks


class Tied(nn.Module):
    def __init__(self, rows, share=True):
        super().__init__()
        self.embedding = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, rows, bias=False)
        if share:
            self.head.weight = self.embedding.weight


def on_mesh(model, mesh):
    """The model with its parameters cut along dim 0, those that are one still one."""
    made = {p: nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in model.parameters()}
    for module in model.modules():
        module._parameters.update({key: made[p] for key, p in module._parameters.items() if p is not None})
    return model


def load_tied(rank, size, folder, rows):
    model = on_mesh(Tied(rows), device_mesh((size,), ("ranks",)))
    done = checkpoint.load(folder, model)
    return done.missing, model.head.weight.detach().full_tensor()


@pytest.mark.parametrize("rows", [7, 1])
def test_a_name_that_is_one_with_another_is_not_missing(tmp_path, rows):
    weight = torch.randn(rows, 4)
    checkpoint.save(tmp_path / "x", {"embedding.weight": weight}, format="safetensors")
    for model in (Tied(rows), on_mesh(Tied(rows), simulate(3))):
        assert checkpoint.load(tmp_path / "x", model).missing == ()
        got = model.head.weight.detach()
        assert torch.equal(got if type(got) is torch.Tensor else got.full_tensor(), weight)
    for missing, got in run_ranks(load_tied, 2, str(tmp_path / "x"), rows):  # with one row, a rank has nothing
        assert missing == () and torch.equal(got, weight)


def test_a_name_of_its_own_is_missing(tmp_path):
    checkpoint.save(tmp_path / "x", {"embedding.weight": torch.randn(5, 4)}, format="safetensors")
    for model in (Tied(5, share=False), on_mesh(Tied(5, share=False), simulate(3))):
        with pytest.raises(CheckpointError, match="not in the checkpoint: 'head.weight'"):
            checkpoint.load(tmp_path / "x", model)
        assert checkpoint.load(tmp_path / "x", model, strict=False).missing == ("head.weight",)
    empty = {"a": torch.zeros(0), "b": torch.zeros(0)}
    checkpoint.save(tmp_path / "y", {"a": torch.zeros(0)})
    with pytest.raises(CheckpointError, match="not in the checkpoint: 'b'"):
        checkpoint.load(tmp_path / "y", empty)
