"""What a captured call reads of torch's own objects, of arguments and of settings of libraries is another at the next."""

import dataclasses
import functools
import operator
import os
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import shardwise
from tests.captures.common import batches, both, laid_out, module

DATA = [laid_out(x) for x in batches(4)]


class Rated(torch.optim.SGD):
    rate = 2.0

    def shown(self):
        return self.rate * self.more["times"]

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return super().step(closure)


class Number(float):
    """A number with an attribute, which is equal to others whatever that is."""


def optimizer(kind=torch.optim.SGD):
    found = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    found.more = {"times": 1.0}
    return found


def attribute(make, name, value=5.0, before=2.0):
    """An attribute of an object of torch's is set."""

    def case(patch):
        item = make()
        if not hasattr(item, name):
            setattr(item, name, before)
        read = operator.attrgetter(name)
        return (lambda x: x * read(item)), lambda: setattr(item, name, value)

    return case


def scheduler():
    return torch.optim.lr_scheduler.StepLR(optimizer(), 3)


def method_of_an_own_optimizer(patch):
    item = optimizer(Rated)
    return (lambda x: x * item.shown()), lambda: setattr(item, "rate", 5.0)


def class_of_an_own_optimizer(patch):
    item = optimizer(Rated)
    return (lambda x: x * item.shown()), lambda: patch.setattr(Rated, "rate", 5.0)


def defaults_of_an_optimizer(patch):
    item = optimizer()
    return (lambda x: x * item.defaults["lr"]), lambda: item.defaults.update(lr=5.0)


def state_of_an_optimizer(patch):
    item = optimizer()
    return (lambda x: x * (len(item.state) + 1)), lambda: item.state.update({torch.ones(1): {}})


def method_of_an_object(patch):
    net = module(nn.Linear(8, 8))
    item = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(x):
        item.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        item.step()
        return loss.detach()

    return train, lambda: setattr(item, "zero_grad", lambda: None)


def switched_off(patch):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return (lambda x: scaler.scale(x)), lambda: setattr(scaler, "_enabled", False)


def number_with_an_attribute(patch):
    number = Number(3.0)
    number.times = 2.0
    return (lambda x: x * number.times), lambda: setattr(number, "times", 5.0)


def printed_array(patch):
    number = np.array([1.23456789])

    def change():
        before = np.get_printoptions()
        np.set_printoptions(precision=2)
        CLEAN.append(lambda: np.set_printoptions(**before))

    return (lambda x: x * float(str(number)[1:-1])), change


CLEAN = []


def division_by_zero(patch):
    one = np.array([1.0])

    def func(x):
        try:
            one / 0.0
        except FloatingPointError:
            return x * 2
        return x * 3

    def change():
        before = np.seterr(divide="raise")
        CLEAN.append(lambda: np.seterr(**before))

    CLEAN.append(functools.partial(np.seterr, **np.seterr(divide="ignore")))
    return func, change


def warnings_that_are_errors(patch):
    def func(x):
        try:
            warnings.warn("careful", stacklevel=1)
        except UserWarning:
            return x * 2
        return x * 3

    patch.setattr(warnings, "filters", [("ignore", None, Warning, None, 0)])
    return func, lambda: patch.setattr(warnings, "filters", [("error", None, Warning, None, 0)])


def warnings_that_are_counted(patch):
    def func(x):
        with warnings.catch_warnings(record=True) as found:
            warnings.warn("careful", stacklevel=1)
        return x * (len(found) + 1)

    patch.setattr(warnings, "filters", [("always", None, Warning, None, 0)])
    return func, lambda: patch.setattr(warnings, "filters", [("ignore", None, Warning, None, 0)])


def bytes_of_the_environment(patch):
    patch.setenv("SCALE", "2")
    return (lambda x: x * float(os.environb[b"SCALE"])), lambda: patch.setenv("SCALE", "5")


def sign(name, func):
    """An operator of torch.Tensor is replaced."""

    def case(patch):
        before = getattr(torch.Tensor, name)
        return func, lambda: patch.setattr(torch.Tensor, name, lambda *args: before(before(*args), *args[1:]))

    return case


