"""Python around a captured function changes: replays see it, or the call runs eagerly and says why."""

import functools
import itertools
import random
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import CaptureError, Replicate
from tests.captures.common import batches, both, laid_out, module

factor = 1.0
options = types.SimpleNamespace(scale=1.0)
step = 0  # a counter of the script's, which a function that calls optimizer.step() does not read


def scaled_elsewhere(x):
    return x * factor


class Scaled(nn.Module):
    shift = 0.0

    def __init__(self):
        super().__init__()
        self.scale, self.table, self.rows = 1.0, {"scale": 1.0}, [1.0]

    def forward(self, x):
        found = x * self.scale * self.table["scale"] * self.rows[0] + self.shift
        return scaled_elsewhere(found) * getattr(self, "more", 1.0)


def changing(change, func, count=4, left=lambda: ()):
    """`func`, called after `change(i)` each time."""

    def call(f, i, x):
        change(i)
        return f(laid_out(x))

    return func, [lambda f, i=i, x=x: call(f, i, x) for i, x in enumerate(batches(count))], left


# -- what is seen ---------------------------------------------------------------------------------------------------
def variable_of_a_function_that_is_called():
    return changing(lambda i: globals().update(factor=1.0 + i // 2), lambda x: scaled_elsewhere(x))


def attribute_of_an_object():
    return changing(lambda i: setattr(options, "scale", 1.0 + i // 2), lambda x: x * options.scale)


def entry_of_a_dict_of_a_module():
    scaled = Scaled()
    return changing(lambda i: scaled.table.update(scale=1.0 + i // 2), lambda x: scaled(x))


def entry_of_a_list_of_a_module():
    scaled = Scaled()
    return changing(lambda i: scaled.rows.__setitem__(0, 1.0 + i // 2), lambda x: scaled(x))


def attribute_that_is_new():
    scaled = Scaled()
    return changing(lambda i: setattr(scaled, "more", 1.0 + i // 2) if i > 1 else None, lambda x: scaled(x))


def attribute_of_a_class():
    own = type("Own", (Scaled,), {"__module__": __name__})
    scaled = own()
    return changing(lambda i: setattr(own, "shift", i // 2), lambda x: scaled(x))


def flag_of_a_module_that_is_not_called():
    drop = nn.Dropout(0.5)
    return changing(lambda i: drop.train(i < 2), lambda x: F.dropout(x, 0.5, drop.training))


def tensor_in_a_list():
    weights = [laid_out(torch.ones(8), [Replicate(), Replicate()])]

    def change(i):
        if i == 2:
            weights[0] = weights[0] * 2

    return changing(change, lambda x: x * weights[0])


def child_of_a_module():
    model = module(nn.Linear(8, 8), nn.ReLU())
    return changing(lambda i: model.__setitem__(1, nn.Tanh()) if i == 2 else None, lambda x: model(x).detach())


def forward_of_a_module():
    model = module(nn.Linear(8, 8), nn.ReLU())
    return changing(lambda i: setattr(model[1], "forward", torch.sin) if i == 2 else None, lambda x: model(x).detach())


def arguments_of_a_partial():
    func = functools.partial(lambda x, scale: x * scale, scale=1.0)
    return changing(lambda i: func.keywords.update(scale=1.0 + i // 2), func)


def list_for_a_tensor():
    numbers = [1.0, 2.0]
    return changing(lambda i: numbers.__setitem__(0, float(i // 2)), lambda x: x * torch.tensor(numbers).sum())


def array_for_a_tensor():
    numbers = np.ones(8, dtype=np.float32)
    return changing(lambda i: numbers.__setitem__(0, float(i // 2)), lambda x: x * torch.tensor(numbers))


def sign_of_zero():
    return changing(lambda i: globals().update(factor=-0.0 if i > 1 else 0.0), lambda x: 1 / (x.abs() * factor))


def layout_of_a_tensor():
    weight = laid_out(torch.arange(64.0).view(8, 8), [Replicate(), Replicate()])
    return changing(lambda i: weight.t_() if i == 2 else None, lambda x: x @ weight)


def whether_a_tensor_takes_gradients():
    weight = laid_out(torch.ones(8), [Replicate(), Replicate()])
    return changing(lambda i: weight.requires_grad_(i > 1), lambda x: (x * weight).requires_grad)


def kernels_of_attention():
    def change(i):
        torch.backends.cuda.enable_flash_sdp(i < 2)

    def attend(x):
        q = x.view(1, 1, 5, 8)
        return F.scaled_dot_product_attention(q, q, q)

    return changing(change, attend, left=lambda: [change(0)])


SEEN = [variable_of_a_function_that_is_called, attribute_of_an_object, entry_of_a_dict_of_a_module]
SEEN += [entry_of_a_list_of_a_module, attribute_that_is_new, attribute_of_a_class, flag_of_a_module_that_is_not_called]
SEEN += [tensor_in_a_list, child_of_a_module, forward_of_a_module, arguments_of_a_partial, list_for_a_tensor]
SEEN += [array_for_a_tensor, sign_of_zero, layout_of_a_tensor, whether_a_tensor_takes_gradients, kernels_of_attention]


@pytest.mark.parametrize("make", SEEN, ids=lambda make: make.__name__)
def test_seen(make):
    captured = both(make)
    assert (captured.captures, captured.replays, captured.eager) == (2, 2, {})


def test_a_counter_of_the_script_is_no_variable_of_the_function():
    def make():
        model = module(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return changing(lambda i: globals().update(step=i), train, 6, lambda: list(model.parameters()))

    assert both(make).replays == 5


# -- what runs eagerly ----------------------------------------------------------------------------------------------
def module_that_counts():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    counting = Counting()
    return lambda x: counting(x), None, lambda: [counting.calls]


def list_that_grows():
    seen = []

    def count(x):
        seen.append(1)
        return x * len(seen)

    return count, None, lambda: seen


def object_that_is_written():
    own = types.SimpleNamespace(calls=0)

    def count(x, own):
        own.calls += 1
        return x + 1

    return count, [lambda f, x=x: f(laid_out(x), own) for x in batches()], lambda: [own.calls]


def iterator():
    numbers = itertools.count()
    return lambda x: x * next(numbers)


def numbers_of_python():
    random.seed(0)
    return lambda x: x * random.random()


def seed_inside():
    def draw(x):
        torch.manual_seed(0)
        return F.dropout(x, 0.5) + torch.rand(8)

    return draw


def stream_forked_inside():
    def draw(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            noise = torch.rand(8)
        return x * noise + torch.rand(8)

    return draw


def own_generator_of_distributed_numbers():
    generator = torch.Generator().manual_seed(5)
    return lambda x: x + x.clone().uniform_(generator=generator)


def tensor_of_tensors():
    number = torch.zeros(())
    return changing(lambda i: number.fill_(i), lambda x: x * torch.tensor([number, 2.0])[0])


def list_argument():
    def double(x, into):
        into.append(x * 2)

    def call(f, x):
        into = []
        f(laid_out(x), into)
        return into

    return double, [lambda f, x=x: call(f, x) for x in batches()], lambda: ()


def dict_argument():
    def take(given):
        given["taken"] = True
        return given.pop("x") * 2

    def call(f, x):
        given = {"x": laid_out(x)}
        return f(given), given

    return take, [lambda f, x=x: call(f, x) for x in batches()], lambda: ()


def argument_that_is_made_to_take_gradients():
    def penalty(x):
        x.requires_grad_()
        x.square().sum().backward()

    def call(f, x):
        own = laid_out(x)
        f(own)
        return own.requires_grad, own.grad

    return penalty, [lambda f, x=x: call(f, x) for x in batches()], lambda: ()


EAGER = [module_that_counts, list_that_grows, object_that_is_written, iterator, numbers_of_python, seed_inside]
EAGER += [stream_forked_inside, own_generator_of_distributed_numbers, tensor_of_tensors, list_argument, dict_argument]
EAGER += [argument_that_is_made_to_take_gradients]


@pytest.mark.parametrize("make", EAGER, ids=lambda make: make.__name__)
def test_eager(make):
    captured = both(make)
    assert captured.captures == captured.replays == 0 and captured.eager


@pytest.mark.parametrize("where", ["module", "every module", "parameter", "after accumulation"])
def test_a_hook_that_is_added_later(where):
    seen = []
    model = module(nn.Linear(8, 8))
    weight = model[0].weight

    def train(x):
        model.zero_grad()
        model(x).square().mean().backward()

    captured = shardwise.capture(train)
    for x in batches(4):
        captured(laid_out(x))
    assert captured.replays
    note = lambda *_: seen.append(1)  # noqa: E731
    handle = {
        "module": lambda: model.register_forward_hook(note),
        "every module": lambda: nn.modules.module.register_module_forward_hook(note),
        "parameter": lambda: weight.register_hook(note),
        "after accumulation": lambda: weight.register_post_accumulate_grad_hook(note),
    }[where]()
    try:
        for x in batches(3):
            before = len(seen)
            captured(laid_out(x))
            assert len(seen) > before
    finally:
        handle.remove()


@pytest.mark.parametrize("first", [False, True])
def test_one_tensor_as_two_arguments(first):
    def make():
        def call(f, i, x):
            a = laid_out(x).requires_grad_()
            b = a if (i % 2 == 0) is first else laid_out(x).requires_grad_()
            return f(a, b), a.grad, b.grad

        def run(a, b):
            loss = (a * b).sum()
            loss.backward()
            return loss.detach()

        return run, [lambda f, i=i, x=x: call(f, i, x) for i, x in enumerate(batches())], lambda: ()

    captured = both(make)
    assert (captured.captures, captured.replays) == (2, 2)


@pytest.mark.parametrize("first", [False, True])
def test_an_argument_that_the_function_knows_by_another_name(first):
    def make():
        weight = laid_out(torch.ones(5, 8)).requires_grad_()

        def call(f, i, x):
            weight.grad = None
            a = weight if (i % 2 == 0) is first else laid_out(x).requires_grad_()
            return f(a), a.grad, weight.grad

        def run(a):
            loss = (a * weight * 3).sum()
            loss.backward()
            return loss.detach()

        return run, [lambda f, i=i, x=x: call(f, i, x) for i, x in enumerate(batches())], lambda: ()

    captured = both(make)
    assert (captured.captures, captured.replays) == (2, 2)


def test_parameters_that_an_optimizer_gets_later():
    def make():
        model = module(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

        def train(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        def change(i):
            if i == 3:
                optimizer.add_param_group({"params": list(model[1].parameters())})

        return changing(change, train, 6, lambda: list(model.parameters()))

    assert both(make).replays


def test_a_device_around():
    ones = shardwise.capture(lambda x: torch.ones(3))
    found = []
    for device in ("cpu", "meta", "cpu", "meta"):
        with torch.device(device):
            found.append(ones(1).device.type)
    assert found == ["cpu", "meta", "cpu", "meta"]


def test_words_are_printed_again(capsys):
    def say(x):
        print("again")
        return x + 1

    captured = shardwise.capture(say)
    for x in batches(3):
        captured(laid_out(x))
    assert captured.replays == 2 and capsys.readouterr().out == "again\n" * 3


def test_results_that_are_one_object_or_were_there_before():
    weight = laid_out(torch.ones(8), [Replicate(), Replicate()])

    def run(x):
        y = x * weight
        return y, [y], weight

    captured = shardwise.capture(run)
    for x in batches(3):
        first, (second,), same = captured(laid_out(x))
        assert first is second and same is weight
    assert captured.replays == 2


def test_a_captured_function_inside_of_another():
    def make():
        model = module(nn.Linear(8, 8))
        inner = shardwise.capture(lambda x: model(x).relu() * factor)

        def train(x):
            model.zero_grad()
            loss = inner(x).square().mean()
            loss.backward()
            return loss.detach()

        return changing(lambda i: globals().update(factor=1.0 + i // 3), train, 6)

    assert both(make).eager == {}


def test_many_entries_are_not_compared():
    numbers = list(range(20_000))
    captured = shardwise.capture(lambda x: x * numbers[0])
    captured(laid_out(batches()[0]))
    assert "20000 entries, too many" in next(iter(captured.eager))


@pytest.mark.parametrize("make", [laid_out, torch.clone])
def test_an_argument_that_gets_another_shape(make):
    captured = shardwise.capture(lambda x: x.t_().sum())
    with pytest.raises(CaptureError, match="another shape or layout in the call"):
        captured(make(batches()[0]))
