"""Plain tensors meet distributed ones as replicas; strict() refuses them, implicit_replication() lets them."""

import pytest
import torch

from shardwise import Shard, StrictError, distribute_tensor, experimental, implicit_replication, simulate, strict


def test_plain_tensors_under_strict():
    x = distribute_tensor(torch.arange(6.0).view(3, 2), simulate(2), [Shard(0)])
    plain = torch.tensor([10.0, 20.0])
    want = x.full_tensor() + plain
    with strict():
        with pytest.raises(StrictError, match="plain tensor"):
            x + plain
        with implicit_replication():
            with implicit_replication():
                assert torch.equal((x + plain).full_tensor(), want)
            assert torch.equal((x + plain).full_tensor(), want)
        with pytest.raises(StrictError, match="plain tensor"):
            x + plain


def test_other_communication_stays_refused():
    x = distribute_tensor(torch.ones(4, 4), simulate(2), [Shard(0)])
    y = distribute_tensor(torch.ones(4, 4), simulate(2), [Shard(1)])
    with strict(), implicit_replication(), pytest.raises(StrictError, match="would communicate"):
        x + y


def test_names():
    assert experimental.implicit_replication is implicit_replication
