"""What a captured call read is replaced: classes, functions of torch and of Python, tensors. No call keeps the old."""

import builtins
import contextvars
import decimal
import math
import random
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from tests.captures.common import batches, laid_out, module

DATA = [laid_out(x) for x in batches(4)]


class Base:
    factor = 2.0

    @property
    def shown(self):
        return 2.0

    def scale(self):
        return 2.0


def with_class(read, change):
    """A number by an object of a class that has it from another class, and what changes that."""

    def make(monkeypatch):
        own = type("Own", (Base,), {"__module__": __name__})
        item = own()
        return (lambda x: x * read(item)), lambda: change(item, own)

    return make


class Other:
    factor = 5.0

    def scale(self):
        return 5.0


def of_a_module(read, change):
    def make(monkeypatch):
        net = module(nn.Linear(8, 4), nn.ReLU())
        return (lambda x: read(net, x)), lambda: change(net, monkeypatch)

    return make


class Asking(nn.Module):
    def forward(self, x):
        return x * getattr(self, "more", 2.0)


class Taught:
    """Answers for torch's functions."""

    factor = 2.0

    @classmethod
    def __torch_function__(cls, func, kinds, args=(), kwargs=None):
        return args[0] * cls.factor


def held_by(make_holder, read):
    """A number of an object that only a container has."""

    def make(monkeypatch):
        own = Base()
        own.factor = 2.0
        holder = make_holder(own)
        return (lambda x: x * read(holder)), lambda: setattr(own, "factor", 5.0)

    return make


def added_buffer(monkeypatch):
    asking = Asking()
    return (lambda x: asking(x)), lambda: asking.register_buffer("more", torch.tensor(5.0))


def class_of_a_module(monkeypatch):
    last = nn.ReLU()
    return (lambda x: last(x)), lambda: setattr(last, "__class__", nn.Tanh)


def answers_for_torch(monkeypatch):
    monkeypatch.setattr(Taught, "factor", 2.0)
    taught = Taught()
    return (lambda x: torch.mul(x, taught)), lambda: monkeypatch.setattr(Taught, "factor", 5.0)


def replaced(owner, name, func):
    """A function of somebody else's that the program replaces."""

    def make(monkeypatch):
        before = getattr(owner, name)
        return func, lambda: monkeypatch.setattr(owner, name, lambda *args: before(*args) * 3)

    return make


def method_of_tensors(monkeypatch):
    return (lambda x: x.tanh()), lambda: monkeypatch.setattr(torch.Tensor, "tanh", lambda x: x * 3)


def readonly_memory(monkeypatch):
    memory = bytearray(b"\x02")
    seen = memoryview(memory).toreadonly()
    return (lambda x: x * seen[0]), lambda: memory.__setitem__(0, 5)


def default_of_a_context(monkeypatch):
    variable = contextvars.ContextVar("scale", default=[2.0])  # noqa: B039
    return (lambda x: x * variable.get()[0]), lambda: variable.get().__setitem__(0, 5.0)


def rounding(monkeypatch):
    third = lambda: float(decimal.Decimal(1) / decimal.Decimal(3))  # noqa: E731
    return (lambda x: x * third()), lambda: monkeypatch.setattr(decimal.getcontext(), "prec", 3)


def state_of_python(monkeypatch):
    random.seed(0)
    return (lambda x: x * (sum(random.getstate()[1]) % 7 + 1)), lambda: random.seed(1)


def state_of_numpy(monkeypatch):
    drawn = np.random.default_rng(0)
    return (lambda x: x * (drawn.bit_generator.state["state"]["state"] % 7 + 1)), drawn.random


