"""Writes through ``.data``, which autograd does not see. Plain torch computes gradients with the new values, and so do
we where the gradient needs the tensor itself and not a moved copy of it."""

import pytest
import torch

from shardwise import Shard, distribute_tensor, simulate
from shardwise.testing.fuzz import Program, judge
from shardwise.testing.fuzz.judge import RIGHT
from tests.tensor.common import x

TWO = """x1 = tensor((4, 3), seed=1, grad=True, at=[Shard(dim=0)])
x2 = tensor((4, 3), seed=2, grad=True, at=[Shard(dim={dim})])
x3 = tensor((4, 3), seed=3, at=[Shard(dim={dim})])
y1 = x1 * x2
{write}
g1 = grads(weigh(y1), [x1, x2])"""
WRITES = ["x2.data.mul_(2)", "x2.data[1:].mul_(2)", "x2[1:].data.mul_(2)", "x2.data = x3"]


def judged(write, dim):
    return judge(Program((2,), tuple(TWO.format(dim=dim, write=write).splitlines())))


@pytest.mark.parametrize("write", WRITES)
def test_what_was_not_moved_is_as_in_torch(write):
    assert str(judged(write, 0)) == RIGHT


def test_before_the_call_and_after_the_backward_pass_it_is_no_matter():
    one = distribute_tensor(x(4, 3), simulate(2), [Shard(0)]).requires_grad_()
    other = distribute_tensor(x(4, 3), simulate(2), [Shard(1)]).requires_grad_()
    for _ in range(2):
        other.data.mul_(2)
        (one * other).sum().backward()
    torch.testing.assert_close(one.grad.full_tensor(), x(4, 3) * 6)
