"""What a captured function reads in ways that its code shows only in part: replays see it, or the call runs eagerly."""

import dataclasses
import os
import sys
import types
from datetime import datetime
from operator import attrgetter, methodcaller

import pytest
import torch
from torch import nn

import shardwise
from shardwise import Replicate, Shard, distribute_module, distribute_tensor, simulate
from tests.captures.common import MESH, batches, both, laid_out, module
from tests.captures.test_around import changing

number = 1.0
settings = {"scale": 1.0}
elsewhere = types.ModuleType("tests_elsewhere")
elsewhere.scale = 1.0
sys.modules["tests_elsewhere"] = elsewhere
ask = os.getenv


def scale_to(i):
    settings["scale"] = 1.0 + i // 2


class Alike:
    """All objects of this class call themselves equal."""

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 1


def attribute_by_a_getter():
    own, scale = Alike(1.0), attrgetter("scale")
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


def flag_of_a_backend():
    def change(i):
        torch._C._set_cudnn_benchmark(i > 1)  # other tests may have had torch freeze the flag itself

    return changing(change, lambda x: x * (2.0 if torch.backends.cudnn.benchmark else 1.0), left=lambda: [change(0)])


def flag_of_a_part_of_a_backend():
    def change(i):
        torch.backends.cuda.matmul.allow_tf32 = i > 1

    return changing(change, lambda x: x * float(torch.backends.cuda.matmul.allow_tf32), left=lambda: [change(0)])


