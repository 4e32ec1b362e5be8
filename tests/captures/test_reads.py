"""What a captured function reads in ways that its code shows only in part: replays see it, or the call runs eagerly."""

import operator

import pytest
import torch

from tests.captures.common import batches, both, laid_out
from tests.captures.test_around import changing

number = 1.0


class Alike:
    """All objects of this class call themselves equal."""

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 1


def attribute_by_a_getter():
    own, scale = Alike(1.0), operator.attrgetter("scale")
    return changing(lambda i: setattr(own, "scale", 1.0 + i // 2), lambda x: x * scale(own))


def default_of_a_keyword():
    def scaled(x, *, scale=1.0):
        return x * scale

    tables = [{"scale": 1.0}, {"scale": 2.0}]
    return changing(lambda i: setattr(scaled, "__kwdefaults__", tables[i // 2]), scaled)


def threads_of_torch():
    def change(i):
        torch.set_num_threads(1 + i // 2)

    return changing(change, lambda x: x * torch.get_num_threads(), left=lambda: [change(0)])


def objects_that_call_themselves_equal():
    pair = [Alike(1.0), Alike(2.0)]
    calls = [lambda f, i=i, x=x: f(laid_out(x), pair[i // 2]) for i, x in enumerate(batches())]
    return lambda x, own: x * own.scale, calls, lambda: ()


@pytest.mark.parametrize(
    "make",
    [attribute_by_a_getter, default_of_a_keyword, threads_of_torch, objects_that_call_themselves_equal],
    ids=lambda make: make.__name__,
)
def test_seen(make):
    captured = both(make)
    assert (captured.captures, captured.replays, captured.eager) == (2, 2, {})


def test_variables_that_no_code_names():
    captured = both(lambda: changing(lambda i: globals().update(number=1.0 + i), lambda x: x * globals()["number"]))
    assert captured.captures == 0 and "calls globals" in next(iter(captured.eager))
