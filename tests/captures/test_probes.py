"""What is around a function changes in ways that no name in its code shows: every call must notice."""

import array
import builtins
import contextvars
import ctypes
import threading
import types
import weakref

import pytest
import torch
from torch import nn

import shardwise
from tests.captures.common import batches, both, laid_out, module

DATA = [laid_out(x) for x in batches(5)]


class Hidden:
    """Attributes on the class, by a descriptor, by `__getattr__`, by an operator."""

    class Entry:
        def __get__(self, owner, kind):
            return owner.values[0]

    scale, entry = 2.0, Entry()

    def __init__(self):
        self.values, self.factor = [2.0], 2.0

    def __getattr__(self, name):
        return 2.0

    def __mul__(self, x):
        return x * self.factor


def on_the_class():
    hidden = Hidden()
    return lambda x: x * hidden.scale, lambda: setattr(hidden, "scale", 5.0)


def by_a_descriptor():
    hidden = Hidden()
    return lambda x: x * hidden.entry, lambda: hidden.values.__setitem__(0, 5.0)


def by_getattr():
    hidden = Hidden()
    return lambda x: x * hidden.nowhere, lambda: setattr(hidden, "nowhere", 5.0)


def by_an_operator():
    hidden = Hidden()
    return lambda x: hidden * x, lambda: setattr(hidden, "factor", 5.0)


def of_the_function():
    def func(x):
        return x * func.scale

    func.scale = 2.0
    return func, lambda: setattr(func, "scale", 5.0)


def behind_a_weak_reference():
    holder = Hidden()
    reference = weakref.ref(holder)
    return lambda x: x * reference().factor, lambda: setattr(holder, "factor", 5.0)


def of_the_context():
    variable = contextvars.ContextVar("scale", default=2.0)
    return lambda x: x * variable.get(), lambda: variable.set(5.0)


def behind_a_proxy():
    table = {"scale": 2.0}
    proxy = types.MappingProxyType(table)
    return lambda x: x * proxy["scale"], lambda: table.update(scale=5.0)


def in_a_bytearray():
    memory = bytearray(b"\x02")
    return lambda x: x * memory[0], lambda: memory.__setitem__(0, 5)


def in_an_array():
    memory = array.array("d", [2.0])
    return lambda x: x * memory[0], lambda: memory.__setitem__(0, 5.0)


def in_a_number_of_c():
    memory = ctypes.c_double(2.0)
    return lambda x: x * memory.value, lambda: setattr(memory, "value", 5.0)


CHANGES = [on_the_class, by_a_descriptor, by_getattr, by_an_operator, of_the_function, behind_a_weak_reference]
CHANGES += [of_the_context, behind_a_proxy, in_a_bytearray, in_an_array, in_a_number_of_c]


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__)
def test_a_number_that_changes(make):
    def made():
        func, change = make()

        def call(f, i):
            if i == 2:
                change()
            return f(DATA[i])

        return func, [lambda f, i=i: call(f, i) for i in range(5)], lambda: ()

    captured = both(made)
    assert (captured.captures, captured.replays) == (2, 3)


def test_modes_that_a_call_leaves_behind():
    def made():
        def func(x):
            torch.set_grad_enabled(False)
            return x * 2

        def call(f, x):
            try:
                return f(x), torch.is_grad_enabled()
            finally:
                torch.set_grad_enabled(True)

        return func, [lambda f, x=x: call(f, x) for x in DATA], lambda: ()

    assert "a mode" in next(iter(both(made).eager))


def test_a_result_that_takes_gradients():
    def made():
        def func(x):
            y = (x * 1).requires_grad_()
            return y, (y * y).sum()

        def call(f, x):
            y, total = f(x)
            total.backward()
            return y.grad

        return func, [lambda f, x=x: call(f, x) for x in DATA], lambda: ()

    assert "made to take gradients" in next(iter(both(made).eager))


def test_a_list_that_was_there_before_is_returned():
    kept = []

    def func(x):
        return kept, x * 2

    captured = shardwise.capture(func)
    assert all(captured(x)[0] is kept for x in DATA) and captured.eager


def test_two_threads_write_at_once():
    """Each thread has a program of its own, and what stands in for `print` and `zero_grad` is gone afterwards."""
    both_inside, met, found = threading.Barrier(2, timeout=60), set(), {}

    def work(number):
        model = module(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x):
            if number not in met:
                met.add(number)
                both_inside.wait()
            optimizer.zero_grad()
            loss = (model(x) * (number + 1)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach()

        call = shardwise.capture(step)
        losses = [call(x).full_tensor().item() for x in DATA]
        found[number] = losses, scheduler.last_epoch

    before = builtins.print, torch.optim.Optimizer.zero_grad, torch.optim.lr_scheduler.ExponentialLR.step
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before == (builtins.print, torch.optim.Optimizer.zero_grad, torch.optim.lr_scheduler.ExponentialLR.step)
    assert all(epoch == 5 and len(losses) == 5 for losses, epoch in found.values())
    assert found[0][0][0] * 4 == pytest.approx(found[1][0][0])