def method_by_a_caller():
    class Owner:
        scale = 1.0

        def get(self):
            return self.scale

    own, get = Owner(), methodcaller("get")
    return changing(lambda i: setattr(own, "scale", 1.0 + i // 2), lambda x: x * get(own))


def module_that_it_imports():
    def scaled(x):
        import tests_elsewhere

        return x * tests_elsewhere.scale

    return changing(lambda i: setattr(elsewhere, "scale", 1.0 + i // 2), scaled)


def name_that_it_imports():
    def scaled(x):
        from tests_elsewhere import scale

        return x * scale

    return changing(lambda i: setattr(elsewhere, "scale", 1.0 + i // 2), scaled)


def attribute_whose_name_is_made_up():
    own, which = Alike(1.0), ["sca"]
    return changing(lambda i: setattr(own, "scale", 1.0 + i // 2), lambda x: x * getattr(own, which[0] + "le"))


def all_attributes_of_an_object():
    own = Alike(1.0)
    return changing(lambda i: setattr(own, "scale", 1.0 + i // 2), lambda x: x * sum(own.__dict__.values()))


def variable_of_a_function_that_exec_made():
    table = {}
    exec("scale = 1.0\ndef scaled(x): return x * scale", table)
    return changing(lambda i: table.update(scale=1.0 + i // 2), table["scaled"])


def object_that_is_made_in_the_call():
    class Made:
        def __init__(self):
            self.scale = settings["scale"]

    return changing(scale_to, lambda x: x * Made().scale)


def default_of_a_field():
    @dataclasses.dataclass
    class Made:
        scale: float = dataclasses.field(default_factory=lambda: settings["scale"])

    return changing(scale_to, lambda x: x * Made().scale)


def text_of_an_object():
    class Shown:
        def __str__(self):
            return str(settings["scale"])

    shown = Shown()
    return changing(scale_to, lambda x: x * float(f"{shown}"))


def attribute_that_a_metaclass_makes():
    class Meta(type):
        def __getattr__(cls, name):
            return settings["scale"]

    class Kind(metaclass=Meta):
        pass

    return changing(scale_to, lambda x: x * Kind.nowhere)


def environment_by_a_function():
    def change(i):
        os.environ["TESTS_SCALE"] = str(1 + i // 2)

    return changing(change, lambda x: x * float(ask("TESTS_SCALE")), left=lambda: [os.environ.pop("TESTS_SCALE") and 0])


def frozen_dataclass_as_an_argument():
    @dataclasses.dataclass(frozen=True)
    class Given:
        scale: float

    calls = [lambda f, i=i, x=x: f(laid_out(x), Given(1.0 + i // 2)) for i, x in enumerate(batches())]
    return lambda x, given: x * given.scale, calls, lambda: ()


def dataclass_that_is_compared_by_identity():
    @dataclasses.dataclass(eq=False)
    class Given:
        scale: float

    given = Given(1.0)

    def call(f, i, x):
        given.scale = 1.0 + i // 2
        return f(laid_out(x), given)

    calls = [lambda f, i=i, x=x: call(f, i, x) for i, x in enumerate(batches())]
    return lambda x, given: x * given.scale, calls, lambda: ()


def objects_that_call_themselves_equal():
    pair = [Alike(1.0), Alike(2.0)]
    calls = [lambda f, i=i, x=x: f(laid_out(x), pair[i // 2]) for i, x in enumerate(batches())]
    return lambda x, own: x * own.scale, calls, lambda: ()


@pytest.mark.parametrize(
    "make",
    [
        all_attributes_of_an_object,
        attribute_by_a_getter,
        attribute_that_a_metaclass_makes,
        attribute_whose_name_is_made_up,
        dataclass_that_is_compared_by_identity,
        default_of_a_field,
        default_of_a_keyword,
        environment_by_a_function,
        flag_of_a_backend,
        flag_of_a_part_of_a_backend,
        frozen_dataclass_as_an_argument,
        method_by_a_caller,
        module_that_it_imports,
        name_that_it_imports,
        object_that_is_made_in_the_call,
        objects_that_call_themselves_equal,
        text_of_an_object,
        threads_of_torch,
        variable_of_a_function_that_exec_made,
    ],
    ids=lambda make: make.__name__,
)
def test_seen(make):
    captured = both(make)
    assert (captured.captures, captured.replays, captured.eager) == (2, 2, {})


def test_variables_that_no_code_names():
    captured = both(lambda: changing(lambda i: globals().update(number=1.0 + i), lambda x: x * globals()["number"]))
    assert captured.captures == 0 and "calls globals" in next(iter(captured.eager))


def test_equal_defaults_in_a_new_dict():
    def make():
        def scaled(x, *, scale=1.0):
            return x * scale

        return changing(lambda i: setattr(scaled, "__kwdefaults__", {"scale": 1.0 + i // 2}), scaled)

    captured = both(make)
    assert (captured.captures, captured.replays) == (2, 2)


def by_eval(x):
    return x * eval("number")


def from_a_file(x, path="/dev/null"):
    with open(path) as file:
        return x * (1.0 + len(file.read()))


@pytest.mark.parametrize(
    "func, reason",
    [
        (by_eval, "calls eval"),
        (from_a_file, "open may give something else"),
        (lambda x: x * len(os.getcwd()), "getcwd may give something else"),
        (lambda x: x * os.urandom(1)[0], "urandom may give something else"),
        (lambda x: x * datetime.now().year, "now may give something else"),
        (lambda x: x * sys.modules["tests_elsewhere"].scale, "modules may give something else"),
        (lambda x: x * (x._version + 1), "how often a tensor was written"),
    ],
    ids=["eval", "open", "getcwd", "urandom", "now", "modules", "_version"],
)
def test_what_nobody_can_compare(func, reason):
    captured = shardwise.capture(func)
    for x in batches(2):
        captured(laid_out(x))
    assert captured.captures == 0 and reason in next(iter(captured.eager))


def test_names_that_are_constants():
    """A counter beside what is read does not have the function captured again."""
    own = Alike(1.0)
    own.count = 0
    captured = both(lambda: changing(lambda i: setattr(own, "count", i), lambda x: x * getattr(own, "scale", 2.0)))
    assert (captured.captures, captured.replays) == (1, 3)


def test_numbers_that_are_others_at_every_call():
    captured = shardwise.capture(lambda x, number: x * number)
    data = [laid_out(x) for x in batches(1)]
    for i in range(12):
        assert torch.equal(captured(data[0], float(i)).full_tensor(), data[0].full_tensor() * i)
    assert captured.captures == 8 and "numbers as tensors" in next(iter(captured.eager))
    assert captured.replays == 0
    for _ in range(10):
        captured(data[0], 3.0)
    captured(data[0], 100.0)  # by now most calls are replays, so that one more is worth it
    assert (captured.captures, captured.replays) == (9, 10)


def test_a_step_that_fails_and_is_caught():
    """Nothing is written down behind it."""

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no")

    net = module(nn.Linear(8, 8))
    optimizer = Failing(net.parameters(), lr=0.1)

    def func(x):
        try:
            optimizer.step()
        except ValueError:
            x = x * 2
        return net(x).detach() + 1

    captured = shardwise.capture(func)
    for x in batches(3):
        assert torch.equal(captured(laid_out(x)).full_tensor(), func(laid_out(x)).full_tensor())
    assert captured.captures == 0 and "a step of Failing has failed" in next(iter(captured.eager))


# -- gradients of several uses ---------------------------------------------------------------------------------------
def together(f, net, a, b):
    net.zero_grad()
    (f(a) * f(b)).sum().backward()
    return [p.grad for p in net.parameters()]


def test_two_results_that_are_differentiated_together():
    """An eager run adds the gradients of both uses up on every rank, and the ranks theirs once."""

    def make():
        net, data = module(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), [laid_out(x) for x in batches(4)]
        return lambda x: net(net(x)), [lambda f, i=i: together(f, net, data[i], data[i + 1]) for i in range(3)], list

    captured = both(make)
    assert captured.captures <= 1 and captured.replays == 0
    assert "an earlier call may still be differentiated" in next(iter(captured.eager))


def test_many_uses_in_two_results_where_nothing_moves():
    """The gradients of all uses are added up in the order of an eager run."""
    mesh = simulate(1)

    def make():
        torch.manual_seed(0)
        net = distribute_module(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), mesh)
        data = [distribute_tensor(x, mesh, [Shard(0)]) for x in batches(4)]

        def func(x):
            return net(net(net(x)) + net(x)) * net[0].weight.sum()

        return func, [lambda f, i=i: together(f, net, data[i], data[i + 1]) for i in range(3)], list

    captured = both(make)
    assert captured.captures == 1 and captured.replays >= 4 and not captured.eager


def test_results_that_wait_no_more():
    """Results that are dropped, or differentiated, keep no later call from being replayed."""
    net = module(nn.Linear(8, 8))
    captured = shardwise.capture(net)
    for i, x in enumerate(batches(6)):
        out = captured(laid_out(x))
        if i % 2:
            out.sum().backward()
        del out
    assert (captured.captures, captured.replays, captured.eager) == (1, 5, {})


def test_a_result_that_cannot_be_differentiated():
    """It is no error where the program does not differentiate it."""
    net = module(nn.Linear(8, 8))
    weight = distribute_tensor(torch.ones(8, 8), MESH, [Replicate(), Replicate()])

    def func(x):
        out = net(x * 1.0) @ weight.requires_grad_(False)
        hidden = net(x).tanh()
        hidden.mul_(2)
        return out + hidden

    x = laid_out(batches(1)[0])
    expected = func(x)
    captured = shardwise.capture(func)
    assert torch.equal(captured(x).full_tensor(), expected.full_tensor())
    assert "cannot be differentiated" in next(iter(captured.eager))


def test_names_that_only_look_like_those_of_the_library():
    """`modules` of a model and `seed` of an object have nothing to do with `sys.modules` and files."""
    net = module(nn.Linear(8, 8))
    own = Alike(2.0)
    own.seed = own.now = own.open = 1.0

    def number_of_layers():
        return len(list(net.modules()))

    def func(x):
        return net(x).detach() * own.seed * own.now * own.open * number_of_layers() * sys.maxsize.bit_length()

    captured = both(lambda: func)
    assert (captured.captures, captured.eager) == (1, {})
