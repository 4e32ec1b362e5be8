"""Parameters under data parallelism that a program computes with outside of the forward in which they are whole: each
rank has a batch of its own there, so that plain tensors are not replicated."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import LayoutError, distribute_tensor, simulate
from shardwise.experimental import implicit_replication
from shardwise.parallel import data_parallel, fully_shard

X = torch.ones(2, 4)
MIXED = "got mixed torch.Tensor and DTensor: a plain tensor of shape .* register_fsdp_forward_method"


@pytest.fixture(params=["fully_shard", "parameters", "none"])
def layer(request):
    mesh, layer = simulate(2), nn.Linear(4, 4)
    return fully_shard(layer, mesh=mesh) if request.param == "fully_shard" else data_parallel(layer, mesh, request.param)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_plain_batch_is_refused(layer, recorded):
    """As the unit of an embedding whose table another module takes for its last layer."""
    with torch.set_grad_enabled(recorded):
        for call in (lambda: F.linear(X, layer.weight), lambda: X @ layer.weight, lambda: layer.weight * X[0]):
            with pytest.raises(LayoutError, match=MIXED):
                call()
    layer(X).sum().backward()
    with pytest.raises(LayoutError, match=MIXED):
        F.linear(X, layer.weight)


def test_writes_numbers_and_what_is_said_to_be_the_same_are_taken(layer):
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
        layer.weight.mul_(torch.tensor(2.0)).add_(torch.ones(4))
    want = 2 * torch.eye(4) + 1
    assert torch.equal(layer.weight.full_tensor(), want)
    assert torch.equal((layer.weight * torch.tensor(3.0)).full_tensor(), want * 3)
    with implicit_replication():
        assert torch.equal((X @ layer.weight).full_tensor(), X @ want)
    x = distribute_tensor(X, layer.weight.device_mesh)
    assert torch.equal((x @ layer.weight).full_tensor(), X @ want)
    layer.load_state_dict({"weight": torch.zeros(4, 4), "bias": torch.ones(4)})
    assert torch.equal(layer.bias.full_tensor(), torch.ones(4))


def test_one_rank_alone_has_the_whole_batch():
    layer = fully_shard(nn.Linear(4, 4), mesh=simulate(1))
    assert (X @ layer.weight).shape == (2, 4)
