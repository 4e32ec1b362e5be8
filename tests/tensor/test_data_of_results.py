"""A write through ``.data`` to a result that plain torch keeps for its gradient: the gradient is that of plain torch, or
the backward pass raises."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard, distribute_tensor, simulate

OPS = {
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(1),
    "exp": torch.exp,
    "exp_": lambda x: (x * 1).exp_(),
    "cumprod": lambda x: x.cumprod(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "std": lambda x: x.std(0),
    "prod": lambda x: x.prod(0),
    "norm": lambda x: x.norm(dim=0),
    "scatter_reduce_": lambda x: (x * 1).scatter_reduce_(0, torch.tensor([[0, 1, 1, 2, 3, 0]]), x[:1] * 3, "amax"),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}


def gradient(x, op):
    x = x.requires_grad_()
    y = op(x)
    y.data.mul_(2).add_(0.3)
    y.sin().sum().backward()
    return x.grad


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial("sum"), Replicate()], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_gradient(name, placement):
    torch.manual_seed(0)
    plain = torch.rand(4, 6, dtype=torch.float64) + 0.1
    want = gradient(plain.clone(), OPS[name])
    try:
        got = gradient(distribute_tensor(plain, simulate((2,)), [placement]), OPS[name])
    except RuntimeError as error:
        assert "was written through .data since" in str(error)
        assert not placement.is_replicate(), "every rank has what plain torch has"
    else:
        torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)
