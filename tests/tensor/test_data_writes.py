"""Writes through ``.data``, which autograd does not see. Plain torch computes gradients with the new values, and so do
we, also where a call keeps a moved copy of the tensor; or the backward pass raises."""

import pytest
import torch

from shardwise import Replicate, Shard, distribute_tensor, simulate
from shardwise.testing.fuzz import Program, judge
from shardwise.testing.fuzz.judge import RIGHT
from tests.tensor.common import x
from tests.workers import device_mesh, run_ranks

TWO = """x1 = tensor((4, 3), seed=1, grad=True, at=[Shard(dim=0)])
x2 = tensor((4, 3), seed=2, grad=True, at=[{at}])
x3 = tensor((4, 3), seed=3, at=[{at}])
{call}
{write}
g1 = grads(weigh(y1), [x1, x2])"""
WRITES = [
    "x2.data.mul_(2)",
    "x2.data[1:].mul_(2)",
    "x2[1:].data.mul_(2)",
    "x2.data = x3",
    "x2.data[0] = 5",
    "torch._foreach_mul_([x2.data, x3], 2.0)",
    "x2.data.T.add_(x3.T)",
    "x2.data.detach().view(-1)[2:5].zero_()",
]
LAYOUTS = ["Shard(dim=0)", "Shard(dim=1)", "Replicate()", 'Partial("sum")', "Shard(dim=0, sizes=(0, 4))"]


def program(write, at, call="y1 = x1 * x2", shape=(2,)):
    return Program(shape, tuple(TWO.format(at=at, write=write, call=call).splitlines()))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("at", LAYOUTS)
def test_gradients_are_of_the_new_values(write, at):
    assert str(judge(program(write, at))) == RIGHT


CALLS = [
    "y1 = x1 @ x2.T",
    "y1 = F.linear(x1, x2)",
    "y1 = torch.addcmul(x1, x2, x2)",
    "y1 = torch.atan2(x1, x2)",
    "y1 = torch.linalg.solve(x1.T @ x1, x2.T)",
    "y1 = (x2 * 1).mul_(x1)",
    "y1 = torch._foreach_mul([x1, x1], [x2, x2])[1]",
    "y1 = torch.kron(x1, x2)",
    "y1 = torch.cdist(x1, x2)",
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("at", LAYOUTS[:2])
def test_of_many_calls(call, at):
    found = judge(program("x2.data.mul_(2)", at, call))
    assert str(found) == RIGHT or "written through .data since" in found.message


@pytest.mark.parametrize("at", LAYOUTS)
@pytest.mark.parametrize("call", ["y1 = x1 @ x2.T", "y1 = x1.T * x2.T", "y1 = x1[1:] * x2[1:]", "y1 = x1.T.exp() @ x2"])
def test_of_views_that_are_gone(call, at):
    """The view was moved and nobody has it any more: what the ranks have of it is in the memory of what it is of."""
    found = judge(program("x2.data.mul_(2)", at, call))
    assert str(found) == RIGHT or (at in LAYOUTS[3:] and "written through .data since" in found.message)


@pytest.mark.parametrize("first", [True, False])
def test_a_program_raises_if_it_kept_the_old_values(first):
    """A convolution over a cut dim keeps its operand with its neighbours' edges."""
    mesh = simulate(2)
    leaf = distribute_tensor(x(1, 1, 6), mesh, [Shard(2)]).requires_grad_()
    weight = distribute_tensor(x(1, 1, 3), mesh, [Replicate()]).requires_grad_()
    handed_out = leaf.data if first else None
    out = torch.nn.functional.conv1d(leaf, weight, padding=1)
    handed_out = leaf.data if handed_out is None else handed_out
    handed_out.mul_(2)
    with pytest.raises(RuntimeError, match=r"written through \.data since.*before conv1d"):
        out.sum().backward(retain_graph=True)
    handed_out.div_(2)  # back to what it was
    out.sum().backward()
    plain = x(1, 1, 6), x(1, 1, 3).requires_grad_()
    torch.nn.functional.conv1d(plain[0], plain[1], padding=1).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), plain[1].grad)


def test_gradcheck_writes_and_writes_back():
    one = distribute_tensor(x(4, 3), simulate(2), [Shard(0)]).requires_grad_()
    other = distribute_tensor(x(4, 3), simulate(2), [Shard(1)]).requires_grad_()
    assert torch.autograd.gradcheck(torch.mul, (one, other))


def test_what_nobody_holds_any_more_raises():
    one = distribute_tensor(x(4, 3), simulate(2), [Shard(0)]).requires_grad_()
    other = distribute_tensor(x(4, 3), simulate(2), [Shard(1)])
    data = other.data
    out = one * other
    del other
    data.mul_(2)
    with pytest.raises(RuntimeError, match=r"written through \.data since"):
        out.sum().backward()


def test_before_the_call_and_after_the_backward_pass_it_is_no_matter():
    one = distribute_tensor(x(4, 3), simulate(2), [Shard(0)]).requires_grad_()
    other = distribute_tensor(x(4, 3), simulate(2), [Shard(1)]).requires_grad_()
    for _ in range(2):
        other.data.mul_(2)
        (one * other).sum().backward()
    torch.testing.assert_close(one.grad.full_tensor(), x(4, 3) * 6)


def judged(rank, world_size):
    mesh = device_mesh((world_size,))
    programs = [program(write, at) for write in WRITES[:5] for at in LAYOUTS[:4]]
    return [str(judge(each, mesh)) for each in programs]


def test_on_processes():
    assert run_ranks(judged, 2) == [[RIGHT] * 20] * 2


LOCAL = {
    "all of it": lambda x: x.data.to_local().mul_(2),
    "a part": lambda x: x.data[:, 1:].to_local().mul_(2),
    "torch's private name": lambda x: x.data._local_tensor.mul_(2),
}


@pytest.mark.parametrize("write", LOCAL.values(), ids=LOCAL)
@pytest.mark.parametrize("call", [lambda x: x @ x, lambda x: torch.layer_norm(x, x.shape)], ids=["moved", "program"])
def test_writes_to_local_tensors_of_data_raise(call, write):
    """Autograd does not see them, and other ranks may have written nothing."""
    x = distribute_tensor(torch.rand(4, 4), simulate(2), [Shard(0)]).requires_grad_()
    write(x)
    call(x).sum().backward()
    given, y = x.data.to_local(), call(x)
    for _ in range(70):
        x.data.to_local()
    y.sum().backward()
    y = call(x)
    write(x)
    with pytest.raises(RuntimeError, match="was written through .data since"):
        y.sum().backward()
    assert given.shape == (2, 4)


def write_on_one(rank, world_size):
    x = distribute_tensor(torch.rand(4, 4), device_mesh((world_size,)), [Shard(0)]).requires_grad_()
    given, y = x.data.to_local(), torch.layer_norm(x, x.shape)
    given.mul_(2)
    with pytest.raises(RuntimeError, match="was written through .data since"):
        y.sum().backward()


def test_writes_to_local_tensors_of_data_on_processes():
    run_ranks(write_on_one, 2)
