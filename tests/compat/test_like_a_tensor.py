"""Operands that are no tensors, and calls that are wrong: what a plain tensor answers."""

import pytest
import torch

from shardwise import Replicate, Shard, distribute_tensor, simulate

ANSWERS = {
    "== None": lambda x: x == None,  # noqa: E711
    "!= None": lambda x: x != None,  # noqa: E711
    "== str": lambda x: x == "a",
    "== list": lambda x: x == [1],
    "== object": lambda x: x == _OBJECT,
    "in a list": lambda x: None in [x],
}
ERRORS = {
    "// str": lambda x: x // "a",
    "+ None": lambda x: x + None,
    "< str": lambda x: x < "a",
    "softmax": lambda x: x.softmax(4),
    "log_softmax": lambda x: x.log_softmax(-3),
    "softmax of a number": lambda x: x.sum().softmax(1),
    "sum": lambda x: x.sum(5),
    "transpose": lambda x: x.transpose(0, 5),
    "index": lambda x: x[10],
}
_OBJECT = object()


@pytest.fixture(params=[Shard(0), Shard(1), Replicate()], ids=str)
def tensor(request):
    return distribute_tensor(torch.ones(5, 4), simulate(4), [request.param])


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name, tensor):
    assert ANSWERS[name](tensor) is ANSWERS[name](torch.ones(5, 4))


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, tensor):
    with pytest.raises(Exception) as plain:  # noqa: PT011
        ERRORS[name](torch.ones(5, 4))
    with pytest.raises(plain.type):
        ERRORS[name](tensor)