def seed_of_a_generator(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    return (lambda x: x * generator.initial_seed()), lambda: generator.manual_seed(5)


def locked(monkeypatch):
    lock = threading.Lock()
    return (lambda x: x * (2.0 if lock.locked() else 3.0)), lock.acquire


def shape_of_a_plain_tensor(monkeypatch):
    plain = torch.ones(2)
    return (lambda x: x * plain.shape[0]), lambda: plain.resize_(5)


def attribute_of_a_tensor(monkeypatch):
    tensor = laid_out(torch.ones(5, 8))
    tensor.scale = 2.0
    return (lambda x: x * tensor.scale), lambda: setattr(tensor, "scale", 5.0)


def attribute_of_a_parameter(monkeypatch):
    net = module(nn.Linear(8, 4))
    net[0].weight.scale = 2.0
    return (lambda x: net(x) * net[0].weight.scale), lambda: setattr(net[0].weight, "scale", 5.0)


def swapped_outside(monkeypatch):
    one, other = laid_out(torch.ones(5, 8)), laid_out(torch.full((5, 8), 5.0))
    return (lambda x: x * one), lambda: torch.utils.swap_tensors(one, other)


def swapped_inside(monkeypatch):
    one, other = torch.ones(8), torch.full((8,), 5.0)

    def func(x):
        y = x * one
        torch.utils.swap_tensors(one, other)
        return y + one

    return func, lambda: None


def distributed_swapped_inside(monkeypatch):
    one, other = laid_out(torch.ones(5, 8)), laid_out(torch.full((5, 8), 5.0))

    def func(x):
        torch.utils.swap_tensors(one, other)
        return x * one

    return func, lambda: None


CASES = {
    "class_attribute": with_class(lambda i: i.factor, lambda i, own: setattr(own, "factor", 5.0)),
    "property": with_class(lambda i: i.shown, lambda i, own: setattr(own, "shown", property(lambda self: 5.0))),
    "method": with_class(lambda i: i.scale(), lambda i, own: setattr(own, "scale", lambda self: 5.0)),
    "bases": with_class(lambda i: i.factor, lambda i, own: setattr(own, "__bases__", (Other,))),
    "class_of_an_object": with_class(lambda i: i.scale(), lambda i, own: setattr(i, "__class__", Other)),
    "forward_of_torch": of_a_module(
        lambda net, x: net(x), lambda net, patch: patch.setattr(nn.ReLU, "forward", lambda self, x: x * 3)
    ),
    "function_of_a_module": of_a_module(
        lambda net, x: net(x), lambda net, patch: patch.setattr(F, "linear", lambda x, w, b: x @ w.t() * 3)
    ),
    "call_of_modules": of_a_module(
        lambda net, x: net(x),
        lambda net, patch: patch.setattr(
            nn.Module, "__call__", lambda self, *args, before=nn.Module.__call__: before(self, *args) + 1
        ),
    ),
    "added_buffer": added_buffer,
    "class_of_a_module": class_of_a_module,
    "answers_for_torch": answers_for_torch,
    "math": replaced(math, "sqrt", lambda x: x * math.sqrt(4.0)),
    "torch": replaced(torch, "tanh", lambda x: torch.tanh(x)),
    "functional": replaced(F, "gelu", lambda x: F.gelu(x)),
    "method_of_tensors": method_of_tensors,
    "builtin": replaced(builtins, "abs", lambda x: x * abs(-2.0)),
    "set": held_by(lambda item: {item}, lambda held: sum(i.factor for i in held)),
    "frozenset": held_by(lambda item: frozenset([item]), lambda held: sum(i.factor for i in held)),
    "keys": held_by(lambda item: {item: 1}, lambda held: sum(i.factor for i in held)),
    "array": held_by(lambda item: np.array([item]), lambda held: held[0].factor),
    "weak_keys": held_by(
        lambda item: weakref.WeakKeyDictionary({item: item.factor}), lambda held: sum(i.factor for i in held)
    ),
    **{
        make.__name__: make
        for make in (
            *(readonly_memory, default_of_a_context, rounding, state_of_python, state_of_numpy, seed_of_a_generator),
            *(locked, shape_of_a_plain_tensor, attribute_of_a_tensor, attribute_of_a_parameter),
            *(swapped_outside, swapped_inside, distributed_swapped_inside),
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_no_call_keeps_what_was_replaced(name, monkeypatch):
    found = []
    for captured in (False, True):
        with monkeypatch.context() as patch:
            func, change = CASES[name](patch)
            called = shardwise.capture(func) if captured else func
            results = [called(x).full_tensor() for x in DATA[:2]]
            change()
            found.append([*results, *(called(x).full_tensor() for x in DATA[1:])])
    assert all(map(torch.equal, *found))


def test_conjugates_are_other_arguments():
    captured = shardwise.capture(lambda x: torch.view_as_real(x.resolve_conj()))
    x = laid_out(torch.full((4, 2), 1 + 2j))
    for given in (x, x.conj(), x, x.conj()):
        assert torch.equal(captured(given).full_tensor(), torch.view_as_real(given.full_tensor().resolve_conj()))


def test_what_is_not_replaced_is_replayed():
    """Guards that notice more must not notice what did not happen."""
    net = module(nn.Linear(8, 4), nn.ReLU())
    item = Base()
    captured = shardwise.capture(lambda x: F.gelu(net(x)).tanh() * abs(item.scale()) * math.sqrt(item.factor))
    for x in DATA:
        captured(x)
    assert (captured.captures, captured.replays, captured.eager) == (1, len(DATA) - 1, {})


def test_a_captured_function_is_replayed_while_it_is_recorded(tmp_path):
    """A record replaces how modules are called: that is one more program, not the end of replays."""
    weight, identity = laid_out(torch.ones(8, 8)), nn.Identity()
    captured = shardwise.capture(lambda x: identity(x) @ weight.full_tensor())
    captured(DATA[0])
    with shardwise.debug.record(tmp_path):
        for x in DATA:
            captured(x)
    for x in DATA:
        captured(x)
    assert (captured.captures, captured.eager) == (2, {})
    (rank,) = shardwise.reports.read_run(tmp_path).ranks.values()
    assert len(rank.collectives) == len(DATA) and {e.op for e in rank.ops} <= {"matmul", "full_tensor"}
