"""Float32 inside of a float64 model: `in_double` takes it out, on plain tensors and DTensors."""

import torch
import torch.nn.functional as F

from shardwise import Shard, distribute_tensor, simulate
from shardwise.testing import in_double


def rounds(x):
    y = x.to(torch.float32) * 3 + x.float().softmax(-1, dtype=torch.float32)
    return (y + torch.zeros(y.shape, dtype=torch.float32) + F.log_softmax(x, -1, dtype=torch.float32)).to(x.dtype)


def test_what_rounds_does_so_no_more():
    x = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    laid = distribute_tensor(x.detach(), simulate((2,)), [Shard(0)]).requires_grad_()
    exact = x * 3 + x.softmax(-1) + x.log_softmax(-1)
    assert (rounds(x) - exact).abs().max() > 1e-9
    with in_double():
        for value in (x, laid):
            result = rounds(value)
            result.square().sum().backward()
            assert result.dtype == torch.float64
            assert torch.equal(getattr(result, "full_tensor", lambda: result)(), exact)  # noqa: B023
    assert torch.allclose(laid.grad.full_tensor(), x.grad, rtol=0, atol=1e-14)
    assert rounds(x).ne(exact).any() and x.float().dtype == torch.float32
