"""What a plan is remembered by: the values of a call's arguments, never where they lie in memory."""

import numpy
import pytest
import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardwise import DTensor, Partial, Replicate, Shard, cache_info, distribute_tensor, simulate
from shardwise.strategy import registry
from shardwise.strategy.spec import Algorithm
from tests.workers import device_mesh, run_ranks

X = torch.arange(12.0).view(4, 3)


def times_length(x, items):
    if has_torch_function_unary(x):
        return handle_torch_function(times_length, (x,), x, items)
    return x * len(items)


@pytest.fixture
def laid_out(monkeypatch):
    """A tensor, and a rule of `times_length` whose answer depends on what is in `items` when the plan is made."""

    def rule(x, items):
        length = len(items)
        return Algorithm(lambda x, items: x * length)

    find = registry.find
    found = registry.Found(rule, "times_length", False, False, ())
    monkeypatch.setattr(registry, "find", lambda func: found if func is times_length else find(func))
    return distribute_tensor(X, simulate(2), [Shard(0)])


def test_an_argument_without_a_hash_is_planned_anew(laid_out):
    items = set()
    for n in range(4):
        torch.testing.assert_close(times_length(laid_out, items).full_tensor(), X * n)
        torch.testing.assert_close(times_length(laid_out, [items, 2]).full_tensor(), X * 2)
        items.add(n)  # the same object, another value
    for n in range(4):  # other objects, at the same address more often than not
        torch.testing.assert_close(times_length(laid_out, set(range(n))).full_tensor(), X * n)


def test_such_plans_do_not_fill_the_cache(laid_out):
    times_length(laid_out, {1})
    before = cache_info()["plans"].currsize
    for _ in range(5):
        times_length(laid_out, {1})
    assert cache_info()["plans"].currsize == before


def test_numpy_arrays_are_keyed_by_their_values(laid_out):
    rows = numpy.array([0, 3])
    first = laid_out[rows].full_tensor()
    rows[0] = 2
    second, plans = laid_out[rows].full_tensor(), cache_info()["plans"]
    third, warm = laid_out[numpy.array([2, 3])].full_tensor(), cache_info()["plans"]
    torch.testing.assert_close((first, second, third), (X[[0, 3]], X[[2, 3]], X[[2, 3]]))
    assert warm.misses == plans.misses and warm.hits > plans.hits


def bounds_that_are_tensors(rank, world_size):
    """A bound of which each rank has a part of its own: what the ranks say of the call is still the same."""
    mesh = device_mesh((world_size,))
    x = distribute_tensor(X, mesh, [Shard(0)])
    begin = DTensor.from_local(torch.tensor(rank + 1), mesh, [Partial()])  # 1 + 2
    column = distribute_tensor(torch.tensor(1), mesh, [Replicate()])
    torch.testing.assert_close(x[begin:, ::2].full_tensor(), X[3:, ::2])
    torch.testing.assert_close(x[1:, column:].cumsum(0).full_tensor(), X[1:, 1:].cumsum(0))
    written = x.clone()
    written[column:begin, 0] = -1.0
    torch.testing.assert_close(written.full_tensor()[:, 0], torch.tensor([0.0, -1.0, -1.0, 9.0]))


def test_a_bound_of_a_slice_may_be_a_pending_tensor():
    run_ranks(bounds_that_are_tensors, 2)