CASES = {
    "attribute_of_an_optimizer": attribute(optimizer, "scale"),
    "attribute_of_a_scheduler": attribute(scheduler, "gamma"),
    "counter_of_a_scheduler": attribute(scheduler, "_step_count", 5),
    "attribute_of_a_distribution": attribute(lambda: torch.distributions.Uniform(0.0, 1.0), "scale"),
    "mul": sign("__mul__", lambda x: x * 2),
    "radd": sign("__radd__", lambda x: 1 + x),
    "pow": sign("__pow__", lambda x: x**2),
    "neg": sign("__neg__", lambda x: -x),
    "lt": sign("__lt__", lambda x: (x < 0) * 1.0),
    **{
        make.__name__: make
        for make in (
            *(method_of_an_own_optimizer, class_of_an_own_optimizer, defaults_of_an_optimizer, state_of_an_optimizer),
            *(method_of_an_object, switched_off, number_with_an_attribute, printed_array, division_by_zero),
            *(warnings_that_are_errors, warnings_that_are_counted, bytes_of_the_environment),
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_no_call_keeps_the_old(name, monkeypatch):
    found = []
    for captured in (False, True):
        with monkeypatch.context() as patch:
            try:
                func, change = CASES[name](patch)
                called = shardwise.capture(func) if captured else func
                results = [called(x).full_tensor() for x in DATA[:2]]
                change()
                found.append([*results, *(called(x).full_tensor() for x in DATA[1:])])
            finally:
                while CLEAN:
                    CLEAN.pop()()
    assert all(map(torch.equal, *found))


def test_an_own_optimizer_that_counts_is_replayed():
    """Its step is Python that every run makes: what that keeps is no variable of the function."""

    def make():
        net = module(nn.Linear(8, 8))
        own = optimizer(Rated)
        own.add_param_group({"params": list(net.parameters())})

        def train(x):
            own.zero_grad()
            loss = net(x).square().mean() * own.shown()
            loss.backward()
            own.step()
            return loss.detach()

        return train, None, lambda: [*net.parameters(), *(s["count"] for s in own.state.values())]

    assert both(make).replays == 3


# -- arguments ------------------------------------------------------------------------------------------------------
def with_attribute(make):
    def case(i, x):
        given = make(x)
        given.scale = float(1 + i // 2)
        return given

    return case


def with_gradient(make):
    def case(i, x):
        given = make(x)
        if i % 2:
            given.grad = torch.ones_like(given) * i
        return given

    return case


def frozen(i, x):
    return nn.Parameter(x, requires_grad=False) if i % 2 else x


@pytest.mark.parametrize(
    "given",
    [
        *(with_attribute(make) for make in (torch.clone, laid_out, nn.Parameter, lambda x: nn.Parameter(laid_out(x)))),
        *(with_gradient(make) for make in (torch.clone, laid_out)),
        frozen,
    ],
)
def test_what_arguments_carry(given):
    def make():
        def read(x):
            gradient = 1.0 if x.grad is None else x.grad
            return x.detach() * getattr(x, "scale", 1.0) * gradient * (2.0 if isinstance(x, nn.Parameter) else 3.0)

        return read, [lambda f, i=i, x=x: f(given(i, x)) for i, x in enumerate(batches(4))], lambda: ()

    captured = both(make)
    assert (captured.captures, captured.replays, captured.eager) == (2, 2, {})


@pytest.mark.parametrize("make_one", [torch.clone, laid_out])
def test_an_attribute_that_the_call_sets_on_a_tensor(make_one):
    def make():
        around = make_one(torch.ones(5, 8))

        def mark(x):
            x.seen = around.seen = getattr(around, "seen", 0) + 1
            return x * 2

        def call(f, x):
            given = make_one(x)
            return f(given), given.seen, around.seen

        return mark, [lambda f, x=x: call(f, x) for x in batches()], lambda: ()

    assert both(make).replays == 0


@dataclasses.dataclass(frozen=True)
class Parts:
    """Something that has a hash, and holds what has none."""

    numbers: list[float]

    def __hash__(self):
        return 1


def test_an_argument_that_holds_what_has_no_hash():
    captured = shardwise.capture(lambda x, parts: x * parts.numbers[0])
    x, parts = laid_out(torch.ones(4)), Parts([2.0])
    for value in (2.0, 3.0):
        parts.numbers[0] = value
        assert torch.equal(captured(x, parts).full_tensor(), torch.full((4,), value))
    assert captured.eager == {"an argument of type Parts has no hash": 2}


def test_a_method_that_is_captured_in_its_class():
    class Scaled:
        def __init__(self, scale):
            self.scale = scale

        @shardwise.capture
        def forward(self, x):
            return x * self.scale

    one, other, x = Scaled(2.0), Scaled(3.0), laid_out(torch.ones(4))
    for _ in range(3):
        assert torch.equal(one.forward(x).full_tensor(), torch.full((4,), 2.0))
        assert torch.equal(other.forward(x).full_tensor(), torch.full((4,), 3.0))
    assert (Scaled.forward.captures, one.forward.replays) == (2, 4)


def test_anomalies_are_looked_for_in_an_eager_run():
    net = module(nn.Linear(8, 8))

    def step(x):
        (net(x) * 0).sqrt().sum().backward()

    captured = shardwise.capture(step)
    for x in DATA[:3]:
        captured(x)
    with pytest.warns(UserWarning), torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan"):
        captured(DATA[0])
    assert captured.replays == 1


@pytest.mark.parametrize("change", ["load_state_dict", "double"])
def test_tensors_that_torch_swaps_in_the_call(change):
    def make():
        net = nn.Linear(8, 8)
        nn.init.ones_(net.weight), nn.init.ones_(net.bias)
        values = {name: value * 2 for name, value in net.state_dict().items()}

        def step(x):
            torch.__future__.set_swap_module_params_on_conversion(True)
            net.load_state_dict(values) if change == "load_state_dict" else net.double().float()
            torch.__future__.set_swap_module_params_on_conversion(False)
            return net(x).detach()

        return step, None, lambda: list(net.parameters())

    assert both(make).eager
